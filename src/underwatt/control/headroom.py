"""The room that a budget leaves: how many watts for a setting as it was measured, and the problem that poses."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from underwatt.control.pacer import LEAST_RELIEF, can_hold
from underwatt.errors import BudgetError
from underwatt.planning.ahead import look_ahead
from underwatt.planning.problem import allows_pauses

if TYPE_CHECKING:
    from underwatt.control.knowledge import Knowledge
    from underwatt.control.live import LiveBudget
    from underwatt.planning.problem import Problem
    from underwatt.records import Setting

# The share of the budget that is left free: small where joules are counted, more where watts are averaged.
COUNTED_MARGIN, READ_MARGIN = 0.003, 0.004
# A device with clocks is taken to draw at most this share of the budget in a pause: it is the lower clocks' own idling
# that counts, and what was read at the start was read at the clocks found.
IDLE_SHARE, MOST_IDLE_SHARE = 0.75, 0.9
# How far to look ahead where it is not known when the training ends, and at most.
USUAL_VIEW_S, LONGEST_VIEW_S = 3600.0, 86_400.0


class Room:
    """The watts in force, less margin and drift, and what may be done with them."""

    def __init__(
        self, problem: Problem, live: LiveBudget, knowledge: Knowledge, *, counts_joules: bool, can_pause: bool
    ) -> None:
        self._base, self._live, self._knowledge = problem, live, knowledge
        self._margin = COUNTED_MARGIN if counts_joules else READ_MARGIN
        self._may_pause = can_pause
        self.has_knobs = bool(problem.candidates.knobs)
        self.budget_w = math.nan
        self.floor_w = 0.0  # what was seen to be drawn while nothing was done but wait

    @property
    def can_pause(self) -> bool:
        """Whether the budget in force can be kept by pauses; somebody may have changed what its watts mean."""
        return self._may_pause and allows_pauses(self._live.budget)

    @property
    def watches(self) -> bool:
        """Whether watts are compared with what is expected of a setting; pauses alone follow the watts anyway."""
        return self.has_knobs or not self.can_pause

    @property
    def held_w(self) -> float:
        """The mean that pauses hold; inf where there are none."""
        return self.budget_w * (1 - self._margin) if self.can_pause else math.inf

    @property
    def left_w(self) -> float:
        """The watts that margin and drift leave for a setting as it was measured."""
        return self._knowledge.effective_w(self.budget_w * (1 - self._margin))

    @property
    def idle_w(self) -> float:
        """Power in a pause: as it was found, or less where lower clocks, which a lower budget asks for, draw less."""
        found_w, usual_w = self._base.idle_w, IDLE_SHARE * self.budget_w
        if found_w is not None and not self.has_knobs:
            return found_w
        if math.isinf(self.budget_w):
            return found_w or 0.0
        # Another process, or heat, draws in pauses too.
        drifted_w = min(usual_w, found_w or usual_w) + max(0.0, self._knowledge.drift.extra_w)
        return max(min(drifted_w, MOST_IDLE_SHARE * self.budget_w), self.floor_w)

    def problem(self) -> Problem:
        """Which setting to use."""
        if math.isinf(self.budget_w):
            return self._base
        budget = replace(self._live.budget, power_w=self.left_w, energy_j=None, deadline_s=None)
        return replace(self._base, budget=budget, idle_w=self.idle_w if self.can_pause else None)

    def search_problem(self) -> Problem:
        """What to look for: where clocks can be set, settings that fit as they are, for pauses would blur the reading.

        Pauses are then only for settings whose power is known already.
        """
        problem = self.problem()
        return replace(problem, idle_w=None) if self.has_knobs else problem

    def can_wait(self, watts: float) -> bool:
        """Whether waiting draws less; where there are clocks to lower, that is not known before it is tried."""
        idle_w = self._base.idle_w
        return idle_w is None or self.has_knobs or not self.can_pause or can_hold(watts, idle_w)

    def check(self, watts: float) -> None:
        """Raise ``BudgetError`` where waiting alone draws more, and there is no clock to lower."""
        if not self.can_wait(watts):
            assert self._base.idle_w is not None
            least_w = math.ceil(10 * self._base.idle_w / (1 - LEAST_RELIEF)) / 10
            raise BudgetError(
                f"{watts:g} W is less than the device draws while it waits ({self._base.idle_w:.2f} W), or as much.",
                hint=f"The smallest budget that can be held is above {least_w:g} W.",
            )

    def time_at_level_s(self, elapsed_s: float, left_s: float, near: float) -> float:
        """How long watts like these are expected to hold, over all times that they come."""
        left_s = min(left_s, LONGEST_VIEW_S) if math.isfinite(left_s) else USUAL_VIEW_S
        schedule = self._live.schedule
        if schedule is None:
            return left_s
        pieces = schedule.pieces(elapsed_s, elapsed_s + left_s)
        alike = (end_s - begin_s for begin_s, end_s, watts in pieces if abs(watts / self.budget_w - 1) <= near)
        return max(sum(alike), 1.0)

    def within_energy(self, elapsed_s: float, energy_j: float, share_left: float) -> Setting | None:
        """Where joules are bounded too: the measured setting for now of the course that ends soonest within them.

        Looks ahead over the schedule, so that a sunny hour to come is reckoned with. ``None`` where joules are not
        bounded, or nothing is known of how far the training has to go.
        """
        limit_j, schedule = self._live.budget.energy_j, self._live.schedule
        known = self._knowledge.measurements()
        if limit_j is None or schedule is None or not known or not np.any(self._base.log_samples):
            return None
        drift = self._knowledge.drift
        log_steps = dict(zip(self._base.candidates.batch_size.tolist(), self._base.log_steps.tolist(), strict=True))
        time_s = [m.step_s * drift.slow_factor * math.exp(log_steps[m.setting.batch_size]) for m in known]
        power_w = [m.power_w + drift.extra_w for m in known]
        drawn_w = [(self._live.budget.drawn_w(m) + drift.extra_w) / (1 - self._margin) for m in known]
        course = look_ahead(
            time_s,
            drawn_w,
            power_w,
            schedule,
            share=share_left,
            begin_s=elapsed_s,
            energy_j=max(0.0, limit_j - energy_j),
            idle_w=self.idle_w,
        )
        row = next((row for _, _, row in course.pieces if row is not None), None)
        return None if row is None else known[row].setting
