"""``forecast`` and ``plan``: from what was measured to what was not, and to the setting to train with."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from underwatt.api import lookup
from underwatt.api.lookup import log_notes
from underwatt.budget import DAY_S, time_of_day_s, whole_budget
from underwatt.control.live_budget import now_on_the_wall_s
from underwatt.control.measured_search import comparable, measure_as_you_go
from underwatt.convergence.prior import RelativeCurve
from underwatt.device.base import HasStockModes, permitted_space
from underwatt.errors import BudgetError, InputError, MissingExtraError, PredictError
from underwatt.events import Noted
from underwatt.planning.choice import (
    RISK,
    Candidates,
    Interval,
    Plan,
    choose_measured,
    choose_setting,
    forecast as predict_candidates,
    front,
)
from underwatt.planning.course import Course, plan_course
from underwatt.planning.problem import Goal, Problem
from underwatt.predict.base import Z90, SettingArray, load_predictor
from underwatt.predict.design import fits_memory
from underwatt.records import DeviceInfo, Setting, from_json, to_json
from underwatt.reports.words import duration
from underwatt.rivals.compare import compare, truth_of
from underwatt.rivals.predictors import PowerTrain
from underwatt.rivals.validate import cross_validate
from underwatt.store.exchange import plan_record

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from underwatt.api.lookup import AnyJob, AnyStore, Listener
    from underwatt.budget import Budget
    from underwatt.convergence.curve import ConvergenceCurve
    from underwatt.device.base import Device
    from underwatt.measure.workload import Workload
    from underwatt.planning.search import SearchResult
    from underwatt.predict.base import Predictor
    from underwatt.records import Measurement, PowerMode, Prediction, Profile
    from underwatt.rivals.compare import Alternative
    from underwatt.rivals.validate import ValidationReport
    from underwatt.store.store import Store

MOST_GIVEN = 25  # of the best settings: what a person reads
MOST_SEARCHED = 4  # levels of a schedule that are measured for


@dataclass(frozen=True, slots=True)
class ExpectedSetting:
    """Step time and mean power of a setting as predicted, with 90% intervals."""

    setting: Setting
    step_s: Interval
    power_w: Interval

    @property
    def samples_per_s(self) -> float:
        """Throughput."""
        return self.setting.batch_size / self.step_s.expected


@dataclass(frozen=True, slots=True)
class Forecast:
    """Predictions from a profile: of the settings asked for, or the best of all ``predicted``."""

    measured: Profile
    settings: tuple[ExpectedSetting, ...]
    predicted: int


def forecast(
    profile: int = 0,
    *,
    modes: str | Sequence[PowerMode] = "",
    batch_sizes: str | Sequence[int] = (),
    references: Sequence[str | Profile] = (),
    predictor: str = "underwatt",
    store: AnyStore = None,
    listener: Listener = log_notes,
) -> Forecast:
    """Predict step time and power of settings from those of a profile, the newest by default.

    Without ``modes`` all of them are predicted, and those given that nothing beats in both throughput and watts.
    ``references`` are profiles of other jobs or devices, or their names: a number, a file, or ``"builtin:BOARD"``.
    ``predictor`` is one of ours, or one that another package offers (entry point ``underwatt.predictors``).
    """
    measured, others = _measured(profile, references, store)
    fitted = load_predictor(predictor).fit(measured.usable(), others)
    space = lookup.offered_modes(measured, listener)
    sizes = lookup.as_batch_sizes(batch_sizes) or _sizes(measured)
    if modes:
        settings = SettingArray.of(
            [Setting(mode, size) for mode in lookup.chosen_modes(modes, space) for size in sizes]
        )
    else:
        settings = lookup.every_setting(space, sizes)
    fitting = fits_memory(settings, measured.measurements)
    if not fitting.all():
        listener(Noted(level="warning", text="Batch sizes that ran out of memory, and larger ones, are left out."))
        settings = settings.take(np.flatnonzero(fitting))
    if not len(settings):
        raise InputError("Every batch size asked for runs out of memory.", hint="Ask for smaller ones.")
    if hasattr(fitted, "knows"):  # such as a table, which knows only what was measured
        settings = settings.take(np.flatnonzero(fitted.knows(settings)))
    found = fitted.predict(settings)
    rows = range(len(settings)) if modes else _best(settings, found)
    return Forecast(measured, tuple(_expected(settings[row], found, row) for row in rows), len(settings))


def check_forecast(
    profile: int = 0,
    *,
    references: Sequence[str | Profile] = (),
    predictor: str = "underwatt",
    store: AnyStore = None,
) -> tuple[Profile, ValidationReport]:
    """Whether to trust a forecast: measured settings are held back, predicted from the others, and compared.

    Gives the profile and what its predictions are worth.
    """
    measured, others = _measured(profile, references, store)
    return measured, cross_validate(measured.usable(), others, predictor=load_predictor(predictor))


def _measured(number: int, references: Sequence[str | Profile], store: AnyStore) -> tuple[Profile, list[Profile]]:
    with lookup.opened(store, create=False) as kept:
        measured = lookup.stored_profile(kept, number)
        return measured, lookup.load_references(kept, references, measured)


def _sizes(measured: Profile) -> tuple[int, ...]:
    return tuple(sorted({m.setting.batch_size for m in measured.usable()}))


def _best(settings: SettingArray, found: Prediction) -> list[int]:
    """The settings that nothing beats in both samples per second and watts, thinned to what a person reads."""
    rows = front(found.log_step_s - np.log(settings.batch_size), found.log_power_w)[::-1]
    thinned: list[int] = rows[np.unique(np.linspace(0, len(rows) - 1, MOST_GIVEN).round().astype(int))].tolist()
    return thinned


def _expected(setting: Setting, found: Prediction, row: int) -> ExpectedSetting:
    def interval(mean: float, std: float) -> Interval:
        return Interval(*(float(np.exp(mean + z * std)) for z in (0, -Z90, Z90)))

    return ExpectedSetting(
        setting,
        interval(found.log_step_s[row], found.log_step_s_std[row]),
        interval(found.log_power_w[row], found.log_power_w_std[row]),
    )


# plan: the setting that reaches the target soonest within the budget.


@dataclass(frozen=True, slots=True)
class SearchStep:
    """A setting was measured for a plan, and why."""

    measurement: Measurement
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePlan(Plan):
    """A plan for a job on a device, and what others would take; ``record`` is what its file and a store hold."""

    others: tuple[Alternative, ...]
    per_sample: bool  # convergence is not known: times are of one useful sample, not to the target
    course: Course | None  # over a schedule; the plan itself is then that of its highest level
    record: Mapping[str, Any]

    @property
    def title(self) -> str:
        """The job and the device, in words."""
        return f"{self.record['workload']['name']} on {self.record['device']['name']}"

    @property
    def about_watts(self) -> str:
        """What its watts are the watts of, in a sentence; empty where nobody knows."""
        return from_json(DeviceInfo, self.record["device"]).about_watts

    def save(self, path: Path | str) -> None:
        """Write it to a file, to take it elsewhere; ``Store.keep_plan(plan.record)`` keeps it in a store."""
        try:
            Path(path).write_text(json.dumps(self.record, indent=2) + "\n", encoding="utf-8")
        except OSError as exc:
            raise InputError(f"The plan cannot be written to {path}: {exc.strerror}.") from exc


def plan(
    budget: str | Budget = "",
    *,
    schedule: Path | str | None = None,
    start: str = "",
    energy: str = "",
    deadline: str = "",
    goal: str | Goal = Goal.SOONEST,
    risk: float = RISK,
    job: AnyJob | None = None,
    device: str | Device = "",
    lr: float | None = None,
    lr_batch_size: int = 128,
    profile: int = 0,
    convergence: str = "",
    target: float | None = None,
    batch_sizes: str | Sequence[int] = (),
    references: Sequence[str | Profile] = (),
    predictor: str = "underwatt",
    powertrain: bool = False,
    store: AnyStore = None,
    listener: Listener = log_notes,
) -> DevicePlan:
    """Choose batch size and power mode together: soonest to the target within the budget.

    ``budget`` is such as ``"10W"``, ``"10W peak"`` or ``"10W mean over 60s"``, ``energy`` and ``deadline`` bound the
    whole training (``"50Wh"``, ``"2h"``). It is planned from what a ``profile`` holds, the newest by default; with
    ``job`` that is measured on the ``device`` as far as it is worth it, and the choice was then measured to fit. An
    unmeasured choice exceeds the budget with a chance of at most ``risk``. Stored convergence runs of the job are used,
    or those of the id ``convergence``, for their newest target or ``target``; without any, batch sizes are weighed by
    what other trainings needed, and no time to the target is known. The listener gets ``SearchStep``.

    A budget may change: ``"08:00-18:00=15W,else=7W"``, or ``schedule``, a CSV file of watts over time. The plan's
    ``course`` then says what is done at each level and when the target is reached, from the time of day ``start``, such
    as ``"22:00"``, on, or from now.
    """
    wanted = whole_budget(budget, schedule=schedule, energy=energy, deadline=deadline)
    start_s = _start_s(start, wanted)
    sizes, fitter, goal = lookup.as_batch_sizes(batch_sizes), load_predictor(predictor), Goal(goal)
    here, workload, sizes = _to_measure(job, device, profile, sizes, lr, lr_batch_size)
    with lookup.opened(store, create=workload is not None) as kept:
        number = kept.profile_id(here.info, workload.info) if here and workload else profile
        measured = lookup.stored_profile(kept, number)
        others = lookup.load_references(kept, references, measured)
        curve = lookup.stored_curve(kept, measured.workload, listener, wanted_id=convergence, target=target)
        problem = _problem(measured, here, sizes, curve, wanted.constant(), goal, listener)
        searches: list[SearchResult] = []
        if here and workload:
            searches = _searches(kept, here, workload, problem, _levels_w(wanted), others, fitter, listener)
            measured = kept.profile(number, telling=True)
    here = here or lookup.profiled_device(measured)
    measurements = comparable(measured.measurements, problem)
    problem, prediction = predict_candidates(problem, measurements, others, fitter)
    if searches:
        chosen = choose_measured(problem, prediction, measurements)
    else:
        chosen = choose_setting(problem, prediction, measurements=measurements, risk=risk)
    course = None
    if wanted.schedule is not None:
        known = Candidates(problem, prediction, measurements)
        usable = known.runs & known.measured if searches else known.runs
        course = plan_course(known, usable, wanted.schedule, start_s, chosen.risk)
    rivals = compare(
        problem,
        prediction,
        measurements,
        risk=risk,
        stock_modes=here.stock_modes() if isinstance(here, HasStockModes) else {},
        powertrain=_powertrain(problem, measured, others, listener) if powertrain else None,
        truth=truth_of(here, problem.candidates, workload.cost() if workload else None),
    )
    record = plan_record(chosen, measured.device, measured.workload, others=rivals, per_sample=not problem.to_target)
    if course is not None:
        record |= {"schedule": str(wanted), "course": to_json(course)}
    if searches:
        record |= {"measured_now": sum(len(one.measurements) for one in searches), "stopped": searches[-1].stopped}
    parts = {part.name: getattr(chosen, part.name) for part in fields(Plan)}
    return DevicePlan(**parts, others=rivals, per_sample=not problem.to_target, course=course, record=record)


def _to_measure(
    job: AnyJob | None,
    device: str | Device,
    profile: int,
    sizes: tuple[int, ...],
    lr: float | None,
    lr_batch_size: int,
) -> tuple[Device | None, Workload | None, tuple[int, ...]]:
    """What is measured before it is planned, where a job was named, and at which batch sizes."""
    if job is None:
        if device:
            raise InputError("A device is named only to be measured.", hint="Name a job too.")
        return None, None, sizes
    if profile:
        raise InputError("A profile is what was measured, and a job is measured.", hint="Give one of the two.")
    here = lookup.as_device(device)
    workload, suggested = lookup.job_workload(job, here, lr, lr_batch_size)
    return here, workload, lookup.some_batch_sizes(sizes, suggested)


def _problem(
    measured: Profile,
    device: Device | None,
    batch_sizes: tuple[int, ...],
    curve: ConvergenceCurve | RelativeCurve,
    budget: Budget,
    goal: Goal,
    tell: Listener,
) -> Problem:
    """What is asked for; all modes of a device that is measured on, else of what was profiled."""
    if isinstance(curve, RelativeCurve) and (budget.energy_j or budget.deadline_s or goal is Goal.LEAST_ENERGY):
        # Before anything is measured for it.
        raise InputError(
            "Energy and time of a whole training need to be known by how many samples it takes.",
            hint="`underwatt converge JOB` finds that out, at an easier target where none was reached.",
        )
    # Those that the job may be trained with, also where few of them were measured: rules are for them too.
    sizes = batch_sizes or tuple(sorted({*_sizes(measured), *measured.workload.batch_sizes}))
    if device:
        space = permitted_space(device)
    else:
        space = lookup.offered_modes(measured, tell)
        _warn_of_extremes(sizes, _sizes(measured), "measured", tell)
    if not isinstance(curve, RelativeCurve):
        _warn_of_extremes(sizes, [one.batch_size for one in curve.observed], "trained to the target", tell)
    candidates = lookup.every_setting(space, sizes)
    candidates = candidates.take(np.flatnonzero(fits_memory(candidates, measured.measurements)))
    return Problem.of(candidates, budget, curve, goal)


def _searches(
    store: Store,
    device: Device,
    workload: Workload,
    problem: Problem,
    levels_w: Sequence[float],
    references: list[Profile],
    predictor: Predictor,
    tell: Listener,
) -> list[SearchResult]:
    """Measure for the budget, or for some levels of its schedule; where nothing keeps a lower one, training waits."""
    if not levels_w:
        return [_search(store, device, workload, problem, references, predictor, tell)]
    found: list[SearchResult] = []
    for level_w in levels_w:  # each is a part of the course, so energy and deadline of the whole are none of its own
        budget = replace(problem.budget.constant(level_w), energy_j=None, deadline_s=None)
        level = replace(problem, budget=budget)
        try:
            found.append(_search(store, device, workload, level, references, predictor, tell))
        except BudgetError as exc:
            if not found:
                raise
            tell(Noted(level="warning", text=f"{exc.message} Training will wait there."))
    return found


def _search(
    store: Store,
    device: Device,
    workload: Workload,
    problem: Problem,
    references: list[Profile],
    predictor: Predictor,
    tell: Listener,
) -> SearchResult:
    """Measure on the device what is worth it, beside what was measured before; each answer is stored at once."""
    before = len(comparable(store.measurements(store.profile_id(device.info, workload.info)), problem))
    text = f"{workload.info.name} on {device.info.name}: measuring as I go among {len(problem):,} settings"
    tell(Noted(level="info", text=f"{text}{f', {before} known' if before else ''}. Store: {store.path}"))
    with lookup.session(device, tell) as session:
        found = measure_as_you_go(
            session,
            workload,
            problem,
            store,
            references=references,
            predictor=predictor,
            watch=lambda measurement, why: tell(SearchStep(measurement, why)),
        )
    spent = duration(sum(m.cost_s for m in found.measurements if m.cost_s > 0), 2)
    text = f"{len(found.measurements)} settings measured in {spent} of the device's time; ended: {found.stopped}."
    tell(Noted(level="info", text=text))
    return found


def _powertrain(problem: Problem, measured: Profile, references: list[Profile], tell: Listener) -> Prediction | None:
    """PowerTrain's prediction from the same measurements and references; said and left out where it cannot be had."""
    try:
        fitted = PowerTrain().fit(comparable(measured.usable(), problem), references)
        return fitted.predict(problem.candidates)
    except (MissingExtraError, PredictError) as exc:
        tell(Noted(level="info", text=f"PowerTrain is left out: {exc.message}"))
        return None


