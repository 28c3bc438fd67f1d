"""The plan that a report explains: candidates as they are known, the choice, and what others would choose."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from underwatt.plan import Expectation, Goal, Interval, Problem, choose_setting
from underwatt.plan.compare import compare
from underwatt.plan.known import outlook_as_known
from underwatt.plan.problem import rows_of
from underwatt.plan.select import INTERVAL, RISK, quantile
from underwatt.predict import FewShot, fits_memory

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from underwatt.converge.curve import ConvergenceCurve
    from underwatt.plan import Budget, Outlook, Plan
    from underwatt.plan.compare import Alternative
    from underwatt.predict import SettingArray
    from underwatt.records import Measurement, PowerMode, Profile, Setting


@dataclass(frozen=True, slots=True, eq=False)
class Planned:
    """What was decided, and everything it was decided from."""

    problem: Problem
    measurements: tuple[Measurement, ...]
    outlook: Outlook  # measured where it was measured
    measured: NDArray[np.bool_]
    keeps: NDArray[np.bool_]  # the budget, at the accepted risk
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
    curve: ConvergenceCurve | None,
    *,
    references: Sequence[Profile] = (),
    stock_modes: Mapping[str, PowerMode] | None = None,
    decided: tuple[Setting, str] | None = None,
    idle_w: float | None = None,
    goal: Goal = Goal.SOONEST,
    risk: float = RISK,
) -> Planned:
    """What was decided: ``decided``, the setting a run took at this budget and why; else a plan from what was measured.

    With ``idle_w``, watts while no step is under way, pauses between steps may keep the budget.
    """
    measurements = profile.measurements
    candidates = candidates.take(np.flatnonzero(fits_memory(candidates, measurements)))
    problem = Problem.of(candidates, budget, curve, goal, idle_w=idle_w)
    prediction = FewShot().fit(profile.usable(), references).predict(candidates)
    plan = choose_setting(problem, prediction, measurements=measurements, risk=risk)
    outlook, measured = outlook_as_known(problem, prediction, measurements)
    chance = outlook.chance_to_fit(budget)
    chosen, reason = plan.chosen, plan.reason
    taken = np.empty(0, dtype=np.intp) if decided is None else rows_of(candidates, decided[0])
    # A choice that never reaches the target, by trainings made since, is no plan to explain.
    by_run = bool(len(taken)) and bool(np.isfinite(outlook.log_time_s[taken[0]]))
    if decided is not None and by_run:
        chosen, reason = _describe(problem, outlook, chance, measured, int(taken[0])), decided[1]
    steps_alone, _ = outlook_as_known(replace(problem, idle_w=None), prediction, measurements)
    return Planned(
        problem=problem,
        measurements=measurements,
        outlook=outlook,
        measured=measured,
        keeps=chance >= 1 - risk,
        plan=plan,
        chosen=chosen,
        reason=reason,
        others=compare(problem, prediction, measurements, risk=risk, stock_modes=stock_modes),
        per="sample" if curve is None else "target",
        by_run=by_run,
        paused=outlook.log_time_s > steps_alone.log_time_s,
    )


def _describe(
    problem: Problem, outlook: Outlook, chance: NDArray[np.float64], measured: NDArray[np.bool_], row: int
) -> Expectation:
    def interval(log_value: NDArray[np.float64], std: NDArray[np.float64]) -> Interval:
        middle, reach = float(log_value[row]), quantile(0.5 + INTERVAL / 2) * float(std[row])
        return Interval(math.exp(middle), math.exp(middle - reach), math.exp(middle + reach))

    return Expectation(
        setting=problem.candidates[row],
        time_s=interval(outlook.log_time_s, outlook.time_std),
        power_w=interval(outlook.log_power_w, outlook.power_std),
        energy_j=interval(outlook.log_energy_j, outlook.energy_std),
        chance_over=float(1 - chance[row]),
        measured=bool(measured[row]),
    )
