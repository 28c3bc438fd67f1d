"""What a budget leaves: how many watts for a setting as it was measured, and which problem that poses."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from underwatt.budget import Watts
from underwatt.control.knowledge import Knowledge
from underwatt.control.pacer import LEAST_RELIEF, can_hold
from underwatt.device.base import permitted_space
from underwatt.errors import BudgetError
from underwatt.events import Expected, Planned
from underwatt.measure.meter import measure_idle
from underwatt.planning.problem import LEAST_BUSY, Goal, allows_pauses, can_pause
from underwatt.records import Measurement, PowerMode

if TYPE_CHECKING:
    from underwatt.budget import Budget
    from underwatt.control.live_budget import LiveBudget
    from underwatt.control.state import ControlOptions
    from underwatt.device.session import Session
    from underwatt.planning.problem import Problem
    from underwatt.records import Setting

# The share of the budget that is left free: small where joules are counted, more where watts are averaged. Chosen with
# benchmarks/hold.py and benchmarks/hold_gpu.py.
COUNTED_MARGIN, READ_MARGIN = 0.003, 0.004
# A bound on peaks leaves more: the highest of all readings to come lies above the highest of those that were measured.
# A reading that comes nearer than the second of these is acted upon before one is above.
PEAK_MARGIN, PEAK_ALARM = 0.03, 0.01
# A device with clocks is taken to draw at most this share of the budget in a pause: it is the lower clocks' own idling
# that counts, and what was read at the start was read at the clocks found.
IDLE_SHARE, MOST_IDLE_SHARE = 0.75, 0.9
# How far to look ahead where it is not known when the training ends, and at most.
USUAL_VIEW_S, LONGEST_VIEW_S = 3600.0, 86_400.0
FEWEST_STEPS = 3
UNBOUNDED_W = 1e9  # where neither watts nor joules are bounded, and no deadline can be kept


@dataclass(frozen=True)
class Headroom:
    """The watts in force, less margin and drift, and what may be done with them."""

    base: Problem  # all candidates, and what waiting drew at the clocks found
    live: LiveBudget
    knowledge: Knowledge
    margin: float
    may_pause: bool
    budget_w: float = math.nan
    pace_s: float | None = None  # of a whole training that ends by the deadline; none where there is none to keep
    measures_paused: bool = False  # whether settings are measured with the pauses that they need

    @property
    def has_knobs(self) -> bool:
        """Whether there is anything to set but the batch size."""
        return bool(self.base.candidates.knobs)

    @property
    def waits_first(self) -> bool:
        """Whether a setting is measured with its pauses, and what waiting draws there is seen first."""
        return self.measures_paused and self.can_pause

    @property
    def pauses_blur(self) -> bool:
        """Whether settings are measured without pauses, which blur what a sensor reads."""
        return self.has_knobs and not self.waits_first

    @property
    def can_pause(self) -> bool:
        """Whether the budget in force can be kept by pauses; somebody may have changed what its watts mean."""
        return self.may_pause and allows_pauses(self.live.budget)

    @property
    def held_w(self) -> float:
        """The mean that pauses hold; inf where there are none."""
        return self.budget_w * (1 - self.margin) if self.can_pause else math.inf

    @property
    def left_w(self) -> float:
        """The watts that margin and drift leave for a setting as it was measured."""
        margin = PEAK_MARGIN if self.live.budget.watts is Watts.PEAK else self.margin
        return max(self.budget_w * (1 - margin) - self.knowledge.drift.extra_w, 1e-3)

    @property
    def idle_w(self) -> float:
        """Power in a pause: as it was found, or less where lower clocks, which a lower budget asks for, draw less."""
        found_w, usual_w = self.base.idle_w, IDLE_SHARE * self.budget_w
        if found_w is not None and not self.has_knobs:
            return found_w
        if math.isinf(self.budget_w):
            return found_w or 0.0
        # Another process, or heat, draws in pauses too.
        drifted_w = min(usual_w, found_w or usual_w) + max(0.0, self.knowledge.drift.extra_w)
        return min(drifted_w, MOST_IDLE_SHARE * self.budget_w)

    def idle_at(self, setting: Setting | None) -> float:
        """Power in a pause at a setting: as it was seen there, or near it, or as above."""
        known = self.knowledge.of(setting) if setting else None
        seen_w = self.knowledge.waits_w(setting.mode) if setting else None
        seen_w = self.knowledge.idle_w(known) if known and seen_w is None else seen_w
        return self.idle_w if seen_w is None else seen_w

    def problem(self) -> Problem:
        """Which setting to use."""
        if math.isinf(self.budget_w):
            energy_j = self.live.budget.energy_j
            watts_w = UNBOUNDED_W if energy_j is None and self.pace_s is None else None
            budget = replace(self.live.budget, power_w=watts_w, deadline_s=self.pace_s)
            return replace(self.base, budget=budget, goal=self.goal)
        budget = replace(self.live.budget, power_w=self.left_w, energy_j=None, deadline_s=self.pace_s)
        idle_w = self.idle_w if self.can_pause else None
        return replace(self.base, budget=budget, goal=self.goal, idle_w=idle_w)

    @property
    def goal(self) -> Goal:
        """With time enough to the deadline, the least energy."""
        return self.base.goal if self.pace_s is None else Goal.LEAST_ENERGY

    def lowest(self) -> Setting:
        """Every knob at its lowest, where waiting draws least; the next ones where the device refuses that."""
        candidates = self.base.candidates
        if not candidates.knobs:
            return candidates[0]
        order = np.lexsort([candidates.batch_size, *candidates.values.T[::-1]])
        taken = (candidates[int(at)] for at in order if not self.knowledge.is_refused(candidates[int(at)].mode))
        return next(taken, candidates[int(order[0])])

    def fits_something(self) -> bool:
        """Whether something that was measured keeps the budget, with pauses where they help."""
        best = self.knowledge.best(self.problem())
        return best is not None and best.fits

    def can_wait(self, watts: float) -> bool:
        """Whether waiting draws less; where there are clocks to lower, that is not known before it is tried."""
        idle_w = self.base.idle_w
        return idle_w is None or self.has_knobs or not self.can_pause or can_hold(watts, idle_w)

    def check(self, watts: float) -> None:
        """Raise ``BudgetError`` where waiting alone draws more than these, the most that are to come, at any clocks."""
        if not self.can_wait(watts):
            assert self.base.idle_w is not None
            least_w = math.ceil(10 * self.base.idle_w / (1 - LEAST_RELIEF)) / 10
            raise BudgetError(
                f"{watts:g} W is less than the device draws while it waits ({self.base.idle_w:.2f} W), or as much.",
                hint=f"The smallest budget that pauses hold is above {least_w:g} W.",
            )

    def time_at_level_s(self, elapsed_s: float, left_s: float, near: float) -> float:
        """How long watts like these are expected to hold, over all times that they come."""
        left_s = min(left_s, LONGEST_VIEW_S) if math.isfinite(left_s) else USUAL_VIEW_S
        schedule = self.live.schedule
        if schedule is None:
            return left_s
        pieces = schedule.pieces(elapsed_s, elapsed_s + left_s)
        alike = (end_s - begin_s for begin_s, end_s, watts in pieces if abs(watts / self.budget_w - 1) <= near)
        return max(sum(alike), 1.0)

    def expected_s(self, setting: Setting | None) -> float:
        """What a whole training takes at a setting, as the device is now; inf while that is not known."""
        known = self.knowledge.of(setting) if setting and self.base.to_target else None
        if known is None:
            return math.inf
        row = int(np.argmax(self.base.candidates.batch_size == known.setting.batch_size))
        return float(known.step_s * self.knowledge.drift.slow_factor * np.exp(self.base.log_steps[row]))

    def sample_s(self, setting: Setting | None) -> float:
        """What a sample takes, with its pauses, at a setting, or else at the best that was measured; else inf."""
        known = self.knowledge.of(setting) if setting else None
        if known is None or not known.usable:
            best = self.knowledge.best(self.problem())
            if best is None:
                return math.inf
            known = best.measurement
        drift, step_s = self.knowledge.drift, known.step_s * self.knowledge.drift.slow_factor
        busy = self.problem().busy_share(np.array([known.power_w + drift.extra_w]), np.array([step_s]))
        return step_s / known.setting.batch_size / float(busy[0])

    def is_ruled_out(self, so_far: Measurement | None, options: ControlOptions) -> bool:
        """Whether a setting under measurement is out already: it draws too much, or is clearly too slow."""
        if so_far is None or so_far.power_w_ci95 > 2 * options.rough * so_far.power_w:
            return False
        seen = self.knowledge.drift.seen_from(so_far)
        if self.pauses_blur and seen.power_w - seen.power_w_ci95 > self.left_w:
            return True
        if so_far.steps < FEWEST_STEPS or so_far.step_s_ci95 > options.rough * so_far.step_s:
            return False
        problem = self.problem()
        best, trial = self.knowledge.best(problem), Knowledge(problem, [seen]).best(problem)
        if not (best and best.fits and trial):
            return False
        return trial.score(problem.goal) > options.hopeless * best.score(problem.goal)

    def why_nothing_fits(self, budget: Budget) -> BudgetError | None:
        """Why nothing that was measured keeps the budget; ``None`` where something does, or nothing was measured."""
        knowledge, problem = self.knowledge, self.problem()
        best = knowledge.best(problem)
        if best is None or best.fits:
            return None
        if math.isinf(self.budget_w):
            found = [knowledge.outcome(m.setting, problem) for m in knowledge.measurements()]
            time_s, energy_j = min(o.time_s for o in found if o), min(o.energy_j for o in found if o)
            return BudgetError(
                f"No setting reaches the target within {budget}: the soonest takes {time_s:.4g} s, the thriftiest "
                f"{energy_j / 3600:.4g} Wh.",
                hint="Raise the energy or the time of the budget, or choose an easier target.",
            )
        least_w = min(budget.drawn_w(m) for m in knowledge.measurements()) + knowledge.drift.extra_w
        bound = f"{self.budget_w:g} W {budget.watts.value}"
        enough_w = max(min(1.02 * least_w, self._least_paused_w()), 1.02 * self.budget_w)
        return BudgetError(
            f"No setting keeps {bound}: the least that was measured is {least_w:.2f} W.",
            hint=f"Raise the budget to {math.ceil(10 * enough_w) / 10:g} W, or offer smaller batch sizes.",
        )

    def _least_paused_w(self) -> float:
        """The least watts that pauses hold at a setting that was measured, as far as is known; else inf."""
        least_w = math.inf
        for known in self.knowledge.measurements() if self.can_pause else ():
            idle_w = self.idle_at(known.setting)
            paused_w = (idle_w + LEAST_BUSY * (self.knowledge.expected_w(known) - idle_w)) / (1 - self.margin)
            if can_pause(known.power_w, known.step_s, replace(self.live.budget, power_w=paused_w)):
                least_w = min(least_w, paused_w)
        return least_w

    def planned(self, setting: Setting) -> Planned | None:
        """The chosen setting, what it is expected to take, and why; ``None`` where it was not measured."""
        chosen = self.knowledge.outcome(setting, self.problem())
        if chosen is None:
            return None
        power_w = min(chosen.measurement.power_w + self.knowledge.drift.extra_w, self.held_w)
        bound = "no bound on watts" if math.isinf(self.budget_w) else f"{self.budget_w:g} W"
        count = len(self.knowledge.measurements())
        return Planned(
            chosen=setting,
            expected=Expected(chosen.time_s, power_w, chosen.time_s * power_w),
            reason=f"It is the best of {count} settings that were measured, under {bound}.",
        )


def lowest_idle_w(session: Session, set_modes: bool, live: LiveBudget, elapsed_s: float) -> float:
    """A device draws more than the budget while it waits: what it draws at its lowest clocks, which it is left at.

    Raises ``BudgetError`` where the most watts that are to come cannot be held there either.
    """
    space = permitted_space(session.device) if set_modes else session.device.space.only(())
    if not space.knobs:
        # Whether that is ever allowed, the controller says; where no pauses hold a budget, nothing is waited for.
        return measure_idle(session.device) / (1 - LEAST_RELIEF) if allows_pauses(live.budget) else 0.0
    session.apply(PowerMode.of({knob.name: min(knob.values) for knob in space.knobs}))
    lowest_w = measure_idle(session.device)
    if (most_w := live.most_w(elapsed_s)) <= lowest_w:
        raise BudgetError(
            f"{most_w:g} W is less than the device draws while it waits at its lowest clocks ({lowest_w:.2f} W).",
            hint=f"The smallest budget that pauses hold is above {lowest_w:.2f} W."
            if allows_pauses(live.budget)
            else "Peaks are not lowered by pauses: the budget must allow what a step draws, which is more.",
        )
    return lowest_w