def _start_s(start: str, budget: Budget) -> float:
    """The time of day at which the training starts: now, where nobody says."""
    if not start:
        return now_on_the_wall_s()
    if budget.schedule is None or budget.schedule.period_s is None:
        raise InputError(f"{budget} holds at any time of day, so --start would do nothing.", hint="Leave it out.")
    start_s = time_of_day_s(start)
    if not 0 <= start_s < DAY_S:
        raise InputError(f"--start {start} is no time of day.", hint="Such as --start 22:00.")
    return start_s


def _levels_w(budget: Budget) -> list[float]:
    """Levels of a schedule to measure for, the highest first: what is found there serves those between."""
    if budget.schedule is None:
        return []
    every = sorted(set(budget.schedule.levels_w), reverse=True)
    some = np.unique(np.linspace(0, len(every) - 1, MOST_SEARCHED).round().astype(int))
    return [every[at] for at in some.tolist()]


def _warn_of_extremes(sizes: Sequence[int], seen: Sequence[int], what: str, tell: Listener) -> None:
    """Say where batch sizes to choose from lie beyond those that anything is known of."""
    beyond = [size for size in sizes if seen and not min(seen) <= size <= max(seen)]
    if beyond:
        where = f"lies beyond what was {what} ({min(seen)} to {max(seen)}): what is said of it is a guess."
        tell(Noted(level="warning", text=f"Batch size {', '.join(map(str, beyond))} {where}"))
