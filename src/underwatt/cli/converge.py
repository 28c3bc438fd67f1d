"""``underwatt converge``: samples to the target by batch size, on proxy data."""

from __future__ import annotations

import json
import math
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import typer
from rich.console import Console
from rich.markup import escape

from underwatt.cli.format import duration, plain_table, progress_bar
from underwatt.cli.profile import STORE_HELP, parse_batch_sizes
from underwatt.convergence.curve import fit_convergence
from underwatt.jobs.identity import job_info
from underwatt.jobs.load import load_job
from underwatt.records import to_json
from underwatt.store.store import Store, default_store_path
from underwatt.studies.noise_scale import noise_scale_on_the_way
from underwatt.studies.proxy_training import DEFAULT_PASSES, usual_effort
from underwatt.studies.study import (
    DEFAULT_POINTS,
    DEFAULT_SEEDS,
    StudySettings,
    data_note,
    newest_rates,
    spread_batch_sizes,
    study,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from underwatt.jobs.job import Job
    from underwatt.records import ConvergenceRun
    from underwatt.studies.noise_scale import NoiseScale
    from underwatt.studies.study import StudyProgress

app = typer.Typer()
_out = Console()
_log = Console(stderr=True)


@app.callback()
def _group() -> None:
    """Keep this a group, though it has one command."""


@app.command("converge")
def converge(
    job: str = typer.Argument(..., help="file.py:factory or module:factory."),
    batch_sizes: str = typer.Option(
        "", "--batch-sizes", "-b", help="Such as 8,32,128; spread over the job's by default."
    ),
    points: int = typer.Option(DEFAULT_POINTS, min=1, help="How many of the job's batch sizes to train at."),
    seeds: int = typer.Option(DEFAULT_SEEDS, min=1, help="How many trainings at each."),
    passes: float = typer.Option(
        DEFAULT_PASSES,
        min=1,
        help="Give up after so many passes over the data; with more than before, runs given up are made again.",
    ),
    noise_scale: bool = typer.Option(
        False, "--noise-scale", help="Also measure the gradient noise scale, as a second opinion: one more training."
    ),
    workers: int = typer.Option(0, min=0, help="Trainings at once; one a core or GPU by default."),
    store: Path | None = typer.Option(None, "--store", help=STORE_HELP, show_default=False),
    as_json: bool = typer.Option(False, "--json", help="For programs: every run, and the curve."),
) -> None:
    """Train on proxy data until the target at some batch sizes; interrupt and run again to go on where it stopped."""
    with redirect_stdout(sys.stderr):  # what a job prints is not our answer
        loaded = load_job(job)
        runs, failed = _train(loaded, job, batch_sizes, points, seeds, passes, workers, store or default_store_path())
        scale = noise_scale_on_the_way(loaded, runs) if noise_scale else None
    _report(runs, loaded.target, loaded.batch_sizes, scale, as_json=as_json)
    if noise_scale and scale is None:
        _log.print("[yellow]The gradient noise scale could not be seen in a training of this length.[/]")
    if failed:
        raise typer.Exit(1)


def _train(
    loaded: Job, job: str, batch_sizes: str, points: int, seeds: int, passes: float, workers: int, store: Path
) -> tuple[list[ConvergenceRun], bool]:
    """The runs that count, those made before included, and whether some failed."""
    info = job_info(loaded)
    if note := data_note(loaded):
        _log.print(f"[yellow]{escape(note)}[/]")
    sizes = parse_batch_sizes(batch_sizes) or spread_batch_sizes(loaded.batch_sizes, points)
    settings = StudySettings(sizes, tuple(range(seeds)), usual_effort(loaded, passes=passes), workers or None)
    with Store(store) as kept:
        done = next((runs for workload, runs in kept.convergence() if workload.id == info.id), ())
        with progress_bar(_log) as progress:
            bar = progress.add_task(f"training {escape(info.name)}", total=len(sizes) * seeds, left="")

            def show(state: StudyProgress) -> None:
                left = "" if state.left_s is None else f"{duration(state.left_s)} left"
                progress.update(bar, completed=state.made, total=state.total, left=left)
                if state.ended:
                    reached = f"{state.samples:,.0f} samples" if math.isfinite(state.samples) else state.ended
                    progress.console.print(f"{state.last}: {reached}")

            try:
                result = study(
                    loaded,
                    job,
                    settings,
                    done=done,
                    on_run=lambda run: kept.add_convergence(info, [run]),
                    on_progress=show,
                )
            except KeyboardInterrupt:
                _log.print("Interrupted; finished trainings are kept. Run the same command again to go on.")
                raise
    for spec, error in result.failures:
        _log.print(f"[red]Failed:[/] {spec}: {escape(str(error))}", soft_wrap=True)
    return list(newest_rates([*done, *result.runs])), bool(result.failures)


def _report(
    runs: list[ConvergenceRun],
    target: float,
    batch_sizes: Sequence[int],
    noise_scale: NoiseScale | None,
    *,
    as_json: bool,
) -> None:
    curve = fit_convergence(runs, target)
    sizes = sorted({*batch_sizes, *(run.batch_size for run in runs)})
    mean, _ = curve.predict(sizes)
    low, high = curve.interval(sizes)
    rows = [
        {
            "batch_size": size,
            "trained": sum(run.batch_size == size and run.target == target for run in runs),
            "samples": float(np.exp(middle)),
            "samples_low90": float(bottom),
            "samples_high90": float(top),
        }
        for size, middle, bottom, top in zip(sizes, mean, low, high, strict=True)
    ]
    if as_json:
        record = {"target": target, "curve": rows, "runs": runs, "noise_scale": noise_scale}
        typer.echo(json.dumps(to_json(record), indent=2))
        return
    table = plain_table("batch", "trainings", "samples to target", "90% interval")
    for row in rows:
        never = not math.isfinite(row["samples"])
        interval = "" if never else f"{row['samples_low90']:,.0f}–{row['samples_high90']:,.0f}"
        table.add_row(
            str(row["batch_size"]), str(row["trained"] or ""), "never" if never else f"{row['samples']:,.0f}", interval
        )
    _out.print(table)
    if noise_scale is not None:
        _out.print(
            f"Gradient noise scale: {noise_scale.samples:,.0f} samples ({noise_scale.samples_low90:,.0f}–"
            f"{noise_scale.samples_high90:,.0f}), at batch size {noise_scale.batch_size}; by the curve, samples double "
            f"at about {curve.batch_noise:,.0f}. A second opinion, which the curve does not use.",
            soft_wrap=True,
        )
