"""Pauses between steps that hold the mean power at the budget: a closed loop on the joules that were measured.

Where joules are counted, a pause goes on until what was drawn is paid for; what was not read yet is reckoned by what
work has drawn so far. What a stall did not draw is set aside, and made up for by a share that no window notices.

Where there is no counter, a step is read too late for that. It costs so many joules beyond what waiting draws, however
long it takes. So steps are given a beat: the time in which the budget, less waiting, brings those joules. They are
learned from all that is read. What is still off goes to the debt, the joules drawn so far beyond the budget, which is
paid back slowly against the lag of any sensor, so that nothing swings. As the debt is a sum of all that was read, the
mean is exact in the long run.

A step and the pause after it are one cycle. What a step draws is read only in part when it ends, as sensors lag, and
the pause that pays for it is still to come: so both are judged where a cycle ends, and never in the middle of one.

What is no step, such as a test, may be one long piece with none like it to come. So the pause after a piece is never
longer than what was read, and what a sensor may have yet to show, takes to be paid for.

Two readings that lie far apart tell nothing of the time between them, unless joules were counted: the process may have
been stopped, and there is nothing to pay for. A sensor that is silent while work goes on is watched by the controller.
"""

from __future__ import annotations

import math
from collections import deque
from itertools import pairwise
from typing import TYPE_CHECKING

from underwatt.measure.meter import LONGEST_GAP_S, EnergyIntegrator
from underwatt.measure.steady import SENSOR_LAG_S

if TYPE_CHECKING:
    from underwatt.measure.meter import Meter
    from underwatt.records import PowerSample

# Bounds of the debt, as seconds of the budget. What was not drawn is no credit to speak of: the budget of one second is
# not saved for a later one. And what steps drew too much long ago is over. Where there are pauses, a stall may be made
# up for, but only by so small a share above the budget that no window notices.
CREDIT_S, PAUSING_CREDIT_S, LARGEST_DEBT_S = 0.02, 1.0, 0.3
LARGEST_DEBT = 0.1  # or so much of the time over which it is paid back, where that is long
MADE_UP, COUNTED_MADE_UP = 0.012, 0.008
FORGIVEN_S = 0.1  # the debt that is left after a measurement that drew too much
# Where steps as such keep the budget, a debt below this is left alone: readings are noisy.
SLACK_S = 0.02
# A debt is paid back over this time: with a counter of joules, and with a sensor that averages and lags. A step's
# joules are learned so many times slower.
COUNTED_S, READ_S = 0.6, 3.0
LEARNED_SLOWER, LEARNED_STEPS = 2.5, 4.0
PAYBACK_CYCLES = 4.0  # but over so many steps with their pauses at least: what is read of one step is read in the next
# What is expected of steps weighs as much as so long a time of steps that were read; of what is no step less is known.
EXPECTED_S, GUESSED_S, OTHER_EXPECTED_S = 1.0, 0.2, 0.2
# Shorter pauses are saved up, longer ones taken in pieces: in between somebody may change the budget.
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.001, 0.25
COUNTED_PAUSE_S, NEWEST_PAUSES = 0.1, 32  # where the next reading may end it; so many lie after the last one
LEAST_BUSY, MOSTLY_PAUSED = 0.02, 0.9
# Idling must draw at least this share less than the budget, or pausing pays nothing back.
LEAST_RELIEF = 0.02
FUTILE_S = 5.0  # and where it has drawn more for so long, it pays nothing; by then lower clocks were tried. Not tuned.


