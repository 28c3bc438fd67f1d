"""``underwatt plan``: the setting that reaches the target soonest within the budget, why, and what others take."""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import typer
from rich.console import Console
from rich.markup import escape

from underwatt.cli.devices import DEVICE_HELP
from underwatt.cli.plan_measure import search_on
from underwatt.cli.plan_show import show_plan
from underwatt.cli.predict import REFERENCE_HELP, load_references, newest_profile, offered_modes, profiled_device
from underwatt.cli.profile import STORE_HELP, parse_batch_sizes
from underwatt.converge.curve import fit_convergence, targets_of
from underwatt.converge.runs import newest_rates
from underwatt.device.base import HasStockModes, permitted_space
from underwatt.device.registry import open_device
from underwatt.errors import InputError, MissingExtraError, PredictError
from underwatt.plan import Budget, Goal, Problem, choose_measured, choose_setting, parse_budget
from underwatt.plan.compare import compare
from underwatt.plan.plan_file import plan_record
from underwatt.predict import PowerTrain, SettingArray, fits_memory
from underwatt.profile.store import Store, default_store_path
from underwatt.run.as_you_go import comparable, forecast_of
from underwatt.run.truth import truth_of
from underwatt.workload.choose import JOB_HELP, CommandRate, choose_workload

if TYPE_CHECKING:
    from collections.abc import Sequence

    from underwatt.converge.curve import ConvergenceCurve
    from underwatt.device.base import Device
    from underwatt.device.space import ModeSpace
    from underwatt.plan import SearchResult
    from underwatt.records import ConvergenceRun, Prediction, Profile, WorkloadCost, WorkloadInfo

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
    problem, prediction = forecast_of(basis.problem, measurements, basis.references)
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
    if "=" in budget:
        raise InputError(
            f"--budget {budget} is a schedule, and a plan is for one budget.",
            hint="Plan for one of its budgets, such as --budget 15W; `underwatt run` follows schedules.",
        )
    wanted = {"--budget": (budget, "power_w"), "--energy": (energy, "energy_j"), "--deadline": (deadline, "deadline_s")}
    for option, (text, bound) in wanted.items():
        if text and getattr(parse_budget(text), bound) is None:
            raise InputError(
                f"{option} {text} has the wrong unit.", hint="Such as --budget 10W --energy 50Wh --deadline 2h."
            )
    if not (budget or energy or deadline):
        raise InputError("No budget was given.", hint="Such as --budget 10W.")
    return parse_budget(*(part for part in (budget, energy, deadline) if part))


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
