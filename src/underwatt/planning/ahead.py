"""Looking ahead over a known schedule: which setting at which watts, so that the training ends soonest.

With no bound on energy that is the fastest setting of each level. With one, joules have a price λ in progress: each
moment takes the setting with the highest rate - λ × power that its level allows. Of all courses that take as long,
such a one uses the least energy; so the smallest price at which the energy suffices gives the earliest end. The course
just below that price is faster and uses too much: it is followed until a moment, the thriftier one from then on.

With a deadline the aim is the least energy before it: the same courses, at the price whose course ends in time and uses
least. The next higher price may use less still and be late: then the two are joined likewise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from underwatt.errors import InputError
from underwatt.planning.choice import front

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from numpy.typing import ArrayLike, NDArray

    from underwatt.budget import Schedule
    from underwatt.predict.base import Floats

HORIZON_S = 30 * 86_400.0
_PAUSE = -1
_SAMPLED_LEVELS = 32  # levels whose prices are all tried; between them prices are found by halving
_HALVINGS = 50
_ROUNDING = 1e-9  # of a sum over thousands of stretches: what is done at the end of one is not done in the next


@dataclass(frozen=True, slots=True)
class Ahead:
    """A course through a schedule: which row from when to when (``None`` is a pause), its end and its energy.

    ``finish_s`` is inf where the training does not end within the horizon or the energy; the pieces then go as far.
    """

    pieces: tuple[tuple[float, float, int | None], ...]
    finish_s: float
    energy_j: float


def look_ahead(
    time_s: ArrayLike,
    drawn_w: ArrayLike,
    power_w: ArrayLike,
    schedule: Schedule,
    *,
    share: float = 1.0,
    begin_s: float = 0.0,
    energy_j: float | None = None,
    deadline_s: float | None = None,
    idle_w: float | None = None,
    horizon_s: float = HORIZON_S,
) -> Ahead:
    """Choose a row for each stretch of a schedule so that what is left of the training ends soonest.

    With a deadline, a moment like those of the schedule, so that it takes the least energy and ends before it; where
    nothing ends so soon, it is the soonest all the same.

    Of each row: the time to the target if used alone, the watts that the schedule bounds, and its mean watts.
    ``share`` is how much of the training is left, ``energy_j`` the joules left for it. Pausing is one more choice where
    ``idle_w`` is given; where no row keeps a level there is a pause all the same, which without it counts as 0 W.
    """
    if not 0 <= share <= 1:
        raise InputError(f"What is left of a training is a share between 0 and 1, not {share:g}.")
    if energy_j is not None and not energy_j >= 0:
        raise InputError(f"The energy left must not be negative, and is {energy_j:g} J.")
    road = _Road.of(schedule, begin_s, begin_s + horizon_s, (time_s, drawn_w, power_w), idle_w)
    found = _soonest(road, share, energy_j)
    if deadline_s is None or not found.finish_s <= deadline_s:
        return found
    return _thriftiest(road, share, deadline_s)


def _soonest(road: _Road, share: float, energy_j: float | None) -> Ahead:
    begin_s, soonest = road.begin_s, _Course(road, 0.0)
    end_s = soonest.finish_s(share, begin_s)
    if energy_j is None or soonest.energy_to_j(min(end_s, road.end_s)) <= energy_j:
        return _record(soonest, soonest, begin_s, end_s)
    prices = road.prices()
    found = _lowest_price(road, prices, share, energy_j)
    if found is None:
        courses = (_Course(road, price) for price in prices)
        furthest = max(courses, key=lambda course: course.share_to(course.spent_s(energy_j)))
        return _record(furthest, furthest, begin_s, math.inf, furthest.spent_s(energy_j))
    faster, thriftier = found
    switch_s = _switch_s(faster, thriftier, share, energy_j)
    return _record(faster, thriftier, switch_s, thriftier.finish_s(share - faster.share_to(switch_s), switch_s))


def _thriftiest(road: _Road, share: float, deadline_s: float) -> Ahead:
    """The course of least energy that ends in time; there is one, the soonest."""

    def in_time(price: float) -> bool:
        return _Course(road, price).finish_s(share, road.begin_s) <= deadline_s

    prices = road.prices()
    fast_enough = [price for price in prices if in_time(price)]  # the first of them: a higher price is never faster
    found = []
    for price in fast_enough:
        course = _Course(road, price)
        found.append(_record(course, course, road.begin_s, course.finish_s(share, road.begin_s)))
    if len(fast_enough) < len(prices):
        low, high = _halved(fast_enough[-1], prices[len(fast_enough)], in_time)
        faster, thriftier = _Course(road, low), _Course(road, high)

        def end_s(switch_s: float) -> float:
            return thriftier.finish_s(share - faster.share_to(switch_s), switch_s)

        last_s = faster.finish_s(share, road.begin_s)
        switch_s = _halved(road.begin_s, last_s, lambda at_s: end_s(at_s) > deadline_s)[1]
        found.append(_record(faster, thriftier, switch_s, end_s(switch_s)))
    return min(found, key=lambda course: course.energy_j)


@dataclass(frozen=True, slots=True, eq=False)
class _Road:
    """Stretches of time, each of one level; rows in the order of the watts that they draw, the pause at their end."""

    begin_s: float
    end_s: float
    bounds_s: Floats  # one more than stretches
    fitting: NDArray[np.intp]  # how many of the first rows keep the level of each stretch
    number: NDArray[np.intp]  # of each row, as given
    rate: Floats  # share of the training a second
    power_w: Floats
    pauses: bool  # whether pausing is a choice

    @classmethod
    def of(
        cls, schedule: Schedule, begin_s: float, end_s: float, rows: tuple[ArrayLike, ...], idle_w: float | None
    ) -> _Road:
        time, drawn, power = (np.asarray(values, dtype=float) for values in rows)
        if not (time.ndim == 1 and time.shape == drawn.shape == power.shape):
            raise InputError("Times, watts drawn and mean watts must be given for the same settings.")
        known = np.flatnonzero(np.isfinite(time) & np.isfinite(drawn) & np.isfinite(power))
        if np.any(time[known] <= 0) or np.any(power[known] < 0) or (idle_w is not None and not idle_w >= 0):
            raise InputError("Times must be above zero, and watts not below it.")
        number = known[np.lexsort((time[known], power[known], drawn[known]))]
        begins_s, levels_w = np.array(schedule.begins_s), np.array(schedule.levels_w)
        if schedule.period_s is not None:
            cycles = np.arange(math.floor(begin_s / schedule.period_s) - 1, math.floor(end_s / schedule.period_s) + 1)
            begins_s = (cycles[:, None] * schedule.period_s + begins_s).ravel()
            levels_w = np.tile(levels_w, len(cycles))
        first = max(0, int(np.searchsorted(begins_s, begin_s, "right")) - 1)
        last = int(np.searchsorted(begins_s, end_s, "left"))
        return cls(
            begin_s,
            end_s,
            bounds_s=np.concatenate([[begin_s], begins_s[first + 1 : last], [end_s]]),
            fitting=np.searchsorted(drawn[number], levels_w[first : max(last, first + 1)], "right"),
            number=number,
            rate=np.append(1.0 / time[number], 0.0),
            power_w=np.append(power[number], idle_w or 0.0),
            pauses=idle_w is not None,
        )

    def best(self, price: float) -> NDArray[np.intp]:
        """The best row of each stretch at a price of a joule; a pause where there is none, or none is better."""
        value = self.rate - price * self.power_w
        order = np.lexsort((self.power_w[:-1], -value[:-1]))  # of equally good ones, the one that draws less
        rank = np.empty(len(order), dtype=np.intp)
        rank[order] = np.arange(len(order))
        leading = np.concatenate([[_PAUSE], order[np.minimum.accumulate(rank)]])  # of so many first rows
        if self.pauses:
            leading = np.where(value[leading] > value[_PAUSE], leading, _PAUSE)
        return np.asarray(leading[self.fitting], dtype=np.intp)

    def prices(self) -> list[float]:
        """Prices between which the best of the first rows changes, one in each stretch between two changes."""
        counts = np.unique(self.fitting)
        if len(counts) > _SAMPLED_LEVELS:
            counts = counts[np.linspace(0, len(counts) - 1, _SAMPLED_LEVELS).astype(int)]
        edges = sorted({slope for count in counts for slope in self._slopes(int(count))})
        return [0.0, *((low + high) / 2 for low, high in pairwise(edges)), *(2 * edge for edge in edges[-1:])]

    def _slopes(self, count: int) -> Iterable[float]:
        """The slopes of the upper hull of rate over power of the first rows: where one becomes better than the next."""
        some = [*range(count), *([_PAUSE] if self.pauses else [])]
        rate, power_w = self.rate[some], self.power_w[some]

        def slope(before: int, after: int) -> float:
            return float((rate[after] - rate[before]) / (power_w[after] - power_w[before]))

        hull: list[int] = []
        for row in front(-rate, power_w)[::-1].tolist():
            while len(hull) > 1 and slope(hull[-2], hull[-1]) <= slope(hull[-1], row):
                hull.pop()
            hull.append(row)
        return (slope(before, after) for before, after in pairwise(hull))


class _Course:
    """The best row of each stretch at a price; progress and energy as functions of time."""

    def __init__(self, road: _Road, price: float) -> None:
        self.road, self.place = road, road.best(price)
        spans_s = np.diff(road.bounds_s)
        self._done = np.concatenate([[0.0], np.cumsum(road.rate[self.place] * spans_s)])
        self._used_j = np.concatenate([[0.0], np.cumsum(road.power_w[self.place] * spans_s)])

    def share_to(self, at_s: float) -> float:
        return float(np.interp(at_s, self.road.bounds_s, self._done))

    def energy_to_j(self, at_s: float) -> float:
        return float(np.interp(at_s, self.road.bounds_s, self._used_j))

    def finish_s(self, share: float, begin_s: float) -> float:
        """When a share is done that is begun at a moment; inf where that is beyond the horizon."""
        if share <= 0:
            return begin_s
        # Where nothing is done for a while, a share smaller than the rounding would count as done before it was begun.
        return max(begin_s, _first_time(self.road.bounds_s, self._done, self.share_to(begin_s) + share))

    def spent_s(self, energy_j: float) -> float:
        """When so much energy is used, at most the horizon."""
        return min(self.road.end_s, _first_time(self.road.bounds_s, self._used_j, energy_j))


def _first_time(bounds_s: Floats, done: Floats, wanted: float) -> float:
    """The first moment at which a quantity that never falls reaches what is wanted; inf where it does not."""
    at = int(np.searchsorted(done, wanted * (1 - _ROUNDING), "left"))
    if at == len(done):
        return math.inf
    if at == 0:
        return float(bounds_s[0])
    part = min(1.0, (wanted - done[at - 1]) / (done[at] - done[at - 1]))
    return float(bounds_s[at - 1] + part * (bounds_s[at] - bounds_s[at - 1]))


def _lowest_price(road: _Road, prices: list[float], share: float, energy_j: float) -> tuple[_Course, _Course] | None:
    """Courses just below and at the lowest price at which the energy suffices; none where it never does."""

    def suffices(price: float) -> bool:
        course = _Course(road, price)
        end_s = course.finish_s(share, road.begin_s)
        return math.isfinite(end_s) and course.energy_to_j(end_s) <= energy_j

    # Not halving alone: beyond some price the training takes so long that it uses more energy again.
    for low, high in pairwise(prices):
        if suffices(high):
            low, high = _halved(low, high, lambda price: not suffices(price))
            return _Course(road, low), _Course(road, high)
    return None


def _switch_s(faster: _Course, thriftier: _Course, share: float, energy_j: float) -> float:
    """Until when the course that uses too much can be followed."""

    def suffices(switch_s: float) -> bool:
        end_s = thriftier.finish_s(share - faster.share_to(switch_s), switch_s)
        used_j = faster.energy_to_j(switch_s) + thriftier.energy_to_j(end_s) - thriftier.energy_to_j(switch_s)
        return used_j <= energy_j

    begin_s = faster.road.begin_s
    return _halved(begin_s, thriftier.finish_s(share, begin_s), suffices)[0]


def _halved(low: float, high: float, holds: Callable[[float], bool]) -> tuple[float, float]:
    """The last number at which something holds and the first at which it does not, as close as can be told."""
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low, high


def _record(before: _Course, after: _Course, switch_s: float, finish_s: float, stop_s: float = math.inf) -> Ahead:
    """One course until a moment and another from it on, as a record."""
    road = before.road
    bounds_s = np.union1d(road.bounds_s, np.clip(switch_s, road.begin_s, road.end_s))
    bounds_s = np.unique(np.minimum(bounds_s, min(finish_s, stop_s)))
    stretches = np.searchsorted(road.bounds_s, bounds_s[:-1], "right") - 1
    pieces: list[tuple[float, float, int | None]] = []
    energy_j = 0.0
    for at, (begin_s, end_s) in zip(stretches.tolist(), pairwise(bounds_s.tolist()), strict=True):
        place = int((before if begin_s < switch_s else after).place[at])
        row = None if place == _PAUSE else int(road.number[place])
        energy_j += float(road.power_w[place]) * (end_s - begin_s)
        if pieces and pieces[-1][2] == row:
            begin_s = pieces.pop()[0]
        pieces.append((begin_s, end_s, row))
    return Ahead(tuple(pieces), finish_s, energy_j)