class Pacer:
    """How long to wait after a step."""

    def __init__(self, meter: Meter, idle_w: float, now_s: float) -> None:
        self._meter = meter
        self._idle_w = idle_w
        self._budget_w = math.inf
        self._cost: _StepCost | None = None
        self._others: dict[str, _StepCost] = {}  # what is no step, such as tests: what a second of it costs
        self._other: _StepCost | None = None  # while it is under way
        self._blurred_until_s = -math.inf  # readings tell of two kinds of work
        self._blind_until_s = -math.inf
        self._debt_j = self._settled_j = 0.0  # now, and when the last pause was over
        self._elsewhere_j = 0.0  # of the debt since then, what was drawn by something else than steps
        self._before_w, self._changed_s = math.inf, -math.inf  # the watts before, and the last reading under them
        self._due_j = 0.0  # when the last step ended
        self._spared_j = 0.0  # what was not drawn when something else began, and while it goes on: steps make up for it
        self._last: PowerSample | None = None
        self._counted_s = now_s
        self._joules = EnergyIntegrator()
        self._pauses: deque[tuple[float, float]] = deque(maxlen=NEWEST_PAUSES)
        self._paused_s = self._usual_s = self._steps = 0.0  # not matched with readings yet
        self._busy_from_s = now_s  # when the last pause ended
        self._piece_s, self._ended_s = 0.0, now_s  # how long the last step or piece took, and when it ended
        self._other_from_s = now_s
        self._owed_s = 0.0  # pauses that are due
        # Steps that came often are rare now: the next one is paid for before it, or the window since the fall is above.
        self._has_fallen = False
        self._paid_s = now_s  # when the last step ended
        self._cycle_s = 0.0  # what a step and its pause take
        self.at_ease = False  # whether the last step was followed by no pause, and none is due
        self.short_s = 0.0  # how long pauses have drawn more than the budget
        self._waits_s = self._waits_j = 0.0  # waiting of late, and what it drew, once a sensor shows no work any more

    @property
    def can_hold(self) -> bool:
        """Whether idling draws enough less than the budget for pauses to help."""
        return can_hold(self._budget_w, self._idle_w)

    @property
    def helps(self) -> bool:
        """Whether pauses pay anything back, by what long ones drew of late and not only by what waiting should draw."""
        waits_w = self._seen_waiting_w
        return self.can_hold and (waits_w is None or can_hold(self._budget_w, waits_w))

    @property
    def _seen_waiting_w(self) -> float | None:
        """What long pauses drew of late; ``None`` where there were too few of them to tell."""
        return self._waits_j / self._waits_s if self._waits_s > -math.expm1(-1.0) * FUTILE_S else None

    @property
    def _owes(self) -> bool:
        return self.can_hold and 0 < self._owed_s < math.inf and self._budget_w < math.inf

    def set_budget(self, power_w: float, idle_w: float) -> None:
        """Hold other watts from now on; a pause is expected to draw ``idle_w``."""
        if power_w != self._budget_w < math.inf and self._meter.newest is not None:
            self._before_w, self._changed_s = self._budget_w, self._meter.newest.at_s
        due_j = self._owed_s * (self._budget_w - self._idle_w) if self._owes else 0.0
        self._has_fallen = self._has_fallen or power_w < self._budget_w < math.inf
        self._budget_w, self._idle_w = power_w, idle_w
        self.short_s = 0.0
        if not self.can_hold:
            self._owed_s = math.inf
        else:  # the joules that are due stay due
            self._owed_s = due_j / (power_w - idle_w) if power_w < math.inf else 0.0

    def expect(self, busy_w: float | None, step_s: float = math.nan, blind_until_s: float = -math.inf) -> None:
        """Steps draw so many watts for so long from now on; until a moment, readings still tell of what was before."""
        # What was not measured is a guess, and a counter soon knows better.
        weighs_s = GUESSED_S if self._meter.counts_joules and not step_s > 0 else EXPECTED_S
        self._cost = None if busy_w is None else _StepCost(busy_w, step_s, weighs_s)
        is_shown = busy_w is None or self._meter.counts_joules  # a counter lags behind nothing
        self._blind_until_s = -math.inf if is_shown else blind_until_s
        self._usual_s = self._steps = self._cycle_s = 0.0
        if self._budget_w < math.inf:
            self._debt_j = max(self._debt_j, -CREDIT_S * self._budget_w)

    def measured(self, busy_w: float, step_s: float, *, forgive: bool, blind_until_s: float = -math.inf) -> None:
        """What a step draws is known now; ``forgive`` most of the debt of a measurement that drew too much.

        Until a moment, readings still tell of the longer pauses of before.
        """
        self.take_in()
        self.expect(busy_w, step_s, blind_until_s)
        if forgive and self._budget_w < math.inf:
            self._debt_j = min(self._debt_j, FORGIVEN_S * self._budget_w)

    def stepped(self, now_s: float, steps: float = 1.0) -> None:
        """A step has ended: time for its joules is due. ``steps`` says how many usual ones it is worth."""
        usual_s = busy_s = max(0.0, now_s - self._busy_from_s)
        self._piece_s, self._ended_s, self._busy_from_s = busy_s, now_s, now_s
        if self._work is not None:
            usual_s = self._work.usual_s(steps, busy_s)
        if self._other is None:
            self._end_cycle()
        self._usual_s += usual_s
        self._steps += steps
        self.take_in()
        if self._other is not None:  # a piece may be as long as many steps: what it drew counts at once
            self._end_cycle()
        self.at_ease = self._budget_w == math.inf
        if self.at_ease:
            return
        if not self.can_hold:
            self._owed_s = math.inf  # until other watts hold
            return
        share = self._busy_share(usual_s)
        if self._pays_as_counted:
            self._settle(now_s)
            self._owed_s = self._unpaid_s(now_s)
            self._due_j = max(self._owed_s * (self._budget_w - self._idle_w), LARGEST_DEBT_S * self._budget_w)
            self.at_ease = share == 1.0 and self._owed_s == 0.0 and self._other is None
            return
        if share == 1.0:
            self._owed_s, self.at_ease = 0.0, True
            return
        self._cycle_s = usual_s / share / steps
        # A slow step is made up for by the next ones, but no more than one.
        self._owed_s = max(self._owed_s + usual_s / share - busy_s, -usual_s)
        if self._other is not None:
            self._owed_s = min(self._owed_s, self._most_owed_s(now_s))
        if self._has_fallen:
            self._has_fallen = False
            self._owed_s += (usual_s / share - usual_s) / steps

    def pause_s(self) -> float:
        """How long to wait now; 0 where the budget is kept."""
        if self._owed_s == math.inf and self._meter.wants_work():
            return 0.0  # what says that nothing holds may be a sensor that is stuck
        longest_s = COUNTED_PAUSE_S if self._pays_as_counted else LONGEST_PAUSE_S
        return min(self._owed_s, longest_s) if self._owed_s >= SHORTEST_PAUSE_S else 0.0

    def paused(self, seconds: float, now_s: float) -> None:
        """So long was waited."""
        self._paused_s += seconds
        self._pauses.append((now_s - seconds, now_s))
        self._owed_s -= seconds
        self._busy_from_s = now_s
        self.take_in()
        waits_w = self._seen_waiting_w
        if self._owed_s == math.inf and waits_w is not None and can_hold(self._budget_w, waits_w):
            self._idle_w, self._owed_s = waits_w, 0.0  # it was taken to draw more, and nothing else would tell
        if self._pays_as_counted and self._owed_s < math.inf:
            self._debt_j = min(self._debt_j, self._due_j)  # what draws too much in a pause is no step
            self._owed_s = self._unpaid_s(now_s)
        elif self._owes and self._other is not None:  # of which more is read by now
            self._owed_s = min(self._owed_s, self._most_owed_s(now_s))

    def unsettled_s(self, now_s: float) -> float:
        """How long to wait now so that all of what is no step is paid for, whatever comes after it; 0 where it is.

        Joules that were read are not enough to go by where the sensor lags: a brief test shows only after its end.
        """
        if not self.helps or self._budget_w == math.inf or self._meter.newest is None:
            return 0.0
        self.take_in()
        unpaid_s = self._unpaid_s(now_s)
        unshown_s = 0.0 if self._meter.counts_joules else SENSOR_LAG_S - (now_s - self._ended_s)
        was_shown = self._ended_s - self._other_from_s >= SENSOR_LAG_S and self._meter.newest.power_w <= self._budget_w
        if unpaid_s < SHORTEST_PAUSE_S and was_shown:
            return 0.0
        owed_s = min(max(unpaid_s, unshown_s), COUNTED_PAUSE_S if self._meter.counts_joules else LONGEST_PAUSE_S)
        return owed_s if owed_s >= SHORTEST_PAUSE_S else 0.0

    def skip(self, now_s: float) -> None:
        """No pause is wanted now."""
        self._end_cycle()
        self.take_in()
        if self._pays_as_counted:
            self._debt_j = min(self._debt_j, LARGEST_DEBT_S * self._budget_w)
        self._owed_s = 0.0
        self._busy_from_s = now_s

    def turn_to(self, what: str, busy_w: float, now_s: float) -> None:
        """Something that is no step begins: its pieces are reported as steps are, until ``turn_back``.

        It is taken to draw ``busy_w`` until more is known of it, which is kept for the next time.
        """
        self._turn(now_s)
        if self._meter.counts_joules:
            self._spared_j += min(self._debt_j, 0.0)
            self._debt_j = max(self._debt_j, 0.0)
        self._other = self._others.setdefault(what, _StepCost(busy_w, math.nan, OTHER_EXPECTED_S))
        self._other_from_s = now_s

    def turn_back(self, now_s: float) -> None:
        """There are steps again."""
        self._turn(now_s)
        self._other = None
        if not self._pays_as_counted:
            self._debt_j += self._spared_j
            self._spared_j = 0.0

    def forget_others(self) -> None:
        """What is no step draws other watts from now on, as after a change of clocks; so does waiting."""
        self._others.clear()
        self._waits_s = self._waits_j = 0.0

    def _turn(self, now_s: float) -> None:
        self.take_in()
        self._end_cycle()
        self._usual_s = self._steps = self._cycle_s = 0.0
        self._busy_from_s = now_s
        self._blurred_until_s = now_s + (0.0 if self._meter.counts_joules else SENSOR_LAG_S)

    @property
    def _work(self) -> _StepCost | None:
        """What is under way."""
        return self._cost if self._other is None else self._other

    @property
    def _pays_as_counted(self) -> bool:
        """Whether pauses end when what was drawn is paid for.

        So it is where joules are counted: no beat suits pieces of a test, which are alike in neither time nor joules,
        nor steps that were not measured, nor those of a busy machine.
        """
        if not self._meter.counts_joules or self._budget_w == math.inf:
            return False
        return self._work is not None

    def _settle(self, now_s: float) -> None:
        """Set aside what was not drawn; steps make up for it later, by a share that no window notices."""
        least_j, most_spared_j = -CREDIT_S * self._budget_w, PAUSING_CREDIT_S * self._budget_w
        spared_j = min(self._unpaid_j(now_s) - least_j, 0.0)
        if self._other is None:
            usual_j = COUNTED_MADE_UP * self._budget_w * max(now_s - self._paid_s, 0.0)
            spared_j += min(-self._spared_j, usual_j)
            self._has_fallen = False
        self._debt_j -= spared_j
        self._spared_j = max(self._spared_j + spared_j, -most_spared_j)
        self._paid_s = now_s

    def _unpaid_j(self, now_s: float) -> float:
        """The debt, with what was not read yet."""
        unread_s = max(now_s - self._counted_s, 0.0)
        paused_s = sum(max(end_s - max(begin_s, self._counted_s), 0.0) for begin_s, end_s in self._pauses)
        unread_j = self._work_w * (unread_s - paused_s) + self._idle_w * paused_s
        return self._debt_j + unread_j - self._budget_w * unread_s

    def _unpaid_s(self, now_s: float) -> float:
        """How long waiting takes to pay for all that was drawn."""
        return max(0.0, self._unpaid_j(now_s)) / (self._budget_w - self._idle_w)

    @property
    def _work_w(self) -> float:
        """What work is believed to draw; as much as is allowed where nothing is known."""
        return self._budget_w if self._work is None else self._work.watts(self._idle_w)

    def _most_owed_s(self, now_s: float) -> float:
        """How long waiting takes to pay for all that was read, and for what a sensor that lags may have yet to show.

        A beat takes pieces to be alike and pays a debt back with those to come, which a long test may not have.
        """
        unshown_s = max(min(self._piece_s, SENSOR_LAG_S - (now_s - self._ended_s)), 0.0)
        unshown_j = max(self._work_w - self._budget_w, 0.0) * unshown_s
        return self._unpaid_s(now_s) + unshown_j / (self._budget_w - self._idle_w)

    def _busy_share(self, usual_s: float) -> float:
        """The share of the time that steps, or pieces of what is under way instead, may take.

        However large the debt is, no more is waited after one that takes ``usual_s`` than pays for both.
        """
        share = self._work.share(self._budget_w, self._idle_w) if self._work is not None else 1.0
        debt_s = self._settled_j / self._budget_w
        if share == 1.0 and debt_s <= SLACK_S:
            return 1.0
        # With steps that keep the budget as they are, there is nothing but the debt to pause for.
        repaid_s = max(self._settled_j, 0.0) / (self._budget_w - self._idle_w)
        least = max(usual_s / max(usual_s / share + repaid_s, SHORTEST_PAUSE_S), LEAST_BUSY)
        return min(1.0, max(share * (1 - max(debt_s / self._payback_s(), -MADE_UP)), least))

    def _payback_s(self) -> float:
        return max(self._lag_s(), PAYBACK_CYCLES * self._cycle_s)

    def _lag_s(self) -> float:
        return COUNTED_S if self._last is not None and self._last.energy_j is not None else READ_S

    def take_in(self) -> None:
        """Count the readings since the last look."""
        if self._meter.newest is self._last:
            return
        samples = self._meter.readings_after(self._counted_s)
        if not samples:
            return
        if self._last is not None:
            samples.insert(0, self._last)
        # Steps since the last look belong to all readings since then, alike.
        span_s = max(samples[-1].at_s - samples[0].at_s, 1e-9)
        usual_s, steps = self._usual_s, self._steps
        if len(samples) > 1:
            self._usual_s = self._steps = 0.0
        for before, after in pairwise(samples):
            share = (after.at_s - before.at_s) / span_s
            self._add(before, after, share * usual_s, share * steps)
        self._last = samples[-1]
        self._counted_s = self._last.at_s

    def _add(self, before: PowerSample, after: PowerSample, usual_s: float, steps: float) -> None:
        seconds = after.at_s - before.at_s
        drawn_j = self._joules.between(before, after)
        paused_s = min(self._paused_s, seconds)
        self._paused_s -= paused_s
        if self._budget_w == math.inf:
            return
        if seconds > LONGEST_GAP_S and (before.energy_j is None or after.energy_j is None):
            return  # nobody knows what was drawn meanwhile: nothing, where this process was stopped
        waited = paused_s > MOSTLY_PAUSED * seconds
        short = waited and drawn_j > self._budget_w * seconds
        self.short_s = self.short_s + seconds if short else 0.0
        if waited and before.at_s > self._ended_s + SENSOR_LAG_S:
            keep = math.exp(-seconds / FUTILE_S)
            self._waits_s, self._waits_j = keep * self._waits_s + seconds, keep * self._waits_j + drawn_j
        cost, is_blurred = self._work, before.at_s < self._blurred_until_s
        if cost is not None and not is_blurred:
            if before.at_s < self._blind_until_s and self._other is None:
                drawn_j = cost.busy_w * (seconds - paused_s) + self._idle_w * paused_s
            else:
                # Where steps are long, some of them must be seen before the earlier ones are forgotten.
                weight = min(seconds / (LEARNED_SLOWER * self._lag_s()), steps / LEARNED_STEPS)
                cost.learn(drawn_j, seconds, usual_s, weight)
        is_before = self._meter.counts_joules and after.at_s <= self._changed_s
        over_j = drawn_j - (self._before_w if is_before else self._budget_w) * seconds
        self._debt_j += over_j
        self._elsewhere_j += over_j if is_blurred or self._other is not None else 0.0

    def _end_cycle(self) -> None:
        """A step and its pause are over: learn from them, and keep the debt within its bounds."""
        cost = self._work
        if cost is not None:
            cost.fold()
        if self._budget_w < math.inf and not self._pays_as_counted:
            pausing = cost is not None and cost.share(self._budget_w, self._idle_w) < 1
            least_j = -(PAUSING_CREDIT_S if pausing and self._other is None else CREDIT_S) * self._budget_w
            most_s = max(LARGEST_DEBT_S, LARGEST_DEBT * self._payback_s())
            most_j = max(most_s * self._budget_w, self._settled_j + max(self._elsewhere_j, 0.0))
            self._debt_j = min(max(self._debt_j, least_j), most_j)
        self._settled_j, self._elsewhere_j = self._debt_j, 0.0


