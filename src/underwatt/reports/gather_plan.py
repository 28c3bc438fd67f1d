"""Figures that explain a plan: the decision, the front, the heat maps and the energy of each choice."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from string import ascii_uppercase
from typing import TYPE_CHECKING, Any

import numpy as np

from underwatt.budget import Watts
from underwatt.planning.choice import RISK, Candidates, choose_setting, outlook_as_known
from underwatt.planning.problem import Problem, project, rows_of
from underwatt.predict.design import fits_memory
from underwatt.predict.fewshot import FewShot
from underwatt.reports.report_records import EnergyBySetting, Front, HeatMap, KeyFigure, MeasuredPoint, Other
from underwatt.reports.words import KNOB_NAMES, bound, duration, energy, percent, span, times, watts
from underwatt.rivals.compare import JOINT, LARGEST, cannot_keep, compare, joined

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from underwatt.budget import Budget
    from underwatt.convergence.curve import SamplesToTarget
    from underwatt.planning.choice import Expectation, Plan
    from underwatt.predict.base import SettingArray
    from underwatt.records import Measurement, PowerMode, Profile, Setting
    from underwatt.rivals.compare import Alternative


# The knob of the heat maps: the first of these that has more than one value.
MAPPED = ("gpu_mhz", "power_limit_w", "cpu_mhz", "mem_mhz", "cpu_cores")
# A front of thousands of settings is drawn with so many.
MOST_ON_FRONT = 200


@dataclass(frozen=True, slots=True, eq=False)
class PlanToExplain:
    """What was decided, and everything it was decided from."""

    problem: Problem
    measurements: tuple[Measurement, ...]
    known: Candidates
    keeps: NDArray[np.bool_]  # the budget, at the accepted risk
    keeps_alone: NDArray[np.bool_]  # the same without pauses
    plan: Plan
    chosen: Expectation
    reason: str
    others: tuple[Alternative, ...]
    per: str  # "target" or "sample"
    by_run: bool  # whether a run made the choice, and no plan from what was measured
    paused: NDArray[np.bool_]  # which candidates keep the budget by pauses between steps, seen so in the outlook

    @property
    def row(self) -> int:
        """Where the choice stands among the candidates."""
        return int(rows_of(self.problem.candidates, self.chosen.setting)[0])


def make_plan(
    profile: Profile,
    candidates: SettingArray,
    budget: Budget,
    curve: SamplesToTarget,
    references: Sequence[Profile],
    stock_modes: Mapping[str, PowerMode] | None,
    decided: tuple[Setting, str] | None,
    idle_w: float | None,
) -> PlanToExplain:
    """What was decided: ``decided``, the setting a run took at this budget and why; else a plan from what was measured.

    With ``idle_w``, watts while no step is under way, pauses between steps may keep the budget.
    """
    measurements = profile.measurements
    candidates = candidates.take(np.flatnonzero(fits_memory(candidates, measurements)))
    problem = Problem.of(candidates, budget, curve, idle_w=idle_w)
    prediction = FewShot().fit(profile.usable(), references).predict(candidates)
    plan = choose_setting(problem, prediction, measurements=measurements)
    known = Candidates(problem, prediction, measurements)
    chosen, reason = plan.chosen, plan.reason
    taken = np.empty(0, dtype=np.intp) if decided is None else rows_of(candidates, decided[0])
    # A choice that never reaches the target, by trainings made since, is no plan to explain.
    by_run = bool(len(taken)) and bool(known.runs[taken[0]])
    if decided is not None and by_run:
        [chosen], reason = known.expect(taken[:1]), decided[1]
    steps_alone, _ = outlook_as_known(replace(problem, idle_w=None), prediction, measurements)
    return PlanToExplain(
        problem=problem,
        measurements=measurements,
        known=known,
        keeps=known.chance >= 1 - RISK,
        keeps_alone=steps_alone.chance_to_fit(budget) >= 1 - RISK,
        plan=plan,
        chosen=chosen,
        reason=reason,
        others=compare(problem, prediction, measurements, stock_modes=stock_modes),
        per="target" if problem.to_target else "sample",
        by_run=by_run,
        paused=known.outlook.log_time_s > steps_alone.log_time_s,
    )


def took(time_s: float, per: str) -> str:
    """A time to the target, or of one useful sample."""
    return duration(time_s) if per == "target" else f"{duration(time_s)} a useful sample"


def decide(planned: PlanToExplain, target: float | None) -> tuple[str, tuple[KeyFigure, ...]]:
    """The choice in one sentence, and its key figures."""
    chosen, budget = planned.chosen, planned.problem.budget
    aim = (
        f"reach a score of {target:g} in {duration(chosen.time_s.expected)}"
        if target is not None and planned.per == "target"
        else f"take {took(chosen.time_s.expected, planned.per)}"
    )
    how = "measured" if chosen.measured else "predicted, not yet measured"
    paused = bool(planned.paused[planned.row])
    over = not paused and budget.power_w is not None and chosen.power_w.expected > budget.power_w
    kept = f"with pauses that are to hold it to {budget}" if over or paused else f"within {budget}"
    if over:  # by what a pause draws is not known, so the time is that of the steps alone
        kept += " and take time on top"
    gain = None if over else slower_other(planned)
    beside = ""
    if gain is not None:
        takes = "is predicted to take" if gain[0].known == "predicted" else "would take"
        beside = f"; the usual way ({gain[0].name}) {takes} {times(gain[1])} as long"
    sentence = f"Train at {chosen.setting} to {aim} at {watts(chosen.power_w.expected)}, {kept} ({how}){beside}."
    return sentence, _key_figures(planned, gain)


def slower_other(planned: PlanToExplain) -> tuple[Alternative, float] | None:
    """The published baseline, and how many times as long it takes, where it keeps the budget and that is longer.

    Never another rule in its place: it would be the one that flatters the choice.
    """
    for other in planned.others:
        ratio = other.time_s / planned.chosen.time_s.expected
        if other.name == LARGEST and other.fits != "over" and math.isfinite(ratio) and ratio > 1.005:
            return other, ratio
    return None


def _key_figures(planned: PlanToExplain, gain: tuple[Alternative, float] | None) -> tuple[KeyFigure, ...]:
    chosen, per = planned.chosen, planned.per
    budget, bound_w = planned.problem.budget, planned.problem.budget.power_w
    if bound_w is None:
        against = "no bound"
    elif budget.watts is Watts.PEAK:  # the mean says nothing of how close the peaks come
        against = f"peaks within {bound(bound_w)}"
    else:
        against = f"{percent(chosen.power_w.expected / bound_w)} of {bound(bound_w)}"
    found = [
        KeyFigure(
            "Time to target" if per == "target" else "Time of a useful sample",
            duration(chosen.time_s.expected),
            f"90%: {span(chosen.time_s, duration)}",
        ),
        KeyFigure("Mean power", watts(chosen.power_w.expected), against),
        KeyFigure(
            "Energy to target" if per == "target" else "Energy of a useful sample",
            energy(chosen.energy_j.expected),
            f"90%: {span(chosen.energy_j, energy)}",
        ),
    ]
    if gain is not None:
        found.append(KeyFigure("Speed-up", times(gain[1]), f"over {gain[0].name}"))
    return tuple(found)


def front_figure(planned: PlanToExplain) -> Front:
    """Time against power."""
    chosen, bound_w = planned.chosen, planned.problem.budget.power_w
    keeping, alone = (int((keeps & planned.known.runs).sum()) for keeps in (planned.keeps, planned.keeps_alone))
    by_pauses = f" by themselves, {keeping - alone:,} more by pauses" if keeping > alone else ""
    others = tuple(
        Other(letter, _label(other.name), other)
        for letter, other in zip(ascii_uppercase, joined(planned.others), strict=False)
    )
    over = [other.choice.name for other in others if other.choice.fits == "over"]
    message = (
        f"{alone:,} of {len(planned.problem):,} settings keep {planned.problem.budget}{by_pauses}; the choice, "
        f"{chosen.setting}, takes {took(chosen.time_s.expected, planned.per)} at {watts(chosen.power_w.expected)}."
    )
    if over:
        message += f" Over the budget: {'; '.join(over)}."
    if lacking := cannot_keep(planned.others):
        message += f" {lacking}"
    return Front(
        per=planned.per,
        budget_w=bound_w,
        bounds=planned.problem.budget.watts.value,
        front=_some(planned.plan.front, chosen),
        measured=_measured(planned),
        chosen=chosen,
        others=others,
        settings=len(planned.problem),
        keeping=keeping,
        paused=int(planned.paused.sum()),
        message=message,
    )


def _label(name: str) -> str:
    first, *more = name.split(JOINT)
    return f"{first} (+{len(more)})" if more else first


def _some(front: tuple[Expectation, ...], chosen: Expectation) -> tuple[Expectation, ...]:
    if len(front) <= MOST_ON_FRONT:
        return front
    kept = set(np.linspace(0, len(front) - 1, MOST_ON_FRONT).round().astype(int).tolist())
    return tuple(item for at, item in enumerate(front) if at in kept or item.setting == chosen.setting)


def _measured(planned: PlanToExplain) -> tuple[MeasuredPoint, ...]:
    points = []
    for measurement in planned.measurements:
        rows = rows_of(planned.problem.candidates, measurement.setting)
        if not measurement.usable or not len(rows):
            continue
        known = project(planned.problem, int(rows[0]), measurement)
        if math.isfinite(known.time_s):
            power_w = known.energy_j / known.time_s  # with its pauses, as the time is
            points.append(MeasuredPoint(measurement.setting, known.time_s, power_w, known.fits))
    return tuple(points)


def heat_maps(planned: PlanToExplain) -> tuple[HeatMap, HeatMap] | None:
    """Time and power over batch size and clock; nothing where no knob has two values."""
    settings = planned.problem.candidates
    columns = dict(zip(settings.knobs, settings.values.T, strict=True))
    knob = next((name for name in MAPPED if name in columns and len(np.unique(columns[name])) > 1), None)
    if knob is None:
        return None
    same = np.ones(len(settings), dtype=bool)
    for name, values in columns.items():
        if name != knob:
            same &= values == values[planned.row]
    rows = np.flatnonzero(same)
    knob_values, row_at = np.unique(columns[knob][rows], return_inverse=True)
    sizes, column_at = np.unique(settings.batch_size[rows], return_inverse=True)
    where = (row_at.ravel(), column_at.ravel())
    chosen_at = int(np.flatnonzero(rows == planned.row)[0])
    rest = planned.chosen.setting.mode.with_knobs(**{knob: None})

    def grid(values: NDArray[Any], empty: float | bool) -> NDArray[Any]:
        filled = np.full((len(knob_values), len(sizes)), empty)
        filled[where] = values[rows]
        return filled

    def heat_map(quantity: str, logs: NDArray[np.float64]) -> HeatMap:
        keeps = grid(planned.keeps, False)
        values = grid(np.where(np.isfinite(logs), np.exp(logs), np.nan), math.nan)
        return HeatMap(
            quantity=quantity,
            per=planned.per,
            knob=knob,
            knob_values=tuple(knob_values.tolist()),
            batch_sizes=tuple(int(size) for size in sizes),
            values=tuple(map(tuple, values.tolist())),
            keeps=tuple(map(tuple, keeps.tolist())),
            measured=tuple(map(tuple, grid(planned.known.measured, False).tolist())),
            chosen=(int(where[0][chosen_at]), int(where[1][chosen_at])),
            paused=int(planned.paused[rows].sum()),
            others_at=str(rest) if rest.knobs() else "",
            message=_map_message(planned, quantity, values, int(keeps.sum()), knob),
        )

    outlook = planned.known.outlook
    return heat_map("time_s", outlook.log_time_s), heat_map("power_w", outlook.log_power_w)


def _map_message(planned: PlanToExplain, quantity: str, values: NDArray[Any], keeping: int, knob: str) -> str:
    inside = f"{keeping} of {int(np.isfinite(values).sum())} cells keep the budget."
    low, high = np.nanmin(values), np.nanmax(values)
    if quantity == "power_w":
        return f"Power runs from {watts(low)} to {watts(high)}; {inside}"
    chosen = planned.chosen.setting
    where = f"batch size {chosen.batch_size} at {KNOB_NAMES[knob].split(' (')[0]} {chosen.mode.knobs()[knob]:g}"
    return f"Time runs from {took(low, planned.per)} to {took(high, planned.per)}; {inside} The choice is {where}."


def energy_by_setting(planned: PlanToExplain, front: Front) -> EnergyBySetting:
    """Energy of the choice and of what others would choose."""
    others = tuple(other for other in front.others if math.isfinite(other.choice.energy_j))
    spent = energy(planned.chosen.energy_j.expected)
    message = f"The choice is expected to take {spent}{' a useful sample' if planned.per == 'sample' else ''}"
    if others:
        low, high = (pick(others, key=lambda other: other.choice.energy_j).choice for pick in (min, max))
        message += f"; others from {energy(low.energy_j)} ({low.name}) to {energy(high.energy_j)} ({high.name})"
    return EnergyBySetting(planned.chosen, others, f"{message}.")
