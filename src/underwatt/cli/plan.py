"""``underwatt plan``: the setting that reaches the target soonest within the budget, why, and what others take."""

from __future__ import annotations

import json
import math
import sys
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import typer
from rich.console import Console
from rich.markup import escape

from underwatt.budget import Budget, parse_budget
from underwatt.cli.devices import DEVICE_HELP
from underwatt.cli.format import KNOB_HEADINGS, duration, plain_table
from underwatt.cli.predict import REFERENCE_HELP, load_references, newest_profile, offered_modes, profiled_device
from underwatt.cli.profile import STORE_HELP, measured_line, parse_batch_sizes
from underwatt.control.as_you_go import comparable, measure_as_you_go
from underwatt.convergence.curve import fit_convergence, targets_of
from underwatt.device.base import HasStockModes, permitted_space
from underwatt.device.registry import open_device
from underwatt.device.session import Session
from underwatt.errors import InputError, MissingExtraError, PredictError
from underwatt.jobs.command import CommandRate
from underwatt.jobs.workloads import JOB_HELP, choose_workload
from underwatt.planning.choice import choose_measured, choose_setting, forecast
from underwatt.planning.problem import Goal, Problem
from underwatt.predict.base import SettingArray
from underwatt.predict.design import fits_memory
from underwatt.rivals.compare import as_alternative, cannot_keep, compare, joined, too_few_for_published, truth_of
from underwatt.rivals.predictors import PowerTrain
from underwatt.store.exchange import plan_record
from underwatt.store.store import Store, default_store_path
from underwatt.studies.study import newest_rates

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from underwatt.convergence.curve import ConvergenceCurve
    from underwatt.device.base import Device
    from underwatt.device.space import ModeSpace
    from underwatt.measure.workload import Workload
    from underwatt.planning.choice import Plan
    from underwatt.planning.search import SearchResult
    from underwatt.records import ConvergenceRun, Measurement, Prediction, Profile, WorkloadCost, WorkloadInfo
    from underwatt.rivals.compare import Alternative


# How a plan looks on a terminal: the choice, why, and what others would take.

VERDICTS = {"yes": "", "risky": "[yellow]over?[/]", "over": "[red]over[/]"}

_out = Console()


def show_plan(title: str, plan: Plan, others: Sequence[Alternative], *, risk: float, per_sample: bool) -> None:
    """Print a plan and what it is compared with; without convergence, times are milliseconds of one sample."""
    best = plan.chosen
    time, low, high = (_took(s, per_sample) for s in (best.time_s.expected, best.time_s.low, best.time_s.high))
    energy, least, most = (f"{j / 3600:.3g}" for j in (best.energy_j.expected, best.energy_j.low, best.energy_j.high))
    _out.print(f"[bold]{escape(title)}[/], budget {plan.budget}", soft_wrap=True)
    _out.print(f"[green bold]{best.setting}[/]", soft_wrap=True)
    _out.print(
        f"  {time} ({low} to {high}){' ms a sample' if per_sample else ''}, "
        f"{best.power_w.expected:.2f} W ({best.power_w.low:.2f} to {best.power_w.high:.2f}), "
        + ("" if per_sample else f"{energy} Wh ({least} to {most}), ")
        + ("measured" if best.measured else "predicted"),
        soft_wrap=True,
    )
    _out.print(f"  {escape(plan.reason)}\n", soft_wrap=True)
    near = (("faster neighbour", plan.faster), ("thriftier neighbour", plan.thriftier))
    neighbours = [as_alternative(name, expected, plan.budget, risk) for name, expected in near if expected is not None]
    rows = joined([*neighbours, *others])
    _out.print(_table(plan, rows, per_sample=per_sample))
    for lacking in filter(None, (cannot_keep(others), too_few_for_published(others))):
        _out.print(lacking, soft_wrap=True)
    _out.print("[dim]* measured, the others predicted. Vendor's and maximum mode: with the middle batch size.[/]")
    if any(row.fits == "risky" for row in rows):
        _out.print("[dim]over? may exceed the budget: what is expected keeps it, the end of its interval does not.[/]")
    if any(other.known == "truth" for other in others):
        _out.print(
            "[dim]The oracle knows what only a simulation or a recorded table can tell; nothing else does. It is "
            "judged by that truth, all else by what was measured: a lucky reading may look faster.[/]",
            soft_wrap=True,
        )
    if not best.measured:
        _out.print("[dim]The choice was predicted, not measured: profile it before you rely on the budget.[/]")


