"""``underwatt check``: an owner's first command."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table
from typer import Exit, Option, Typer

import underwatt
from underwatt.cli import common

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from underwatt.drivers.check import CheckReport, KnobTrial

app = Typer()

EPILOG = """\b
Exit codes: 0 ready, or works with limits that are named; 1 not usable, or
something went wrong; 2 the command line makes no sense; 130 interrupted,
with everything put back.
"""


@app.command("check", epilog=EPILOG)
def check(
    device: str = common.DEVICE,
    set_knobs: bool = Option(
        False, "--set", help="Also move each knob and put it back under a short load, and measure a dozen settings."
    ),
    output: Path | None = Option(
        None,
        "--output",
        "-o",
        help="Where to write the file that you can send; underwatt-check-DEVICE.json by default.",
        show_default=False,
    ),
    as_json: bool = Option(False, "--json", help="For programs: what the file holds."),
) -> None:
    """Check a board or GPU: what it can do, whether it is ready, and one file about it that you can send to us."""
    try:
        with common.progress_bar() as progress:
            show = _Show(progress)
            report = underwatt.check(device, set_knobs=set_knobs, listener=show)
    except KeyboardInterrupt:
        common.LOG.print("Interrupted; the device is as it was found.")
        raise
    file = output or Path(f"underwatt-check-{_slug(report.name)}.json")
    report.save(file)
    if as_json:
        print(report.to_text(), end="")
    else:
        _show(report, file)
    if report.verdict.level == "not usable":
        raise Exit(1)


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


class _Show:
    """Shows where a check stands."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._bar: TaskID = progress.add_task("checking", total=None, left="")

    def __call__(self, event: object) -> None:
        from underwatt.api.check import CheckProgress
        from underwatt.records import Measurement
        from underwatt.reports.words import duration

        common.say_note(event)
        if not isinstance(event, CheckProgress):
            return
        left = f"about {duration(event.left_s, 1)} left" if math.isfinite(event.left_s) else ""
        self._progress.update(self._bar, description=event.what, completed=event.done, total=event.total, left=left)
        if isinstance(event.last, Measurement):
            self._progress.console.print(common.measured_line(event.last), soft_wrap=True)
        elif event.last is None and not self._progress.console.is_terminal:
            self._progress.console.print(f"[dim]{escape(event.what)} …[/]", soft_wrap=True)


def _show(report: CheckReport, file: Path) -> None:
    software = ", ".join(f"{name} {version}" for name, version in report.software.items())
    simulated = " [yellow]simulated[/]" if report.simulated else ""
    common.say(f"[bold]{escape(report.name)}[/]{simulated}  [dim]{escape(software)}[/]")
    _show_power(report)
    _show_knobs(report)
    for sensor in report.sensors:
        if sensor.name not in ("power", "temperature"):
            common.say(f"  {sensor.name}: {escape(sensor.detail)}")
    for text in report.held:
        common.say(f"  [yellow]![/] {escape(text)}")
    for trial in report.trials:
        common.say(f"  {_trial_line(trial)}")
    common.say("")
    colour = {"ready": "green", "works, but": "yellow", "not usable": "red"}[report.verdict.level.value]
    common.say(f"[bold {colour}]{escape(report.verdict.text)}[/]")
    for remedy in report.verdict.remedies:
        common.say(f"  [dim]→[/] {escape(remedy)}")
    kib = f"{file.stat().st_size / 1024:.0f} kB"
    common.say(
        f"[dim]Written to {escape(str(file))} ({kib}): no serial number, name, address or folder of yours is in it. "
        f"Please send it to us; `--device check:{escape(str(file))}` opens it.[/]"
    )


def _show_power(report: CheckReport) -> None:
    if not report.idle_w > 0:
        return
    rails = ", ".join(f"{name} {watts:.2f} W" for name, watts in report.rails_w.items())
    of = f" of the {report.power_of}" if report.power_of else ""
    load = f"; {report.load_w:.2f} W under load ({report.load.name})" if report.load_w > 0 else ""
    common.say(f"  power: {report.idle_w:.2f} W at rest{escape(f'{of}{load}')}")
    if rails:
        common.say(f"  rails: {escape(rails)}")
    sensor = report.sensor
    parts = [f"a reading takes {1e3 * sensor.read_s:.1f} ms" if sensor.read_s > 0 else ""]
    parts.append(f"a new value comes every {sensor.period_s:.2f} s" if sensor.period_s > 0 else "")
    if sensor.lag_s >= 0:
        parts.append(f"it follows a change with a lag of {sensor.lag_s:.2f} s (seen at {abs(sensor.step_w):.1f} W)")
    else:
        parts.append("no change of power was clear enough to see how it follows")
    common.say(f"  sensor: {'; '.join(filter(None, parts))}")


def _show_knobs(report: CheckReport) -> None:
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 1))
    for knob in report.knobs:
        mark = "[green]✓[/]" if knob.usable and knob.values else "[red]✗[/]"
        table.add_row(mark, knob.name, escape(knob.detail))
    common.OUT.print(table)


def _trial_line(trial: KnobTrial) -> str:
    moves = "; ".join(
        f"asked {move.asked:g}, ran {move.ran:g} after {1e3 * move.set_s:.0f} ms, {move.power_w:.2f} W"
        for move in trial.moves
    )
    back = f"put back in {1e3 * trial.put_back_s:.0f} ms" if trial.put_back else "[red]not put back[/]"
    return f"{trial.knob}: {'; '.join(filter(None, [moves, escape(trial.note), back]))}"
