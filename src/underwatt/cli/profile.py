"""``underwatt profile`` and ``converge``: what a job takes on a device, and how many samples to its target."""

from __future__ import annotations

import math
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING

from rich.markup import escape
from typer import Argument, Exit, Option, Typer

import underwatt
from underwatt.cli import common
from underwatt.jobs.workloads import JOB_HELP
from underwatt.reports.words import duration

if TYPE_CHECKING:
    from underwatt.api import ConvergeResult, MeasuredProfile

app = Typer()


@app.command("profile")
def profile(
    job: list[str] = Argument(..., metavar="JOB", help=JOB_HELP, show_default=False),
    device: str = common.DEVICE,
    batch_sizes: str = common.BATCH_SIZES,
    settings: int = Option(
        12, "--settings", "-n", min=1, help="So many settings, spread over modes and batch sizes ..."
    ),
    modes: str = Option(
        "", "--modes", "-m", help="... or every batch size at: grid (each GPU clock), a number of modes, or a CSV file."
    ),
    store: Path | None = common.STORE,
    precision: float = Option(0.01, help="Half width of the 95% intervals to measure to, as a share."),
    limit_s: float = Option(60.0, help="Longest time to measure one setting."),
    lr: float | None = common.LR,
    lr_batch_size: int = common.LR_BATCH_SIZE,
    first_beat_s: float = Option(300.0, min=1, help="A job that reports no step for so long has failed to start."),
    beat_s: float = Option(120.0, min=0.1, help="A job that reports no further step for so long hangs."),
    as_json: bool = Option(False, "--json", help="For programs: every measurement, when done."),
) -> None:
    """Measure step time and power of a job at several settings; interrupt and run again to go on where it stopped."""
    options = common.options_of(locals(), "as_json")
    from underwatt.api import ProfileProgress
    from underwatt.store.store import default_store_path

    with common.interruptible("what was measured is"), common.progress_bar() as progress:
        bar = progress.add_task("measuring", total=None, left="", visible=False)

        def show(event: object) -> None:
            common.say_note(event)
            if not isinstance(event, ProfileProgress):
                return
            left = duration(event.left_s, 2)
            if event.last is None:
                title = escape(f"{event.workload.name} on {event.device.name}")
                common.LOG.print(
                    f"{title}: {event.to_measure} of {event.settings} settings to measure, about {left} of the "
                    f"device's time. [dim]Store: {escape(str(store or default_store_path()))}[/]",
                    soft_wrap=True,
                )
            else:
                progress.console.print(common.measured_line(event.last), soft_wrap=True)
            progress.update(bar, completed=event.done, total=event.to_measure, left=f"{left} left", visible=True)

        found = underwatt.profile(**options, listener=show)
    _show_profile(found, as_json=as_json)
    if found.now.failed or not found.usable():
        raise Exit(1)


def _show_profile(found: MeasuredProfile, *, as_json: bool) -> None:
    from underwatt.measure.series import smallest_too_large

    if as_json:
        now = {"measured_now": len(found.now.measured), "failed": found.now.failed, "too_large": found.now.too_large}
        common.say_json({"profile": found.number, **now, "measurements": found.measurements})
        return
    table = common.plain_table("batch", "settings", "samples/s", "watts")
    for size in sorted({m.setting.batch_size for m in found.usable()}):
        mine = [m for m in found.usable() if m.setting.batch_size == size]
        rates = [size / m.step_s for m in mine]
        watts = [m.power_w for m in mine]
        ranges = (f"{min(values):.1f}–{max(values):.1f}" for values in (rates, watts))
        table.add_row(str(size), str(len(mine)), *ranges)
    common.OUT.print(table)
    new = f"{len(found.now.measured)} settings measured now"
    common.OUT.print(f"{new}, {len(found.usable())} usable in profile {found.number}.")
    if math.isfinite(limit := smallest_too_large(found.measurements)):
        common.OUT.print(f"[yellow]Out of memory[/] at batch size {limit}; larger ones were left out.")
    for failed in found.now.failed:
        common.say(f"[red]Failed:[/] {failed.setting}: {escape(failed.note)}")


@app.command("converge")
def converge(
    job: str = Argument(..., help="file.py:factory or module:factory."),
    batch_sizes: str = Option("", "--batch-sizes", "-b", help="Such as 8,32,128; spread over the job's by default."),
    points: int = Option(4, min=1, help="How many of the job's batch sizes to train at."),
    seeds: int = Option(3, min=1, help="How many trainings at each."),
    passes: float = Option(
        30,
        min=1,
        help="Give up after so many passes over the data; with more than before, runs given up are made again.",
    ),
    target: float | None = Option(None, help="The score to train to; the job's own, or one within reach, by default."),
    noise_scale: bool = Option(
        False, "--noise-scale", help="Also measure the gradient noise scale, as a second opinion: one more training."
    ),
    workers: int = Option(0, min=0, help="Trainings at once; one a core or GPU by default."),
    store: Path | None = common.STORE,
    as_json: bool = Option(False, "--json", help="For programs: every run, and the curve."),
) -> None:
    """Train on proxy data until the target at some batch sizes; interrupt and run again to go on where it stopped."""
    options = common.options_of(locals(), "as_json")
    from underwatt.studies.study import StudyProgress

    # What a job prints is not our answer.
    with redirect_stdout(sys.stderr), common.interruptible("finished trainings are"), common.progress_bar() as progress:
        bar = progress.add_task(f"training {escape(job.rpartition(':')[2])}", total=None, left="")

        def show(event: object) -> None:
            common.say_note(event)
            if not isinstance(event, StudyProgress):
                return
            left = "" if event.left_s is None else f"{duration(event.left_s, 2)} left"
            progress.update(bar, completed=event.made, total=event.total, left=left)
            if event.ended:
                reached = f"{event.samples:,.0f} samples" if math.isfinite(event.samples) else event.ended
                progress.console.print(f"{event.last}: {reached}")

        found = underwatt.converge(**options, listener=show)
    for spec, error in found.failures:
        common.LOG.print(f"[red]Failed:[/] {spec}: {escape(str(error))}", soft_wrap=True)
    _show_convergence(found, as_json=as_json)
    if noise_scale and found.noise_scale is None:
        common.LOG.print("[yellow]The gradient noise scale could not be seen in a training of this length.[/]")
    if found.failures:
        raise Exit(1)


def _show_convergence(found: ConvergeResult, *, as_json: bool) -> None:
    rows, scale = found.table(), found.noise_scale
    if as_json:
        record = {"target": found.target, "curve": rows, "runs": found.runs, "noise_scale": scale}
        common.say_json(record)
        return
    table = common.plain_table("batch", "trainings", "samples to target", "90% interval")
    for row in rows:
        never = not math.isfinite(row["samples"])
        interval = "" if never else f"{row['samples_low90']:,.0f}–{row['samples_high90']:,.0f}"
        needed = "never" if never else f"{row['samples']:,.0f}"
        table.add_row(str(row["batch_size"]), str(row["trained"] or ""), needed, interval)
    common.OUT.print(table)
    if scale is not None:
        common.say(
            f"Gradient noise scale: {scale.samples:,.0f} samples ({scale.samples_low90:,.0f}–"
            f"{scale.samples_high90:,.0f}), at batch size {scale.batch_size}; by the curve, samples double "
            f"at about {found.curve.batch_noise:,.0f}. A second opinion, which the curve does not use."
        )