def _table(plan: Plan, others: Sequence[Alternative], *, per_sample: bool) -> Table:
    best = plan.chosen
    knobs = list(best.setting.mode.knobs())
    time_heading = "ms/sample" if per_sample else "time"
    table = plain_table("", time_heading, "", "watts", "", "batch", *(KNOB_HEADINGS[name] for name in knobs))
    table.columns[0].no_wrap, table.columns[0].justify = False, "left"
    for other in others:
        mode = other.setting.mode.knobs()
        ratio = other.time_s / best.time_s.expected
        table.add_row(
            escape(other.name),
            _took(other.time_s, per_sample),
            f"{ratio:.2f}×" if math.isfinite(ratio) else "",
            f"{other.power_w:.2f}{'*' if other.known == 'measured' else ' '}",
            VERDICTS[other.fits],
            str(other.setting.batch_size),
            *(f"{mode[knob]:g}" for knob in knobs),
        )
    return table


def _took(seconds: float, per_sample: bool) -> str:
    if not math.isfinite(seconds):
        return "never"
    return f"{1e3 * seconds:.3g}" if per_sample else duration(seconds)


# ``underwatt plan --measure``: the measuring, told as it happens.

_measure_log = Console(stderr=True)


def search_on(
    device: Device, workload: Workload, problem: Problem, store: Store, references: Sequence[Profile]
) -> SearchResult:
    """Measure what is worth measuring, saying why; each answer is stored at once."""
    known = comparable(store.measurements(store.profile_id(device.info, workload.info)), problem)
    _measure_log.print(
        f"{escape(f'{workload.info.name} on {device.info.name}')}: measuring as I go among {len(problem):,} settings"
        + (f", {len(known)} known" if known else "")
        + f". [dim]Store: {escape(str(store.path))}[/]",
        soft_wrap=True,
    )

    def watch(found: Measurement, why: str) -> None:
        _measure_log.print(f"{measured_line(found)} [dim]{escape(why)}[/]", soft_wrap=True)

    with Session(device) as session:
        if session.recovered:
            _measure_log.print("A killed session had left this device changed; it was put back first.")
        try:
            found = measure_as_you_go(session, workload, problem, store, references=references, watch=watch)
        except KeyboardInterrupt:
            _measure_log.print("Interrupted; what was measured is kept. Run the same command again to go on.")
            raise
    spent_s = sum(m.cost_s for m in found.measurements if m.cost_s > 0)
    _measure_log.print(
        f"{len(found.measurements)} settings measured in {duration(spent_s)} of the device's time; "
        f"ended: {found.stopped}.",
        soft_wrap=True,
    )
    return found


app = typer.Typer()
_log = Console(stderr=True)


@app.callback()
def _group() -> None:
    """Keep this a group, though it has one command."""


@dataclass(frozen=True, slots=True)
class _Question:
    """What is asked for, before anything is known about the device and the job."""

    budget: Budget
    goal: Goal
    convergence: str
    target: float | None
    batch_sizes: tuple[int, ...]
    references: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Basis:
    """What a plan is made from; the device where it is here, and what was found where it was searched."""

    problem: Problem
    measured: Profile
    references: list[Profile]
    per_sample: bool
    device: Device | None
    cost: WorkloadCost | None = None
    search: SearchResult | None = None


