"""``underwatt profile`` and ``converge``: what a job takes on a device, and how many samples to its target."""

from __future__ import annotations

import json
import math
import sys
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.markup import escape

import underwatt
from underwatt.cli.format import (
    DEVICE_HELP,
    LOG,
    LR_HELP,
    OUT,
    STORE,
    measured_line,
    options_of,
    plain_table,
    progress_bar,
    say_note,
)
from underwatt.jobs.workloads import JOB_HELP
from underwatt.records import to_json
from underwatt.reports.words import duration

if TYPE_CHECKING:
    from collections.abc import Iterator

    from underwatt.api import ConvergeResult, MeasuredProfile

app = typer.Typer()


@app.command("profile")
def profile(
    job: list[str] = typer.Argument(..., metavar="JOB", help=JOB_HELP, show_default=False),
    device: str = typer.Option("", "--device", "-d", help=DEVICE_HELP),
    batch_sizes: str = typer.Option("", "--batch-sizes", "-b", help="Such as 8,16,32; the job's own by default."),
    settings: int = typer.Option(
        12, "--settings", "-n", min=1, help="So many settings, spread over modes and batch sizes ..."
    ),
    modes: str = typer.Option(
        "", "--modes", "-m", help="... or every batch size at: grid (each GPU clock), a number of modes, or a CSV file."
    ),
    store: Path | None = STORE,
    precision: float = typer.Option(0.01, help="Half width of the 95% intervals to measure to, as a share."),
    limit_s: float = typer.Option(60.0, help="Longest time to measure one setting."),
    lr: float | None = typer.Option(None, help="For a command: what {lr} stands for ..."),
    lr_batch_size: int = typer.Option(128, min=1, help=LR_HELP),
    first_beat_s: float = typer.Option(
        300.0, min=1, help="A job that reports no step for so long has failed to start."
    ),
    beat_s: float = typer.Option(120.0, min=0.1, help="A job that reports no further step for so long hangs."),
    as_json: bool = typer.Option(False, "--json", help="For programs: every measurement, when done."),
) -> None:
    """Measure step time and power of a job at several settings; interrupt and run again to go on where it stopped."""
    options = options_of(locals(), "as_json")
    from underwatt.api import ProfileProgress
    from underwatt.store.store import default_store_path

    with _what_was_done_is_kept("what was measured is kept"), progress_bar() as progress:
        bar = progress.add_task("measuring", total=None, left="", visible=False)

        def show(event: object) -> None:
            say_note(event)
            if not isinstance(event, ProfileProgress):
                return
            left = duration(event.left_s, 2)
            if event.last is None:
                title = escape(f"{event.workload.name} on {event.device.name}")
                LOG.print(
                    f"{title}: {event.to_measure} of {event.settings} settings to measure, about {left} of the "
                    f"device's time. [dim]Store: {escape(str(store or default_store_path()))}[/]",
                    soft_wrap=True,
                )
            else:
                progress.console.print(measured_line(event.last), soft_wrap=True)
            progress.update(bar, completed=event.done, total=event.to_measure, left=f"{left} left", visible=True)

        found = underwatt.profile(**options, listener=show)
    _show_profile(found, as_json=as_json)
    if found.now.failed or not found.usable():
        raise typer.Exit(1)


@contextmanager
def _what_was_done_is_kept(what: str) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        LOG.print(f"Interrupted; {what}. Run the same command again to go on.")
        raise


def _show_profile(found: MeasuredProfile, *, as_json: bool) -> None:
    from underwatt.measure.series import smallest_too_large

    if as_json:
        record = {
            "profile": found.number,
            "measured_now": len(found.now.measured),
            "failed": found.now.failed,
            "too_large": found.now.too_large,
            "measurements": found.measurements,
        }
        typer.echo(json.dumps(to_json(record), indent=2))
        return
    table = plain_table("batch", "settings", "samples/s", "watts")
    for size in sorted({m.setting.batch_size for m in found.usable()}):
        mine = [m for m in found.usable() if m.setting.batch_size == size]
        rates = [size / m.step_s for m in mine]
        watts = [m.power_w for m in mine]
        table.add_row(
            str(size), str(len(mine)), f"{min(rates):.1f}–{max(rates):.1f}", f"{min(watts):.1f}–{max(watts):.1f}"
        )
    OUT.print(table)
    new = f"{len(found.now.measured)} settings measured now"
    OUT.print(f"{new}, {len(found.usable())} usable in profile {found.number}.")
    if math.isfinite(limit := smallest_too_large(found.measurements)):
        OUT.print(f"[yellow]Out of memory[/] at batch size {limit}; larger ones were left out.")
    for failed in found.now.failed:
        OUT.print(f"[red]Failed:[/] {failed.setting}: {escape(failed.note)}", soft_wrap=True)