def can_hold(budget_w: float, idle_w: float) -> bool:
    """Whether a device that draws so much while it waits can be held at a budget by waiting."""
    return budget_w * (1 - LEAST_RELIEF) > idle_w


class _StepCost:
    """The joules of a step beyond waiting: as expected at first, then as they were of late.

    Where it is not known how long a step usually takes, the joules of a second of steps are learned instead.
    """

    def __init__(self, busy_w: float, step_s: float, expected_s: float = EXPECTED_S) -> None:
        self.busy_w, self.step_s = busy_w, step_s
        self._unit_s = step_s if step_s > 0 else 1.0
        self._units = max(1.0, expected_s / self._unit_s) if step_s > 0 else expected_s
        self._seconds = self._units * self._unit_s  # pauses included
        self._joules = busy_w * self._seconds
        self._news = [0.0, 0.0, 0.0, 0.0]  # of the cycle under way

    def usual_s(self, steps: float, busy_s: float) -> float:
        """How long so many steps usually take, where these took ``busy_s``."""
        return steps * self.step_s if self.step_s > 0 else busy_s

    def watts(self, idle_w: float) -> float:
        """What work itself draws, pauses left out."""
        busy_s = self._units * self._unit_s
        return (self._joules - idle_w * max(self._seconds - busy_s, 0.0)) / busy_s

    def learn(self, joules: float, seconds: float, usual_s: float, weight: float) -> None:
        """So many joules in so long a time were read, with steps that usually take so long.

        ``weight`` says how much that is to learn.
        """
        news = (joules, seconds, usual_s / self._unit_s, weight)
        self._news = [before + more for before, more in zip(self._news, news, strict=True)]

    def fold(self) -> None:
        """A cycle is over: what was read in it counts from now on."""
        joules, seconds, units, weight = self._news
        keep = math.exp(-weight)
        self._joules = keep * self._joules + joules
        self._seconds = keep * self._seconds + seconds
        self._units = keep * self._units + units
        self._news = [0.0, 0.0, 0.0, 0.0]

    def share(self, budget_w: float, idle_w: float) -> float:
        """The share of the time that steps may take, as long as they usually do, where waiting draws ``idle_w``."""
        steps_j, left_j = self._joules - idle_w * self._seconds, (budget_w - idle_w) * self._unit_s * self._units
        if steps_j <= left_j:
            return 1.0
        return left_j / steps_j if left_j > 0 else 0.0
