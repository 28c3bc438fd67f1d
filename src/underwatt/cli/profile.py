"""``underwatt profile``: measure a job on a device, setting by setting."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.markup import escape

from underwatt.cli.devices import DEVICE_HELP
from underwatt.cli.format import duration, plain_table, progress_bar, within
from underwatt.device.base import permitted_space
from underwatt.device.registry import open_device
from underwatt.device.session import Session
from underwatt.errors import InputError
from underwatt.jobs.command import CommandRate, Limits
from underwatt.jobs.workloads import JOB_HELP, choose_workload
from underwatt.measure.measurement import MeasureOptions
from underwatt.measure.series import (
    expected_s,
    grid_modes,
    in_order,
    modes_from_file,
    ordered_settings,
    run_profile,
    smallest_too_large,
    to_measure,
)
from underwatt.predict.base import SettingArray
from underwatt.predict.design import first_settings
from underwatt.records import Measurement, PowerMode, Setting, Status, to_json
from underwatt.store.store import Store, default_store_path

if TYPE_CHECKING:
    from underwatt.device.space import ModeSpace
    from underwatt.measure.series import ProfileOutcome

STORE_HELP = "Where measurements are kept; $UNDERWATT_STORE, or underwatt.db in this folder, by default."
DEFAULT_SETTINGS = 12

_out = Console()
_log = Console(stderr=True)
app = typer.Typer()


@app.callback()
def _group() -> None:
    """Keep this a group, though it has one command."""


@app.command("profile")
def profile(
    job: list[str] = typer.Argument(..., metavar="JOB", help=JOB_HELP, show_default=False),
    device: str = typer.Option("", "--device", "-d", help=DEVICE_HELP),
    batch_sizes: str = typer.Option("", "--batch-sizes", "-b", help="Such as 8,16,32; the job's own by default."),
    count: int = typer.Option(
        DEFAULT_SETTINGS, "--settings", "-n", min=1, help="So many settings, spread over modes and batch sizes ..."
    ),
    modes: str = typer.Option(
        "", "--modes", "-m", help="... or every batch size at: grid (each GPU clock), a number of modes, or a CSV file."
    ),
    store: Path | None = typer.Option(None, "--store", help=STORE_HELP, show_default=False),
    precision: float = typer.Option(0.01, help="Half width of the 95% intervals to measure to, as a share."),
    limit_s: float = typer.Option(60.0, help="Longest time to measure one setting."),
    lr: float | None = typer.Option(None, help="For a command: what {lr} stands for ..."),
    lr_batch_size: int = typer.Option(128, min=1, help="... at this batch size; scaled by its square root elsewhere."),
    first_beat_s: float = typer.Option(
        300.0, min=1, help="A job that reports no step for so long has failed to start."
    ),
    beat_s: float = typer.Option(120.0, min=0.1, help="A job that reports no further step for so long hangs."),
    as_json: bool = typer.Option(False, "--json", help="For programs: every measurement, when done."),
) -> None:
    """Measure step time and power of a job at several settings; interrupt and run again to go on where it stopped."""
    target = open_device(device)
    workload, suggested = choose_workload(
        job, target, rate=CommandRate(lr, lr_batch_size), limits=Limits(first_beat_s=first_beat_s, beat_s=beat_s)
    )
    sizes = parse_batch_sizes(batch_sizes) or suggested
    if not sizes:
        raise InputError("A command does not say which batch sizes to try.", hint="Add for example -b 8,16,32,64.")
    space = permitted_space(target)
    settings = ordered_settings(chosen_modes(modes, space), sizes) if modes else _spread(space, sizes, count)
    options = MeasureOptions(precision=precision, limit_s=limit_s)
    with Store(store or default_store_path()) as kept:
        profile_id = kept.profile_id(target.info, workload.info)
        known = kept.measurements(profile_id)
        left = to_measure(settings, known)
        _log.print(
            f"{escape(f'{workload.info.name} on {target.info.name}')}: {len(left)} of {len(settings)} settings to "
            f"measure, about {duration(expected_s(len(left), known))} of the device's time. "
            f"[dim]Store: {escape(str(kept.path))}[/]",
            soft_wrap=True,
        )
        with Session(target) as session, progress_bar(_log) as progress:
            if session.recovered:
                _log.print("A killed session had left this device changed; it was put back first.")
            bar = progress.add_task("measuring", total=len(left), left=f"{duration(expected_s(len(left), known))} left")
            seen = list(known)

            def watch(found: Measurement, done: int, total: int) -> None:
                seen.append(found)
                progress.update(
                    bar, completed=done, total=total, left=f"{duration(expected_s(total - done, seen))} left"
                )
                progress.console.print(measured_line(found), soft_wrap=True)

            try:
                outcome = run_profile(session, workload, settings, kept, options=options, watch=watch)
            except KeyboardInterrupt:
                _log.print("Interrupted; what was measured is kept. Run the same command again to go on.")
                raise
        everything = kept.measurements(profile_id)
    _report(outcome, everything, profile_id, as_json=as_json)
    if outcome.failed or not any(m.usable for m in everything):
        raise typer.Exit(1)


def parse_batch_sizes(text: str) -> tuple[int, ...]:
    """Batch sizes from a list such as 8,16,32; none from an empty one."""
    try:
        sizes = tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        sizes = (0,)
    if any(size < 1 for size in sizes):
        raise InputError(f"Batch sizes must be whole numbers of at least 1, not {text!r}.", hint="Such as -b 8,16,32.")
    return sizes


def chosen_modes(text: str, space: ModeSpace) -> list[PowerMode]:
    """The modes that ``--modes`` names."""
    if text == "grid":
        return grid_modes(space)
    if text.isdecimal() and int(text) > 0:
        return [setting.mode for setting in _spread(space, (1,), int(text))]
    if Path(text).exists():
        return modes_from_file(Path(text), space)
    raise InputError(f"--modes {text} is neither 'grid', nor a number, nor a file.")


def _spread(space: ModeSpace, sizes: tuple[int, ...], count: int) -> list[Setting]:
    """The settings that tell most about all others; the same ones each time, so that a profile can be gone on with."""
    candidates = SettingArray.product(tuple(knob.name for knob in space.knobs), space.matrix(), sizes)
    rows = range(len(candidates)) if count >= len(candidates) else first_settings(candidates, count)
    return in_order(candidates[int(row)] for row in rows)


def measured_line(found: Measurement) -> str:
    """One measurement as a line for people."""
    if found.usable:
        mark = "[green]✓[/]" if found.status is Status.OK else "[yellow]![/]"
        return (
            f"{mark} {found.setting}: {found.step_s * 1e3:.1f} ms {within(found.step_s_ci95, found.step_s)}, "
            f"{found.power_w:.2f} W {within(found.power_w_ci95, found.power_w)} [dim]{escape(found.note)}[/]"
        )
    return f"[red]✗[/] {found.setting}: {found.status.value.replace('_', ' ')} [dim]{escape(found.note)}[/]"


def _report(outcome: ProfileOutcome, everything: tuple[Measurement, ...], profile_id: int, *, as_json: bool) -> None:
    if as_json:
        record = {
            "profile": profile_id,
            "measured_now": len(outcome.measured),
            "failed": to_json(outcome.failed),
            "too_large": to_json(outcome.too_large),
            "measurements": to_json(everything),
        }
        typer.echo(json.dumps(record, indent=2))
        return
    usable = [m for m in everything if m.usable]
    table = plain_table("batch", "settings", "samples/s", "watts")
    for size in sorted({m.setting.batch_size for m in usable}):
        mine = [m for m in usable if m.setting.batch_size == size]
        rates = [size / m.step_s for m in mine]
        watts = [m.power_w for m in mine]
        table.add_row(
            str(size), str(len(mine)), f"{min(rates):.1f}–{max(rates):.1f}", f"{min(watts):.1f}–{max(watts):.1f}"
        )
    _out.print(table)
    _out.print(f"{len(outcome.measured)} settings measured now, {len(usable)} usable in profile {profile_id}.")
    if math.isfinite(limit := smallest_too_large(everything)):
        _out.print(f"[yellow]Out of memory[/] at batch size {limit}; larger ones were left out.")
    for failed in outcome.failed:
        _out.print(f"[red]Failed:[/] {failed.setting}: {escape(failed.note)}", soft_wrap=True)
