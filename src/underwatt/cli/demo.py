"""``underwatt demo``: the whole story on two virtual boards, told as it happens."""

from __future__ import annotations

import math
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from typer import Option, Typer, echo

import underwatt
from underwatt._imports import require
from underwatt.cli import common
from underwatt.events import BudgetChanged, Ended, Measured, Noted, Planned, Scored, SettingChanged
from underwatt.reports.words import duration

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from underwatt.budget import Schedule
    from underwatt.convergence.curve import ConvergenceCurve
    from underwatt.demo.trainings import Bench, Result
    from underwatt.events import Event
    from underwatt.jobs.job import Job
    from underwatt.planning.search import SearchResult
    from underwatt.records import Measurement, WorkloadInfo
    from underwatt.store.store import Store

BOARDS = ("nano", "orin-agx")
STUDIED, SEEDS = 3, (0, 1)
STORE = "demo.db"
WINDOW_S = 1.0

OUT = Console(highlight=False, soft_wrap=True)
app = Typer()


@app.command("demo")
def demo(
    folder: Path = Option(Path("out") / "demo", help="Where measurements, runs and reports are kept."),
    board: list[str] = Option(list(BOARDS), help="The virtual boards to show it on."),
) -> None:
    """Train a small network for real on virtual boards, under budgets that change, beside the usual way to do it."""
    from underwatt.demo.trainings import Bench, digits, samples_in_hindsight
    from underwatt.jobs._torch import torch
    from underwatt.jobs.identity import job_info
    from underwatt.store.store import Store

    started_s = time.perf_counter()
    # What would fail later is an error now.
    require("plotly", extra="report")
    require("sklearn", extra="demo")
    for name in board:
        underwatt.open_device(f"virtual:{name}")
    OUT.print(
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
    OUT.print(
        "[dim]Baseline: the largest batch at the highest GPU clock that fits the budget, all else at its highest, "
        "which it is told for free. Oracle: the best setting at each moment by the simulation's truth and by what each "
        "batch size turned out to need on the real data, trained with alone from the same start; it is computed, not "
        "trained. A training that changes its batch size may by chance need more samples or fewer than that: compare "
        "the samples. Over: the share of the joules "
        "above the budget, by true power as means over 1 s, and for how long these were more than 2% above it.[/]"
    )
    OUT.print(f"Everything is kept in {escape(str(folder))}. [dim]{time.perf_counter() - started_s:.0f} s.[/]")


def _converge(job: Job, workload: WorkloadInfo, store: Store) -> ConvergenceCurve:
    """Samples to the target by batch size, from trainings on proxy data."""
    from underwatt.convergence.curve import fit_convergence
    from underwatt.demo.trainings import EVALUATE_EVERY, LIMIT
    from underwatt.jobs.job import Effort
    from underwatt.studies.study import StudySettings, spread_batch_sizes, study

    sizes = spread_batch_sizes(job.batch_sizes, STUDIED)
    settings = StudySettings(sizes, SEEDS, Effort(EVALUATE_EVERY, LIMIT), workers=1)
    runs = study(job, "", settings, on_run=lambda run: store.add_convergence(workload, [run])).runs
    curve = fit_convergence(runs, job.target)
    logs, _ = curve.predict(list(sizes))
    needed = ", ".join(f"{math.exp(log):,.0f} at {size}" for size, log in zip(sizes, logs, strict=True))
    OUT.print(
        f"[bold]Converge.[/] {len(runs)} short trainings to {job.target:.0%} accuracy on proxy data, images that the "
        f"trainings below never see. Samples needed by batch size, by the curve fitted to them: {needed}.\n"
    )
    return curve


def _one_board(bench: Bench, samples: dict[int, float]) -> None:
    from underwatt.demo.trainings import Rivals, budgets_w, measure_few, passed, plan_for, train_underwatt

    OUT.rule(f"[bold]{escape(bench.device().info.name)}[/]", align="left", style="dim")
    measured = measure_few(bench)
    watts = [m.power_w for m in measured]
    OUT.print(
        f"[bold]Measure.[/] {len(measured)} of {len(bench.candidates()):,} settings, in "
        f"{duration(sum(m.cost_s for m in measured), 2)} of simulated time: {min(watts):.1f} to {max(watts):.1f} W. "
        "A tight and a roomy budget, a quarter and three quarters of the way up:"
    )
    rivals = Rivals(bench, samples)
    levels_w = budgets_w(measured)
    plans = [plan_for(bench, level_w) for level_w in levels_w]
    for level_w, plan in zip(levels_w, plans, strict=True):
        baseline, best = rivals.baseline(level_w), plan.best
        beside = "cannot keep it" if baseline is None else f"takes {baseline.setting}"
        OUT.print(
            f"[bold]Plan[/] for {level_w:g} W, with {len(plan.measurements)} more settings measured: "
            f"[green]{best.measurement.setting}[/]; {best.measurement.power_w:.2f} W measured, "
            f"about {duration(best.time_s, 2)} to the target. [dim]The baseline {beside}.[/]"
        )
    stories = []
    folder = bench.folder
    for at, name in enumerate(("tight-first", "roomy-first")):
        half_s = float(round(plans[at].best.time_s / 2))  # about the middle of the training, as it was planned for
        schedule = underwatt.Schedule.of([(0.0, levels_w[at]), (half_s, levels_w[1 - at])])
        folder = bench.folder / f"{bench.board}-{name}"
        shutil.rmtree(folder, ignore_errors=True)
        tell = say_training(OUT, schedule, dict(zip(levels_w, plans, strict=True)))
        ours = train_underwatt(bench, schedule, folder, tell)
        stories.append(Story(schedule, rivals.train_baseline(schedule), ours, passed(schedule, rivals.best)))
    say_results(OUT, stories)
    OUT.print("[bold]Report[/] on the last training, to be opened in a browser: ", end="")
    store = bench.folder / STORE
    page = underwatt.report(bench.folder / f"{bench.board}.html", run=folder, store=store, listener=common.say_note)
    echo(f"{page} ({page.stat().st_size / 1e6:.1f} MB)\n")


# How it looks on a terminal: trainings as they go, and what they took.


@dataclass(frozen=True, slots=True)
class Story:
    """Three ways to train under the same budget."""

    schedule: Schedule
    baseline: Result | None  # none where it cannot keep the budget
    ours: Result
    oracle: Result


def say_training(out: Console, schedule: Schedule, plans: Mapping[float, SearchResult]) -> Callable[[Event], None]:
    """Announce a training; gives what tells of it while it goes on, beside the plans that were made for its watts."""
    first_w, then_w = schedule.levels_w
    out.print(
        f"\n[bold]Train[/] under {first_w:g} W, and under {then_w:g} W from {schedule.begins_s[1]:g} s on; "
        "the settings measured so far are known."
    )
    measured: list[Measurement] = []
    held_w: list[float] = []

    def tell(event: Event) -> None:
        text = ""
        if isinstance(event, BudgetChanged) and event.power_w is not None:
            text = f"[bold]{event.power_w:g} W[/]"
            held_w.append(event.power_w)
        elif isinstance(event, Measured):
            measured.append(event.measurement)
        elif isinstance(event, Planned):
            text = searched(len(measured), event, plans.get(held_w[-1]))
            measured.clear()
        elif isinstance(event, SettingChanged) and event.state != "searching":
            text = f"{event.state} {event.setting} [dim]({escape(event.why)})[/]"
        elif isinstance(event, Scored) and event.target is not None and event.value >= event.target:
            text = f"[green]accuracy {event.value:.1%}[/] after {event.samples:,} samples"
        elif isinstance(event, Ended):
            text = "board put back" if event.restored else "[red]board NOT put back[/]"
        elif isinstance(event, Noted):
            text = f"[{'yellow' if event.level == 'warning' else 'dim'}]{escape(event.text)}[/]"
        if text:
            out.print(f"  {event.at_s:6.1f} s  {text}")

    return tell


def searched(measured: int, found: Planned, planned: SearchResult | None) -> str:
    """What the search of the training itself found, beside the plan for the same watts."""
    if planned is None:
        return ""
    chosen, before = found.chosen, planned.best.measurement.setting
    same = chosen == before
    if same and not measured:
        return ""
    text = f"searching: {measured} setting{'' if measured == 1 else 's'} measured by training steps; "
    if not measured:
        text = "what was measured for the other budget counts too: "
    if same:
        return f"{text}the plan's is still the best"
    sooner = 1 - found.expected.time_s / planned.best.time_s
    if sooner > 0:
        return f"{text}{chosen} is {sooner:.1%} sooner than the plan's {before}"
    room = "the room that a training keeps below its budget"
    return f"{text}{chosen} is the best that fits with {room}, {-sooner:.1%} later than the plan's {before}"


def say_results(out: Console, stories: Sequence[Story]) -> None:
    """One table of everything, and whether the budgets were held."""
    table = common.plain_table("budget", "", "time", "", "watts", "joules", "samples", "accuracy", "over", "")
    table.columns[0].justify = table.columns[1].justify = "left"
    for story in stories:
        watts = " → ".join(f"{level_w:g}" for level_w in story.schedule.levels_w) + " W"
        baseline = _figures(story.baseline, story.baseline) if story.baseline else ("cannot keep it",)
        table.add_row(watts, "baseline", *baseline)
        table.add_row("", "Underwatt", *_figures(story.ours, story.baseline), style="bold")
        table.add_row("", "oracle", *_figures(story.oracle, story.baseline))
    out.print()
    out.print(table)
    held = all(_over(story.ours)[1] == 0 for story in stories)
    restored = all(row.restored for story in stories for row in (story.ours, story.baseline) if row is not None)
    computing_s = " and ".join(f"{story.ours.computing_s:.1f}" for story in stories)
    out.print(
        f"Budget held: {'[green]yes[/]' if held else '[yellow]not at every moment, see over[/]'}. "
        f"Board put back as it was: {'[green]yes[/]' if restored else '[red]NO[/]'}. "
        f"[dim]Search, control and simulation computed for {computing_s} s here, for which simulated time stands "
        "still.[/]"
    )


def _figures(row: Result, baseline: Result | None) -> tuple[str, ...]:
    accuracy = over = over_for = ""
    if row.score is not None:
        accuracy = f"{row.score:.1%}{'' if row.reached else ', target not reached'}"
    if row.record is not None:
        share, seconds = _over(row)
        over, over_for = f"{share:.2%}", f"{seconds:.1f} s"
    faster = "" if baseline is None else f"{baseline.time_s / row.time_s:.2f}×"
    spent = f"{row.power_w:.2f}", f"{row.energy_j:,.0f}", f"{row.samples:,.0f}"
    return f"{row.time_s:,.1f} s", faster, *spent, accuracy, over, over_for


def _over(row: Result) -> tuple[float, float]:
    """The share of the joules that were above the budget, and for how many seconds it was clearly exceeded."""
    assert row.record is not None, "trained"
    return row.record.energy_over_j(window_s=WINDOW_S) / row.energy_j, row.record.time_over_s(window_s=WINDOW_S)