@app.command("plan")
def plan(
    job: list[str] = typer.Argument(None, metavar="[JOB]", help=f"With --measure: {JOB_HELP}.", show_default=False),
    budget: str = typer.Option("", "--budget", help="Watts, one budget: 10W, 10W peak, or 10W mean over 60s."),
    energy: str = typer.Option("", "--energy", help="Energy for the whole training, such as 50Wh."),
    deadline: str = typer.Option("", "--deadline", help="Time for the whole training, such as 2h."),
    least_energy: bool = typer.Option(
        False, "--least-energy", help="Spend the least energy, instead of the least time."
    ),
    risk: float = typer.Option(0.05, help="Accepted chance that an unmeasured choice exceeds the budget."),
    measure: bool = typer.Option(
        False, "--measure", help="Measure JOB as you go, what is worth it; the choice was then measured to fit."
    ),
    device: str = typer.Option("", "--device", "-d", help=f"With --measure. {DEVICE_HELP}"),
    lr: float | None = typer.Option(None, help="With --measure of a command: what {lr} stands for ..."),
    lr_batch_size: int = typer.Option(128, min=1, help="... at this batch size; scaled by its square root elsewhere."),
    profile: int = typer.Option(0, "--profile", "-p", help="Number of the profile; the newest by default."),
    convergence: str = typer.Option("", help="Id of a workload's convergence runs; the profile's own by default."),
    target: float | None = typer.Option(None, help="Which target of the convergence runs; the newest by default."),
    batch_sizes: str = typer.Option(
        "", "--batch-sizes", "-b", help="Such as 8,16,32; the measured ones, or the job's own, by default."
    ),
    reference: list[str] = typer.Option([], "--reference", "-r", help=REFERENCE_HELP),
    powertrain: bool = typer.Option(
        False, "--powertrain", help="Also show what PowerTrain would choose; takes seconds, and needs PyTorch."
    ),
    store: Path | None = typer.Option(None, "--store", help=STORE_HELP, show_default=False),
    out: Path | None = typer.Option(None, "--out", help="Also write the plan to this file, to take it elsewhere."),
    keep: bool = typer.Option(False, "--keep", help="Also keep the plan in the store."),
    as_json: bool = typer.Option(False, "--json", help="For programs."),
) -> None:
    """Choose batch size and power mode together: soonest to the target within the budget."""
    question = _Question(
        _budget(budget, energy, deadline),
        Goal.LEAST_ENERGY if least_energy else Goal.SOONEST,
        convergence,
        target,
        parse_batch_sizes(batch_sizes),
        tuple(reference),
    )
    path = store or default_store_path()
    if measure:
        if profile:
            raise InputError("--profile names what was measured, and --measure measures.", hint="Give one of the two.")
        with redirect_stdout(sys.stderr):  # what a job prints is not our answer
            basis = _search(question, path, job or [], device, CommandRate(lr, lr_batch_size))
    else:
        if job or device:
            raise InputError("A job or a device is named only to be measured.", hint="Add --measure.")
        basis = _look_up(question, path, profile)
    measurements = comparable(basis.measured.measurements, basis.problem)
    problem, prediction = forecast(basis.problem, measurements, basis.references)
    if basis.search:
        chosen = choose_measured(problem, prediction, measurements)
    else:
        chosen = choose_setting(problem, prediction, measurements=measurements, risk=risk)
    others = compare(
        problem,
        prediction,
        measurements,
        risk=risk,
        stock_modes=basis.device.stock_modes() if isinstance(basis.device, HasStockModes) else {},
        powertrain=_powertrain(problem, basis) if powertrain else None,
        truth=truth_of(basis.device, problem.candidates, basis.cost),
    )
    measured = basis.measured
    record: dict[str, Any] = plan_record(
        chosen, measured.device, measured.workload, others=others, per_sample=basis.per_sample
    )
    if basis.search:
        record |= {"measured_now": len(basis.search.measurements), "stopped": basis.search.stopped}
    if out is not None:
        _write(out, record)
    if keep:
        with Store(path) as kept:
            number, _ = kept.keep_plan(record)
        _log.print(f"[dim]Kept as plan:{number}.[/]")
    if as_json:
        typer.echo(json.dumps(record, indent=2))
    else:
        title = f"{measured.workload.name} on {measured.device.name}"
        show_plan(title, chosen, others, risk=risk, per_sample=basis.per_sample)


def _look_up(question: _Question, path: Path, profile: int) -> _Basis:
    """From what was measured before."""
    with Store(path, create=False) as kept:
        measured = kept.profile(profile or newest_profile(kept))
        references = load_references(kept, list(question.references), measured)
        curve = _curve(kept, measured, question)
    space = offered_modes(measured)
    sizes = question.batch_sizes or tuple(sorted({m.setting.batch_size for m in measured.usable()}))
    _warn_of_extremes(sizes, [m.setting.batch_size for m in measured.usable()], "measured")
    problem = _problem(question, space, sizes, curve, measured)
    return _Basis(problem, measured, references, curve is None, profiled_device(measured))


def _search(question: _Question, path: Path, job: list[str], address: str, rate: CommandRate) -> _Basis:
    """By measuring on the device, beside what was measured before."""
    device = open_device(address)
    workload, suggested = choose_workload(job, device, rate=rate)
    sizes = question.batch_sizes or suggested
    if not sizes:
        raise InputError("A command does not say which batch sizes to try.", hint="Add for example -b 8,16,32,64.")
    with Store(path) as kept:
        number = kept.profile_id(device.info, workload.info)
        measured = kept.profile(number)
        references = load_references(kept, list(question.references), measured)
        curve = _curve(kept, measured, question)
        problem = _problem(question, permitted_space(device), sizes, curve, measured)
        found = search_on(device, workload, problem, kept, references)
        measured = replace(measured, measurements=kept.measurements(number))
    return _Basis(problem, measured, references, curve is None, device, workload.cost(), found)


