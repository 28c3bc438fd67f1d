"""``underwatt demo``: the whole story on two virtual boards, told as it happens."""

from __future__ import annotations

import math
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.markup import escape

from underwatt._imports import require
from underwatt.cli.format import duration
from underwatt.demo.show import Story, say_plan, say_results, say_training
from underwatt.device.registry import open_device

if TYPE_CHECKING:
    from underwatt.convergence.curve import ConvergenceCurve
    from underwatt.demo.board import Bench
    from underwatt.jobs.job import Job
    from underwatt.records import WorkloadInfo
    from underwatt.store.store import Store

BOARDS = ("nano", "orin-agx")
STUDIED, SEEDS = 3, (0, 1)
STORE = "demo.db"

app = typer.Typer()
_out = Console(highlight=False, soft_wrap=True)


@app.callback()
def _group() -> None:
    """Keep this a group, though it has one command."""


@app.command("demo")
def demo(
    folder: Path = typer.Option(Path("out") / "demo", help="Where measurements, runs and reports are kept."),
    board: list[str] = typer.Option(list(BOARDS), "--board", help="The virtual boards to show it on."),
) -> None:
    """Train a small network for real on virtual boards, under budgets that change, beside the usual way to do it."""
    from underwatt.demo.board import Bench
    from underwatt.demo.job import digits
    from underwatt.demo.rivals import samples_in_hindsight
    from underwatt.jobs._torch import torch
    from underwatt.jobs.identity import job_info
    from underwatt.store.store import Store

    started_s = time.perf_counter()
    # What would fail later is an error now.
    require("plotly", extra="report")
    for name in board:
        open_device(f"virtual:{name}")
    _out.print(
        "[bold]Underwatt[/] trains as fast as a power budget allows. In this demo the board is [yellow]simulated[/], "
        "and so is the cost of a step: that of ResNet18; what is trained, a small network on handwritten digits, and "
        "its accuracy, are [green]real[/].\n"
    )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / STORE).unlink(missing_ok=True)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the network is too small for more, and one gives the same numbers each time
    try:
        job = digits()
        workload = job_info(job)
        with Store(folder / STORE) as store:
            curve = _converge(job, workload, store)
            samples = samples_in_hindsight(job)
            for name in board:
                _one_board(Bench(name, job, workload, curve, store, folder), samples)
    finally:
        torch.set_num_threads(threads)
    _out.print(
        "[dim]Baseline: the largest batch at the highest GPU clock that fits the budget, all else at its highest, "
        "which it is told for free. Oracle: the best setting at each moment by the simulation's truth and by what each "
        "batch size turned out to need on the real data, trained with alone from the same start; it is computed, not "
        "trained. A training that changes its batch size may by chance need more samples or fewer than that: compare "
        "the samples. Over: the share of the joules "
        "above the budget, by true power as means over 1 s, and for how long these were more than 2% above it.[/]"
    )
    _out.print(f"Everything is kept in {escape(str(folder))}. [dim]{time.perf_counter() - started_s:.0f} s.[/]")


def _converge(job: Job, workload: WorkloadInfo, store: Store) -> ConvergenceCurve:
    """Samples to the target by batch size, from trainings on proxy data."""
    from underwatt.convergence.curve import fit_convergence
    from underwatt.demo.board import EVALUATE_EVERY, LIMIT
    from underwatt.jobs.job import Effort
    from underwatt.studies.study import StudySettings, spread_batch_sizes, study

    sizes = spread_batch_sizes(job.batch_sizes, STUDIED)
    settings = StudySettings(sizes, SEEDS, Effort(EVALUATE_EVERY, LIMIT), workers=1)
    runs = study(job, "", settings, on_run=lambda run: store.add_convergence(workload, [run])).runs
    curve = fit_convergence(runs, job.target)
    logs, _ = curve.predict(list(sizes))
    needed = ", ".join(f"{math.exp(log):,.0f} at {size}" for size, log in zip(sizes, logs, strict=True))
    _out.print(
        f"[bold]Converge.[/] {len(runs)} short trainings to {job.target:.0%} accuracy on proxy data, images that the "
        f"trainings below never see. Samples needed by batch size, by the curve fitted to them: {needed}.\n"
    )
    return curve


def _one_board(bench: Bench, samples: dict[int, float]) -> None:
    from underwatt.demo.board import budgets_w, changing, measure_few, plan_for, train_underwatt
    from underwatt.demo.rivals import Rivals

    _out.rule(f"[bold]{escape(bench.device().info.name)}[/]", align="left", style="dim")
    measured = measure_few(bench)
    watts = [m.power_w for m in measured]
    _out.print(
        f"[bold]Measure.[/] {len(measured)} of {len(bench.candidates()):,} settings, in "
        f"{duration(sum(m.cost_s for m in measured))} of simulated time: {min(watts):.1f} to {max(watts):.1f} W. "
        "A tight and a roomy budget, a quarter and three quarters of the way up:"
    )
    rivals = Rivals(bench, samples)
    levels_w = budgets_w(measured)
    plans = [plan_for(bench, level_w) for level_w in levels_w]
    for level_w, plan in zip(levels_w, plans, strict=True):
        say_plan(_out, level_w, plan, rivals.baseline(level_w))
    stories = []
    folder = bench.folder
    for at, name in enumerate(("tight-first", "roomy-first")):
        schedule = changing(plans[at], levels_w[at], levels_w[1 - at])
        folder = bench.folder / f"{bench.board}-{name}"
        shutil.rmtree(folder, ignore_errors=True)
        tell = say_training(_out, schedule, dict(zip(levels_w, plans, strict=True)))
        ours = train_underwatt(bench, schedule, folder, tell)
        stories.append(Story(schedule, rivals.train_baseline(schedule), ours, rivals.oracle(schedule)))
    say_results(_out, stories)
    _report(bench, folder)


def _report(bench: Bench, run: Path) -> None:
    from underwatt.cli.report import report

    _out.print("[bold]Report[/] on the last training, to be opened in a browser: ", end="")
    report(bench.folder / f"{bench.board}.html", 0, "", run, None, [], bench.folder / STORE, as_json=False)
    _out.print()
