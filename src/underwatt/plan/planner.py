"""Plan, and plan again when another measurement came in: the second time in a fraction of a second."""

from __future__ import annotations

from typing import TYPE_CHECKING

from underwatt.plan.forecast import Forecast
from underwatt.plan.select import RISK, choose_setting

if TYPE_CHECKING:
    from collections.abc import Sequence

    from underwatt.plan.problem import Problem
    from underwatt.plan.select import Plan
    from underwatt.records import Measurement, Profile


class Planner:
    """Predicts a problem's candidates from measurements and references, and chooses among them."""

    def __init__(self, problem: Problem, references: Sequence[Profile] = (), *, seed: int = 0) -> None:
        self._problem = problem
        self._forecast = Forecast(problem, references, seed)

    def plan(self, measurements: Sequence[Measurement], *, risk: float = RISK) -> Plan:
        """Choose among all candidates; needs at least three measured settings."""
        prediction = self._forecast.of_all(measurements)
        return choose_setting(self._problem, prediction, measurements=measurements, risk=risk)

    def replan(self, measurements: Sequence[Measurement], *, risk: float = RISK) -> Plan:
        """Choose among the candidates that had a prospect in the last plan; its front holds only those."""
        rows, prediction = self._forecast.of_promising(measurements)
        return choose_setting(self._problem.take(rows), prediction, measurements=measurements, risk=risk)
