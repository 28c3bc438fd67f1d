"""What the readings of a log add up to: joules, and how long and how far they lay above the budget.

This judges no run: the run itself does that while it goes on (``control.judge``), as it alone knows its steps and its
sensor, and its log repeats what it said. These sums tell of every reading, for reports and for whoever wants to check.

Times and watts are whole numbers here, of a tenth of a millisecond and of a tenth of a milliwatt, as a log writes them:
sums of these are exact. So it makes no difference in how many pieces a run is added up, and a log may keep the sums and
forget the readings.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np

from underwatt.control.judge import TOLERANCE
from underwatt.events import BudgetChanged, Event, Resumed, SettingChanged, Started, Verdict
from underwatt.measure.steady import SENSOR_LAG_S

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import ArrayLike, NDArray

    from underwatt.records import Setting

    Floats = NDArray[np.float64]
    Ticks = NDArray[np.int64]

TICKS = 10_000  # to a second, and to a watt
WINDOW_S = 1.0  # where the budget bounds the mean and does not say over how long
LONGEST_WINDOW_S = 1e9
CONTEXT_S = 3600.0  # a mean reaches back no further before its budget was given
_LONG_AGO = -(2**62)
_Number = TypeVar("_Number", np.int64, np.float64)


@dataclass(frozen=True, slots=True)
class Tally:
    """What some readings add up to; tallies of the parts of a run add up to that of all of it, exactly."""

    bounded: int = 0  # ticks of time, here and below
    judged: int = 0
    over: int = 0
    span: int = 0  # that readings stand for
    energy: int = 0  # ticks of time x ticks of power
    energy_over: int = 0  # of single readings above the budget
    readings: int = 0
    readings_over: int = 0
    peaks: int = 0  # readings above a budget of peak watts
    first_over: int | None = None
    worst_over: float = 0.0

    def __add__(self, other: Tally) -> Tally:
        firsts = [first for first in (self.first_over, other.first_over) if first is not None]
        return Tally(
            self.bounded + other.bounded,
            self.judged + other.judged,
            self.over + other.over,
            self.span + other.span,
            self.energy + other.energy,
            self.energy_over + other.energy_over,
            self.readings + other.readings,
            self.readings_over + other.readings_over,
            self.peaks + other.peaks,
            min(firsts, default=None),
            max(self.worst_over, other.worst_over),
        )

    @property
    def verdict(self) -> Verdict:
        """The same for people."""
        return Verdict(
            bounded_s=self.bounded / TICKS,
            judged_s=self.judged / TICKS,
            over_s=self.over / TICKS,
            peaks=self.peaks,
            worst_over=self.worst_over,
            since_s=None if self.first_over is None else self.first_over / TICKS,
        )

    @property
    def span_s(self) -> float:
        """Seconds that the readings stand for."""
        return self.span / TICKS

    @property
    def energy_j(self) -> float:
        """Joules drawn."""
        return self.energy / TICKS**2

    @property
    def energy_over_j(self) -> float:
        """Joules of single readings above the budget."""
        return self.energy_over / TICKS**2


class Tallied(NamedTuple):
    """Readings with what each of them says; all but the tally are arrays, one value a reading."""

    at: Ticks
    power: Ticks
    span: Ticks  # how long it stands for
    under: Ticks  # of that, under the budget it is compared with
    over: Floats  # ticks that the mean of its window lies above the budget; -inf where it is not counted
    tally: Tally

    @property
    def energy_over_j(self) -> float:
        """Joules of these means above the budget."""
        return float(np.sum(np.maximum(0.0, self.over) * self.under)) / TICKS**2


class _Steps(NamedTuple):
    """The budget over time."""

    at: Ticks
    bound: Floats  # ticks of power; inf where watts are not bounded
    window: Ticks  # over which readings are averaged; 0 for peaks
    is_peak: Ticks  # 1 where no reading may be above it at all

    def held(self, of_steps: NDArray[_Number], before: float, at: Ticks) -> NDArray[_Number]:
        """What readings fall under; one at the moment of a change stands for the time before it."""
        whole = np.concatenate([np.array([before], of_steps.dtype), of_steps])
        found: NDArray[_Number] = whole[np.searchsorted(self.at, at, "left")]
        return found

    @property
    def drops(self) -> Ticks:
        """When the budget fell."""
        found: Ticks = self.at[1:][self.bound[1:] < self.bound[:-1]]
        return found


def ticks(values: ArrayLike) -> Ticks:
    """Seconds or watts in whole ticks."""
    found: Ticks = np.rint(np.asarray(values, dtype=float) * TICKS).astype(np.int64)
    return found


class Tallier:
    """Takes events and readings as they come; what ``settle`` gives is added up for good.

    A reading stands for the time since the one before it. The mean of the budget's window up to it is compared,
    which reaches back no further than the last drop of the budget: what was drawn under a higher one was allowed.
    ``lag_s`` is the sensor's own: readings after a drop, or after a change of setting, that are back within the budget
    before it is over still showed what was before, and are not counted. What stays above counts from the change on.
    Nothing reaches across a stop of the run.
    """

    def __init__(
        self, *, window_s: float | None = None, lag_s: float = SENSOR_LAG_S, tolerance: float = TOLERANCE
    ) -> None:
        self._window_s, self._lag, self._tolerance = window_s, int(ticks(max(lag_s, 0.0))), tolerance
        self._begin = 0
        self._steps: list[tuple[int, float, int, int]] = []
        self._changes: list[int] = []
        self._setting: Setting | None = None
        self._at = self._power = np.empty(0, np.int64)
        self._counted = np.empty(0, bool)  # of the readings that are settled, which stand first
        self._new: list[tuple[Ticks, Ticks]] = []

    def take(self, event: Event) -> None:
        """Something happened; where a part of the run begins, what came before must be settled."""
        at = int(ticks(round(event.at_s, 4)))
        if isinstance(event, (Started, Resumed)):
            self._begin, self._setting, self._changes = at, None, []
            self._at, self._power, self._counted = self._at[:0], self._power[:0], self._counted[:0]
        elif isinstance(event, BudgetChanged):
            bound = np.inf if event.power_w is None else max(1.0, float(np.rint(event.power_w * TICKS)))
            window_s = 0.0 if event.watts == "peak" else event.window_s or WINDOW_S
            window_s = min(window_s if self._window_s is None else self._window_s, LONGEST_WINDOW_S)
            is_peak = int(event.watts == "peak" and self._window_s is None)
            insort(self._steps, (at, bound, int(ticks(window_s)), is_peak), key=lambda step: step[0])
        elif isinstance(event, SettingChanged) and event.setting != self._setting:  # another state is no change
            self._setting = event.setting
            self._changes.append(at)

    def read(self, at: Ticks, power: Ticks) -> None:
        """Take in readings; costs next to nothing until they are settled."""
        self._new.append((at, power))

    def settle(self, before: int | None = None) -> Tallied:
        """Add up what was read before a moment, by default all, for good; events up to ``lag_s`` later must be in."""
        self._gather()
        first = len(self._counted)
        last = len(self._at) if before is None else max(first, int(np.searchsorted(self._at, before)))
        counted, found = self._add_up(first, last)
        self._counted = np.concatenate([self._counted, counted])
        self._forget()
        return found

    @property
    def window_s(self) -> float:
        """Over how long the budget in force bounds the mean; 0 where it bounds peaks, or nothing."""
        return self._steps[-1][2] / TICKS if self._steps else 0.0

    def _gather(self) -> None:
        if not self._new:
            return
        first, (at, power) = len(self._counted), map(np.concatenate, zip(*self._new, strict=True))
        self._new.clear()
        at, power = np.concatenate([self._at[first:], at]), np.concatenate([self._power[first:], power])
        if first:  # what comes too late is taken to be of now
            at = np.maximum(at, self._at[first - 1])
        order = np.argsort(at, kind="stable")
        self._at = np.concatenate([self._at[:first], at[order]])
        self._power = np.concatenate([self._power[:first], power[order]])

    def _add_up(self, first: int, last: int) -> tuple[NDArray[np.bool_], Tallied]:
        steps = self._budget()
        at, power = self._at[first:last], self._power[first:last]
        bound, since = steps.held(steps.bound, np.inf, at), steps.held(steps.at, _LONG_AGO, at)
        before = np.concatenate([[self._begin], self._at])[first:last]
        span = np.maximum(0, at - np.maximum(before, self._begin))
        under = np.minimum(span, at - since)
        counted = ~self._excused(first, last, steps)
        over = self._means(first, last, counted, steps) - bound
        over = np.where(counted, over, -np.inf)
        bounded, is_peak = np.isfinite(bound), steps.held(steps.is_peak, 0, at) > 0
        is_over = over > np.where(is_peak, 0.0, self._tolerance) * np.where(bounded, bound, 0.0)
        above = np.where(bounded, power - np.where(bounded, bound, 0.0), 0.0).astype(np.int64)
        tally = Tally(
            int(np.sum(under[bounded])),
            int(np.sum(under[bounded & counted])),
            int(np.sum(under[is_over])),
            int(np.sum(span)),
            int(np.sum(power * span)),
            int(np.sum(np.maximum(0, above) * under)),
            len(at),
            int(np.sum(above > 0)),
            int(np.sum(is_over & is_peak)),
            int(at[is_over][0]) if np.any(is_over) else None,
            float(np.max(over[is_over] / bound[is_over], initial=0.0)),
        )
        return counted, Tallied(at, power, span, under, over, tally)

    def _means(self, first: int, last: int, counted: NDArray[np.bool_], steps: _Steps) -> Floats:
        """Mean of each reading's window up to it."""
        at = self._at[first:last]
        if not len(at):
            return np.empty(0)
        given = steps.held(steps.at, _LONG_AGO, at) - int(ticks(CONTEXT_S))
        reach = np.maximum(at - steps.held(steps.window, 0, at), np.maximum(given, _latest(steps.drops, at)))
        # The reading itself counts, however short the window.
        begins = np.minimum(np.searchsorted(self._at, reach, "right"), np.arange(first, last))
        base = int(begins.min())
        flags = np.concatenate([self._counted[base:first], counted])
        total = np.concatenate([[0], np.cumsum(np.where(flags, self._power[base:last], 0))])
        count = np.concatenate([[0], np.cumsum(flags)])
        begins, ends = begins - base, np.arange(first, last) + 1 - base
        return np.asarray((total[ends] - total[begins]) / np.maximum(1, count[ends] - count[begins]))

    def _excused(self, first: int, last: int, steps: _Steps) -> NDArray[np.bool_]:
        """Readings above the budget since a change, where they are back within it before the lag is over."""
        excused = np.zeros(len(self._at), dtype=bool)
        if self._lag and last > first:
            begin, end = self._at[first] - self._lag, self._at[last - 1]
            changes = np.union1d(steps.drops, np.array(self._changes, dtype=np.int64))
            begins = np.searchsorted(self._at, changes, "right")
            ends = np.minimum(np.searchsorted(self._at, changes + self._lag, "right"), [*begins[1:], len(self._at)])
            for at in np.flatnonzero((changes >= begin) & (changes < end)).tolist():
                part = slice(begins[at], ends[at])
                bound = steps.held(steps.bound, np.inf, self._at[part])
                back = np.flatnonzero(self._power[part] <= (1 + TOLERANCE) * bound)
                if len(back):
                    excused[begins[at] : begins[at] + back[0]] = True
        return excused[first:last]

    def _budget(self) -> _Steps:
        at, bound, window, is_peak = zip(*self._steps, strict=True) if self._steps else ((), (), (), ())
        return _Steps(
            np.array(at, np.int64), np.array(bound, float), np.array(window, np.int64), np.array(is_peak, np.int64)
        )

    def _forget(self) -> None:
        """Let go of readings, budgets and changes that no later window reaches."""
        if not len(self._counted):
            return
        settled = int(self._at[len(self._counted) - 1])
        keep = settled - int(ticks(CONTEXT_S))
        if self._steps:
            given, _, window, _ = self._steps[-1]
            keep = min(keep, max(settled - window, given - int(ticks(CONTEXT_S))))
        gone = int(np.searchsorted(self._at[: len(self._counted)], keep, "right"))
        self._at, self._power, self._counted = self._at[gone:], self._power[gone:], self._counted[gone:]
        old = sum(step[0] < keep for step in self._steps)
        del self._steps[: max(0, old - 1)]
        self._changes = [change for change in self._changes if change >= keep]


def _latest(moments: Ticks, at: Ticks) -> Ticks:
    """The last of some ascending moments before each time."""
    return np.concatenate([np.array([_LONG_AGO]), moments])[np.searchsorted(moments, at, "left")]


def tally_all(
    events: Iterable[Event], at_s: Floats, power_w: Floats, tallier: Tallier | None = None, until: int | None = None
) -> tuple[Tallier, list[Tallied]]:
    """Readings of a run that lie in the past, in ascending order: what each part that a stop ended adds up to.

    What was read up to ``until`` was added up before. The tallier that comes back has what is left to settle.
    """
    tallier = tallier or Tallier()
    at, power, read, found = ticks(at_s), ticks(power_w), 0, []
    settled = _LONG_AGO if until is None else until + 1
    for event in sorted(events, key=lambda event: event.at_s):
        if isinstance(event, (Started, Resumed)):
            end = int(np.searchsorted(at, ticks(event.at_s)))
            tallier.read(at[read:end], power[read:end])
            tallier.settle(settled)
            found.append(tallier.settle())
            read = end
        tallier.take(event)
    tallier.read(at[read:], power[read:])
    tallier.settle(settled)
    return tallier, found
