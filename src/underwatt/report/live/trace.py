"""Power over time in a size that does not grow: the last minutes second by second, the whole run in ever wider bins."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    Row = list[float | None]

RECENT_S = 300
WHOLE_BINS = 720
TOLERANCE = 0.02  # a second is over budget when its mean is this share above it
_KEEP_BUDGETS = 1000


class Bin(NamedTuple):
    """Readings of one stretch of time: when it began, their lowest, mean and highest watts, and the watts allowed."""

    at_s: float
    low_w: float
    mean_w: float
    high_w: float
    budget_w: float  # inf is no limit
    readings: int

    def joined(self, other: Bin) -> Bin:
        """Two stretches as one that begins where this one does; of two budgets, what was allowed at most."""
        readings = self.readings + other.readings
        return Bin(
            self.at_s,
            min(self.low_w, other.low_w),
            (self.mean_w * self.readings + other.mean_w * other.readings) / readings,
            max(self.high_w, other.high_w),
            max(self.budget_w, other.budget_w),
            readings,
        )

    def row(self) -> Row:
        """As the page gets it: begin, lowest, mean, highest, budget; a milliwatt is more than a screen can show."""
        budget_w = round(self.budget_w, 3) if math.isfinite(self.budget_w) else None
        return [self.at_s, round(self.low_w, 3), round(self.mean_w, 3), round(self.high_w, 3), budget_w]


class PowerTrace:
    """Folds power readings and budgets into what a chart needs; 24 hours or a month take the same memory."""

    def __init__(self) -> None:
        self.over_s = 0.0
        self.width_s = 1.0
        self._budget_at_s: list[float] = []
        self._budget_w: list[float] = []
        self._open: Bin | None = None
        self._recent: deque[Bin] = deque()
        self._whole: list[Bin] = []

    def add_budget(self, at_s: float, power_w: float | None) -> None:
        """From ``at_s`` on this many watts are allowed; ``None`` is no limit in watts."""
        place = bisect_right(self._budget_at_s, at_s)
        self._budget_at_s.insert(place, at_s)
        self._budget_w.insert(place, math.inf if power_w is None else power_w)
        if len(self._budget_w) > 2 * _KEEP_BUDGETS:  # readings come within seconds, so that old ones are not asked for
            del self._budget_at_s[:_KEEP_BUDGETS], self._budget_w[:_KEEP_BUDGETS]

    def add(self, at_s: Sequence[float], power_w: Sequence[float | None]) -> None:
        """Take in readings in the order in which they were made; ``None`` is one that failed."""
        if None in power_w:
            made = [(at, watts) for at, watts in zip(at_s, power_w, strict=True) if watts is not None]
            at_s, power_w = [at for at, _ in made], [watts for _, watts in made]
        read_w: Sequence[float] = power_w  # type: ignore[assignment]
        begin = 0
        while begin < len(at_s):
            second = math.floor(at_s[begin])
            # A line of the log is about one second: most often the rest of it is one bin.
            end = len(at_s) if at_s[-1] < second + 1 else bisect_right(at_s, second + 1 - 1e-9, begin)
            end = max(end, begin + 1)
            self._take(self._bin(second, read_w[begin:end]))
            begin = end

    def latest(self) -> Bin | None:
        """The last whole second, or what there is of the first one."""
        return self._recent[-1] if self._recent else self._open

    def newest_s(self) -> tuple[float, float]:
        """Where the last row of ``recent`` and the last of ``whole`` begin."""
        recent_s = self._open.at_s if self._open else -math.inf
        return recent_s, self._whole[-1].at_s if self._whole else -math.inf

    def recent(self, since_s: float = -math.inf) -> list[Row]:
        """The last minutes, a row a second, from ``since_s`` on; the last row may still change."""
        rows = [one.row() for one in self._recent if one.at_s >= since_s]
        return rows + ([self._open.row()] if self._open else [])

    def whole(self, since_s: float = -math.inf) -> list[Row]:
        """The whole run, a row for each ``width_s``, from ``since_s`` on; the last row may still change."""
        rows: list[Row] = []
        for one in reversed(self._whole):
            if one.at_s < since_s:
                break
            rows.append(one.row())
        return rows[::-1]

    def _bin(self, at_s: int, power_w: Sequence[float]) -> Bin:
        """Of two budgets that fall into one second, the larger was allowed."""
        mean_w = sum(power_w) / len(power_w)
        budget_w = max(self._budget_at(at_s), self._budget_at(at_s + 1 - 1e-9))
        return Bin(float(at_s), min(power_w), mean_w, max(power_w), budget_w, len(power_w))

    def _budget_at(self, at_s: float) -> float:
        place = bisect_right(self._budget_at_s, at_s)
        return self._budget_w[place - 1] if place else math.inf

    def _take(self, new: Bin) -> None:
        if self._open is None:
            self._open = new
        elif new.at_s == self._open.at_s:
            self._open = self._open.joined(new)
        elif new.at_s > self._open.at_s:  # a reading out of order has no place to go
            self._close(self._open)
            self._open = new

    def _close(self, second: Bin) -> None:
        self._recent.append(second)
        while self._recent[0].at_s <= second.at_s - RECENT_S:
            self._recent.popleft()
        if second.mean_w > (1 + TOLERANCE) * second.budget_w:
            self.over_s += 1.0
        self._append(second)

    def _append(self, one: Bin) -> None:
        begin_s = one.at_s // self.width_s * self.width_s
        if self._whole and self._whole[-1].at_s == begin_s:
            self._whole[-1] = self._whole[-1].joined(one)
            return
        self._whole.append(one._replace(at_s=begin_s))
        if len(self._whole) > WHOLE_BINS:
            self.width_s *= 2
            narrow, self._whole = self._whole, []
            for item in narrow:
                self._append(item)