def _problem(
    question: _Question, space: ModeSpace, sizes: tuple[int, ...], curve: ConvergenceCurve | None, measured: Profile
) -> Problem:
    if curve is not None:
        _warn_of_extremes(sizes, [seen.batch_size for seen in curve.observed], "trained to the target")
    candidates = SettingArray.product(tuple(knob.name for knob in space.knobs), space.matrix(), sizes)
    candidates = candidates.take(np.flatnonzero(fits_memory(candidates, measured.measurements)))
    return Problem.of(candidates, question.budget, curve, question.goal)


def _powertrain(problem: Problem, basis: _Basis) -> Prediction | None:
    """PowerTrain's prediction from the same measurements and references; said and left out where it cannot be had."""
    try:
        fitted = PowerTrain().fit(comparable(basis.measured.usable(), problem), basis.references)
        return fitted.predict(problem.candidates)
    except (MissingExtraError, PredictError) as exc:
        _log.print(f"[dim]PowerTrain is left out: {escape(exc.message)}[/]")
        return None


def _budget(budget: str, energy: str, deadline: str) -> Budget:
    wanted = {"--budget": (budget, "power_w"), "--energy": (energy, "energy_j"), "--deadline": (deadline, "deadline_s")}
    for option, (text, bound) in wanted.items():
        if text and getattr(parse_budget(text), bound) is None:
            raise InputError(
                f"{option} {text} has the wrong unit.", hint="Such as --budget 10W --energy 50Wh --deadline 2h."
            )
    if not (budget or energy or deadline):
        raise InputError("No budget was given.", hint="Such as --budget 10W.")
    return parse_budget(*(part for part in (budget, energy, deadline) if part)).for_plan()


def _curve(store: Store, measured: Profile, question: _Question) -> ConvergenceCurve | None:
    curve = stored_curve(store, measured.workload, wanted_id=question.convergence, target=question.target)
    if curve is None:
        _refuse_totals(question)
    return curve


def stored_curve(
    store: Store, workload: WorkloadInfo, *, wanted_id: str = "", target: float | None = None
) -> ConvergenceCurve | None:
    """Samples to target from the stored runs of a workload; says so where there are none that reached it."""
    runs = newest_rates(next((runs for info, runs in store.convergence() if info.id == (wanted_id or workload.id)), ()))
    if wanted_id and not runs:
        raise InputError(f"There are no convergence runs {wanted_id!r}.", hint="`underwatt store ls` lists them.")
    if target is not None and target not in targets_of(runs):
        raise InputError(f"No run was made for target {target:g}.", hint=_targets_hint(runs))
    aim = target if target is not None or not runs else runs[-1].target
    if not any(run.reached and run.target == aim for run in runs):
        why = f"No training reached the target {aim:g}" if runs else "No convergence runs of this workload are stored"
        _log.print(
            f"[yellow]{why}, so every batch size is taken to need the same number of samples.[/] "
            "`underwatt converge JOB` makes some."
        )
        return None
    _log.print(f"[dim]Samples to target {aim:g}, from {sum(run.target == aim for run in runs)} trainings.[/]")
    return fit_convergence(runs, aim)


def _targets_hint(runs: Sequence[ConvergenceRun]) -> str:
    named = ", ".join(f"{target:g}" for target in targets_of(runs))
    return f"There are: {named}." if named else "`underwatt converge JOB` makes runs."


def _warn_of_extremes(sizes: Sequence[int], known: Sequence[int], what: str) -> None:
    """Say where batch sizes to choose from lie beyond those that anything is known of."""
    if not known:
        return
    beyond = [size for size in sizes if not min(known) <= size <= max(known)]
    if beyond:
        _log.print(
            f"[yellow]Batch size {', '.join(map(str, beyond))} lies beyond what was {what} "
            f"({min(known)} to {max(known)}): what is said of it is a guess.[/]",
            soft_wrap=True,
        )


def _refuse_totals(question: _Question) -> None:
    """Refuse what cannot be answered without convergence, before anything is measured for it."""
    if question.budget.energy_j or question.budget.deadline_s or question.goal is Goal.LEAST_ENERGY:
        raise InputError(
            "Energy and time of a whole training need to be known by how many samples it takes.",
            hint="`underwatt converge JOB` finds that out, at an easier target where none was reached.",
        )


def _write(path: Path, record: dict[str, Any]) -> None:
    try:
        path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    except OSError as exc:
        raise InputError(f"The plan cannot be written to {path}: {exc.strerror}.") from exc