@app.command("converge")
def converge(
    job: str = typer.Argument(..., help="file.py:factory or module:factory."),
    batch_sizes: str = typer.Option(
        "", "--batch-sizes", "-b", help="Such as 8,32,128; spread over the job's by default."
    ),
    points: int = typer.Option(4, min=1, help="How many of the job's batch sizes to train at."),
    seeds: int = typer.Option(3, min=1, help="How many trainings at each."),
    passes: float = typer.Option(
        30,
        min=1,
        help="Give up after so many passes over the data; with more than before, runs given up are made again.",
    ),
    noise_scale: bool = typer.Option(
        False, "--noise-scale", help="Also measure the gradient noise scale, as a second opinion: one more training."
    ),
    workers: int = typer.Option(0, min=0, help="Trainings at once; one a core or GPU by default."),
    store: Path | None = STORE,
    as_json: bool = typer.Option(False, "--json", help="For programs: every run, and the curve."),
) -> None:
    """Train on proxy data until the target at some batch sizes; interrupt and run again to go on where it stopped."""
    options = options_of(locals(), "as_json")
    from underwatt.studies.study import StudyProgress

    # What a job prints is not our answer.
    with redirect_stdout(sys.stderr), _what_was_done_is_kept("finished trainings are kept"), progress_bar() as progress:
        bar = progress.add_task(f"training {escape(job.rpartition(':')[2])}", total=None, left="")

        def show(event: object) -> None:
            say_note(event)
            if not isinstance(event, StudyProgress):
                return
            left = "" if event.left_s is None else f"{duration(event.left_s, 2)} left"
            progress.update(bar, completed=event.made, total=event.total, left=left)
            if event.ended:
                reached = f"{event.samples:,.0f} samples" if math.isfinite(event.samples) else event.ended
                progress.console.print(f"{event.last}: {reached}")

        found = underwatt.converge(**options, listener=show)
    for spec, error in found.failures:
        LOG.print(f"[red]Failed:[/] {spec}: {escape(str(error))}", soft_wrap=True)
    _show_convergence(found, as_json=as_json)
    if noise_scale and found.noise_scale is None:
        LOG.print("[yellow]The gradient noise scale could not be seen in a training of this length.[/]")
    if found.failures:
        raise typer.Exit(1)


def _show_convergence(found: ConvergeResult, *, as_json: bool) -> None:
    rows, scale = found.table(), found.noise_scale
    if as_json:
        record = {"target": found.target, "curve": rows, "runs": found.runs, "noise_scale": scale}
        typer.echo(json.dumps(to_json(record), indent=2))
        return
    table = plain_table("batch", "trainings", "samples to target", "90% interval")
    for row in rows:
        never = not math.isfinite(row["samples"])
        interval = "" if never else f"{row['samples_low90']:,.0f}–{row['samples_high90']:,.0f}"
        needed = "never" if never else f"{row['samples']:,.0f}"
        table.add_row(str(row["batch_size"]), str(row["trained"] or ""), needed, interval)
    OUT.print(table)
    if scale is not None:
        OUT.print(
            f"Gradient noise scale: {scale.samples:,.0f} samples ({scale.samples_low90:,.0f}–"
            f"{scale.samples_high90:,.0f}), at batch size {scale.batch_size}; by the curve, samples double "
            f"at about {found.curve.batch_noise:,.0f}. A second opinion, which the curve does not use.",
            soft_wrap=True,
        )
