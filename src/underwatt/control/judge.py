"""The judge of a run: was the budget held? Judged while the run goes on; its log and its report repeat the verdict.

Mean watts: the mean over the budget's own window (5 s where it names none), or over five steps where those take
longer (but at most a minute), may be above the budget by 2% for at most 1% of the time. Where joules are counted, steps
that are so long are judged with the pauses after them, five at a time and nothing cut off. Another sensor lags, so that
it shows a load that came or went too late, and less of a brief one: as its lag is known by and by, what it has yet to
show is added to the mean. Peak watts: no reading may be above them; after a fall, what still shows the watts of before,
and no more than these, is excused while the lag lasts.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from underwatt.budget import Watts
from underwatt.events import Verdict
from underwatt.measure.meter import LONGEST_GAP_S
from underwatt.measure.steady import SENSOR_LAG_S, Settling
from underwatt.planning.problem import DEFAULT_WINDOW_S

if TYPE_CHECKING:
    from collections.abc import Iterator

    from underwatt.budget import Budget
    from underwatt.measure.meter import Meter

TOLERANCE = 0.02  # a mean that is above the budget by less is within what sensors and pacing resolve
OVER, WITHIN = "Over the budget", "Within the budget"  # what is said when it begins to be exceeded, and when no more
WINDOW_STEPS = 5
LONGEST_WINDOW_S = 60.0  # of five steps: a long wait is no long step
FULL = 0.8  # a window that readings cover to this share is judged
END_READINGS = 3  # whose mean is what a sensor shows at a moment: readings are noisy
CLEAR = 0.05  # a difference between two such means that is smaller, as a share of them, is taken for noise


@dataclass(frozen=True, slots=True)
class Second:
    """The readings of a second, or of the part of it that one budget covers."""

    begin_s: float
    end_s: float
    mean_w: float
    max_w: float
    readings: int
    began_w: float = math.nan  # what the sensor showed before the first of them, and at the last
    ended_w: float = math.nan

    @property
    def seconds(self) -> float:
        """How long it is."""
        return self.end_s - self.begin_s

    @property
    def _bend_w(self) -> float:
        """How far its middle lies off the straight line between its ends, so that its mean is as it was: a parabola."""
        return 6 * (self.mean_w - (self.began_w + self.ended_w) / 2)

    def shown_w(self, share: float) -> float:
        """What the sensor showed when so much of it was over; NaN where its ends are not known."""
        return self.began_w + share * (self.ended_w - self.began_w + (1 - share) * self._bend_w)

    def drawn_j(self, share: float) -> float:
        """The joules that were read since so much of it was over: where steps and pauses take turns, no even share."""
        if share <= 0 or math.isnan(self.began_w):
            return (1 - max(share, 0.0)) * self.seconds * self.mean_w
        before_w = share * (self.began_w + share * (self.ended_w - self.began_w) / 2)
        before_w += self._bend_w * share**2 * (1 / 2 - share / 3)
        return self.seconds * (self.mean_w - before_w)


class Seconds:
    """Gathers readings by the second of the run; each stands for the time since the one before it."""

    def __init__(self, begin_s: float = 0.0) -> None:
        self.are_counted = False  # readings are means since the one before, and show no moment's watts
        self._begin_s = self._end_s = begin_s
        self._energy_j = self._max_w = 0.0
        self._readings = 0
        self._began_w = math.nan
        self._last: deque[float] = deque(maxlen=END_READINGS)

    def read(self, at_s: float, power_w: float) -> Iterator[Second]:
        """Take in a reading; gives the second that it ends, where it ends one."""
        if math.floor(at_s) > math.floor(self._end_s) and self._readings:
            yield from self.cut()
        if at_s - self._end_s > LONGEST_GAP_S:
            self._begin_s = self._end_s = at_s - LONGEST_GAP_S
            self._last.clear()
            self._began_w = math.nan
        if at_s <= self._end_s:
            return
        self._energy_j += power_w * (at_s - self._end_s)
        self._max_w = max(self._max_w, power_w)
        self._readings += 1
        self._last.append(power_w)
        self._end_s = at_s

    def cut(self) -> Iterator[Second]:
        """Another budget holds from now on, or the run is over: what was read since the last second is one."""
        if self._readings:
            seconds = self._end_s - self._begin_s
            ended_w = math.nan if self.are_counted else sum(self._last) / len(self._last)
            mean_w, began_w, self._began_w = self._energy_j / seconds, self._began_w, ended_w
            yield Second(self._begin_s, self._end_s, mean_w, self._max_w, self._readings, began_w, ended_w)
        self._begin_s, self._energy_j, self._max_w, self._readings = self._end_s, 0.0, 0.0, 0


@dataclass(frozen=True, slots=True)
class Bound:
    """The watts in force."""

    power_w: float = math.inf
    is_peak: bool = False
    window_s: float = DEFAULT_WINDOW_S


class Judge:
    """Judges second after second; ``over`` is how far the last window lies above the budget, as a share of it.

    ``drawn_w`` was drawn in that window, or at most in it under peak watts, and ``allowed_w`` was allowed.
    """

    def __init__(self, before: Verdict | None = None) -> None:
        self.verdict = before or Verdict()
        self.over = self.drawn_w = self.allowed_w = 0.0
        self.lag_s = 0.0  # of the sensor, as far as it is known
        self._bound = Bound()
        self._steps_s: deque[float] = deque(maxlen=WINDOW_STEPS)
        self._begins_s: deque[float] = deque(maxlen=WINDOW_STEPS + 1)  # of steps, where joules are counted
        self._unjudged_s: float | None = None  # since when a long step waits to be judged
        self._window: deque[tuple[Second, float]] = deque()  # with the watts that were in force
        # After a fall of peak watts the sensor shows for a while what was before, which the watts before it bound.
        self._fallen_from_w = self._excused_until_s = -math.inf
        self._excused: list[Second] = []

    def budget(self, at_s: float, bound: Bound) -> None:
        """Other watts hold from a moment on."""
        before, self._bound = self._bound, bound
        if bound.is_peak != before.is_peak or math.isinf(before.power_w) or math.isinf(bound.power_w):
            self._window.clear()
            self._unjudged_s = None
        if not bound.is_peak:
            self._fallen_from_w, self._excused = -math.inf, []
        elif bound.power_w < before.power_w < math.inf:
            self._fallen_from_w = max(self._fallen_from_w, before.power_w)
            self._excused_until_s = at_s + SENSOR_LAG_S

    def steps_take(self, seconds: float) -> None:
        """So long a step took, with the pause before it."""
        self._steps_s.append(seconds)

    def has_long_steps(self, now_s: float) -> bool:
        """Whether five steps with their pauses take longer than a window, and they are told of one by one."""
        begins_s = self._begins_s
        if not begins_s or self._bound.is_peak or now_s - begins_s[-1] > LONGEST_WINDOW_S:
            return False
        if len(begins_s) <= WINDOW_STEPS:
            return (now_s - begins_s[0]) / len(begins_s) > self._bound.window_s / WINDOW_STEPS
        return max(begins_s[-1] - begins_s[0], now_s - begins_s[-1]) > self._bound.window_s

    def step_begins(self, at_s: float) -> None:
        """A step begins, the pause before it is over, and all seconds until then were taken."""
        self._begins_s.append(at_s)
        is_whole = len(self._begins_s) > WINDOW_STEPS and bool(self._window)
        if not is_whole or not self.has_long_steps(at_s) or math.isinf(self._bound.power_w):
            return
        end_s = self._window[-1][0].end_s
        over = self._over_mean(max(self._begins_s[0], end_s - LONGEST_WINDOW_S), end_s)
        if over is not None:
            self.over = over
            if self._unjudged_s is not None:
                self._count(self._unjudged_s, end_s, over)
            self._unjudged_s = None

    def take(self, second: Second) -> None:
        """Judge one more second."""
        bound = self._bound
        if math.isinf(bound.power_w):
            self.over = 0.0
            return
        self.verdict = replace(self.verdict, bounded_s=self.verdict.bounded_s + second.seconds)
        if self._fallen_from_w > bound.power_w:
            is_lagging = second.begin_s <= self._excused_until_s and second.max_w > bound.power_w
            if is_lagging and second.max_w <= self._fallen_from_w:
                self._excused.append(second)
                return
            if not is_lagging:
                if second.max_w > (1 + TOLERANCE) * bound.power_w:  # still above when the lag is over: so all the time
                    for one in self._excused:
                        self._count(one.begin_s, one.end_s, one.max_w / bound.power_w - 1)
                self._fallen_from_w, self._excused = -math.inf, []
        self._window.append((second, bound.power_w))
        if self.has_long_steps(second.end_s):
            self._unjudged_s = second.begin_s if self._unjudged_s is None else self._unjudged_s
            return
        over = self._over(second)
        if over is not None:
            self.over = over
            self._count(second.begin_s if self._unjudged_s is None else self._unjudged_s, second.end_s, over)
            self._unjudged_s = None

    def _over(self, second: Second) -> float | None:
        """How far this second, or the window that it ends, lies above the budget; ``None`` before a window is full."""
        bound = self._bound
        if bound.is_peak:
            self._window.clear()
            self.drawn_w, self.allowed_w = second.max_w, bound.power_w
            return second.max_w / bound.power_w - 1
        window_s = max(bound.window_s, min(sum(self._steps_s), LONGEST_WINDOW_S))
        return self._over_mean(second.end_s - window_s, second.end_s)

    def _over_mean(self, begin_s: float, end_s: float) -> float | None:
        if end_s <= begin_s:
            return None  # nothing was read since then
        while self._window[0][0].end_s <= begin_s:
            self._window.popleft()
        total_s = drawn_j = allowed_j = 0.0
        for one, allowed_w in self._window:
            seconds = min(one.seconds, one.end_s - begin_s)
            total_s, drawn_j, allowed_j = (
                total_s + seconds,
                drawn_j + one.drawn_j(1 - seconds / one.seconds),
                allowed_j + seconds * allowed_w,
            )
        if total_s < FULL * (end_s - begin_s):
            return None
        drawn_j += self._unseen_j(drawn_j / total_s, begin_s)
        self.drawn_w, self.allowed_w = drawn_j / total_s, allowed_j / total_s
        return drawn_j / allowed_j - 1

    def _unseen_j(self, mean_w: float, begin_s: float) -> float:
        """Joules of the window that the sensor had not shown at its end, less those of before that it showed in it."""
        first, last = self._window[0][0], self._window[-1][0]
        since = min(max(begin_s - first.begin_s, 0.0) / first.seconds, 1.0)
        rise_w = last.ended_w - first.shown_w(since)
        return self.lag_s * rise_w if abs(rise_w) > CLEAR * mean_w else 0.0  # none where that is not known

    def _count(self, begin_s: float, end_s: float, over: float) -> None:
        verdict, is_peak = self.verdict, self._bound.is_peak
        verdict = replace(verdict, judged_s=verdict.judged_s + end_s - begin_s)
        if over > (0.0 if is_peak else TOLERANCE):
            verdict = replace(
                verdict,
                over_s=verdict.over_s + end_s - begin_s,
                peaks=verdict.peaks + is_peak,
                worst_over=max(verdict.worst_over, over),
                since_s=begin_s if verdict.since_s is None else verdict.since_s,
            )
        self.verdict = verdict


class LiveJudge:
    """Judges a run under way by its meter's readings; ``catch_up`` as often as you like."""

    def __init__(self, meter: Meter, begun_s: float, before: Verdict | None = None, elapsed_s: float = 0.0) -> None:
        self._meter, self._begun_s = meter, begun_s
        self._judge = Judge(before)
        newest = meter.newest
        # An earlier part, so long, is judged already, and nothing was read while the run was stopped.
        self._read_s = begun_s + elapsed_s if newest is None else newest.at_s
        self._seconds = Seconds(self._read_s - begun_s)
        self.settling = Settling()  # what is known of the sensor's lag; whoever measures adds to it
        self._why = ""
        self._is_peak = self._was_over = False

    @property
    def over(self) -> float:
        """How far the last window lies above the budget, as a share of it; negative below."""
        return self._judge.over

    @property
    def is_over(self) -> bool:
        """Whether that is more than may be."""
        return self.over > (0.0 if self._is_peak else TOLERANCE)

    def news(self, budget_w: float) -> tuple[str, str] | None:
        """A note, with its level, where the budget has begun to be exceeded since the last time, or is held again."""
        was_over = self._was_over
        self._was_over = self.is_over or (was_over and self.over > TOLERANCE / 2)  # said once, where it lies near that
        if self.is_over and not was_over:
            what = "the highest reading of the last second" if self._is_peak else "the mean of the last seconds"
            drawn_w, allowed_w = self._judge.drawn_w, self._judge.allowed_w
            return "warning", f"{OVER}: {what} is {drawn_w:.2f} W, {allowed_w:.4g} W are allowed."
        return ("info", f"{WITHIN} of {budget_w:g} W again.") if was_over and not self._was_over else None

    @property
    def verdict(self) -> Verdict:
        """The verdict so far."""
        return replace(self._judge.verdict, why=self._why)

    def catch_up(self, until_s: float = math.inf) -> None:
        """Take in what was read since the last time."""
        self._seconds.are_counted = self._meter.counts_joules
        self._judge.lag_s = 0.0 if self._meter.counts_joules else self.settling.typical_s
        for reading in self._meter.readings_after(self._read_s):
            if reading.at_s > until_s:
                break
            power_w = reading.power_w if self._is_peak else reading.mean_w
            for second in self._seconds.read(reading.at_s - self._begun_s, power_w):
                self._judge.take(second)
            self._read_s = reading.at_s

    def budget(self, now_s: float, budget: Budget, power_w: float) -> None:
        """Other watts hold from now on."""
        self.end()
        self._is_peak = budget.watts is Watts.PEAK
        bound = Bound(power_w, self._is_peak, budget.window_s or DEFAULT_WINDOW_S)
        self._judge.budget(now_s - self._begun_s, bound)

    def stepped(self, ended_s: float, began_s: float, now_s: float, steps: int) -> None:
        """So many steps have ended now; the first of them began when the pause after the last step was over."""
        seconds = (now_s - ended_s) / steps
        if not self._meter.counts_joules:
            if seconds > 1.0:  # what was read in it is judged over the steps before it
                self.catch_up()
            self._judge.steps_take(seconds)
            return
        for step in range(max(0, steps - WINDOW_STEPS - 1), steps):
            self._step_begins(began_s + step * (now_s - began_s) / steps)

    def _step_begins(self, at_s: float) -> None:
        if self._judge.has_long_steps(at_s - self._begun_s):
            self.catch_up(at_s)
            for second in self._seconds.cut():
                self._judge.take(second)
        self._judge.step_begins(at_s - self._begun_s)

    def because(self, why: str) -> None:
        """Why the budget is not held; the first reason is kept."""
        self._why = self._why or why

    def end(self) -> None:
        """Judge what was read so far, also of a second that is not over."""
        self.catch_up()
        for second in self._seconds.cut():
            self._judge.take(second)
