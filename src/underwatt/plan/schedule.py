"""Watts over time: constant, by the time of day, or from a file; always a step function."""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from underwatt.errors import InputError
from underwatt.plan.budget import parse_quantity
from underwatt.tables import read_rows

if TYPE_CHECKING:
    from collections.abc import Iterable

    from underwatt.tables import Rows

DAY_S = 86_400.0
_TIME = re.compile(r"(\d{1,2}):(\d\d)(?::(\d\d(?:\.\d+)?))?")
_EXAMPLE = "Write for instance 08:00-18:00=15W,else=7W."
_COLUMNS = "Its first line must name at_s,power_w (seconds since the start) or time,power_w (such as 08:00)."
_ABOVE_ZERO = "A device that is on draws something: give at least what it draws when idle."


@dataclass(frozen=True, slots=True)
class Schedule:
    """Which watts hold from which second on; the last of them hold on, or the whole repeats each ``period_s``.

    Levels that follow each other differ. Without a period the first begins at 0 and holds before it too.
    """

    begins_s: tuple[float, ...]
    levels_w: tuple[float, ...]
    period_s: float | None = None

    def __post_init__(self) -> None:
        if not self.begins_s or len(self.begins_s) != len(self.levels_w):
            raise InputError("A schedule needs watts for each of its times, and at least one.")
        for level_w in self.levels_w:
            if not (math.isfinite(level_w) and level_w > 0):
                raise InputError(f"The watts of a schedule must be above zero, not {level_w:g}.", hint=_ABOVE_ZERO)
        end_s = math.inf if self.period_s is None else self.period_s
        if not all(before < after for before, after in pairwise((*self.begins_s, end_s))) or self.begins_s[0] < 0:
            raise InputError("The times of a schedule must rise, and begin at 0.")
        if self.period_s is None and self.begins_s[0] != 0:
            raise InputError(f"A schedule must begin at 0 s, not {self.begins_s[0]:g} s.")

    @classmethod
    def constant(cls, power_w: float) -> Schedule:
        """The same watts for ever."""
        return cls((0.0,), (power_w,))

    @classmethod
    def of(cls, steps: Iterable[tuple[float, float]], period_s: float | None = None) -> Schedule:
        """A schedule from (begin, watts) pairs in the order of time; steps that change nothing are left out."""
        kept: list[tuple[float, float]] = []
        for begin_s, level_w in steps:
            if not kept or level_w != kept[-1][1]:
                kept.append((begin_s, level_w))
        if period_s is not None and len(kept) > 1 and kept[0][1] == kept[-1][1]:
            del kept[0]  # the last level of the period before goes on
        if len(kept) == 1:
            kept, period_s = [(0.0, kept[0][1])], None
        return cls(tuple(begin_s for begin_s, _ in kept), tuple(level_w for _, level_w in kept), period_s)

    @property
    def highest_w(self) -> float:
        """The most that it ever allows."""
        return max(self.levels_w)

    @property
    def lowest_w(self) -> float:
        """The least that it ever allows."""
        return min(self.levels_w)

    def power_w(self, at_s: float) -> float:
        """The watts that hold at a moment."""
        _, index = self._position(at_s)
        return self.levels_w[index]

    def next_change_s(self, at_s: float) -> float:
        """The next moment at which other watts hold; inf where there is none."""
        return self._end_s(*self._position(at_s))

    def pieces(self, begin_s: float, end_s: float) -> list[tuple[float, float, float]]:
        """The stretches of an interval in which the watts stay the same: (begin, end, watts)."""
        if not (math.isfinite(begin_s) and math.isfinite(end_s)):
            raise InputError(f"An interval must be finite, not {begin_s:g} to {end_s:g} s.")
        found = []
        while begin_s < end_s:
            cycle, index = self._position(begin_s)
            until_s = min(end_s, self._end_s(cycle, index))
            found.append((begin_s, until_s, self.levels_w[index]))
            begin_s = until_s
        return found

    def starting_at(self, since_midnight_s: float) -> Schedule:
        """The same schedule for a run that starts at this time of day; elapsed seconds are counted as before."""
        if self.period_s is None:
            return self
        if not 0 <= since_midnight_s < self.period_s:
            raise InputError(f"A time of day lies between 0 and {self.period_s:g} s, not at {since_midnight_s:g} s.")
        shifted = ((begin_s - since_midnight_s) % self.period_s % self.period_s for begin_s in self.begins_s)
        steps = dict(zip(shifted, self.levels_w, strict=True))  # rounding may make two times one
        return Schedule.of(sorted(steps.items()), self.period_s)

    def _position(self, at_s: float) -> tuple[int, int]:
        """The number of the period and of the level that hold at a moment."""
        if self.period_s is None:
            return 0, max(0, bisect_right(self.begins_s, at_s) - 1)
        cycle = math.floor(at_s / self.period_s)
        index = bisect_right(self.begins_s, at_s - cycle * self.period_s) - 1
        if index < 0:
            cycle, index = cycle - 1, len(self.begins_s) - 1
        # Subtracting periods rounds: the moment of a change itself must be found to be after it.
        while self._end_s(cycle, index) <= at_s:
            cycle, index = self._shifted(cycle, index + 1)
        while cycle * self.period_s + self.begins_s[index] > at_s:
            cycle, index = self._shifted(cycle, index - 1)
        return cycle, index

    def _shifted(self, cycle: int, index: int) -> tuple[int, int]:
        periods, index = divmod(index, len(self.begins_s))
        return cycle + periods, index

    def _end_s(self, cycle: int, index: int) -> float:
        if self.period_s is None:
            return self.begins_s[index + 1] if index + 1 < len(self.begins_s) else math.inf
        cycle, index = self._shifted(cycle, index + 1)
        return cycle * self.period_s + self.begins_s[index]

    def __str__(self) -> str:
        if len(self.levels_w) == 1:
            return f"{_number(self.levels_w[0])}W"
        if self.period_s != DAY_S:
            return f"{len(self.levels_w)} levels from {self.lowest_w:g} to {self.highest_w:g} W"
        ends_s = (*self.begins_s[1:], self.begins_s[0] or DAY_S)
        spans = zip(self.begins_s, ends_s, self.levels_w, strict=True)
        return ",".join(f"{_clock(b)}-{_clock(e)}={_number(w)}W" for b, e, w in spans)


def parse_schedule(text: str) -> Schedule:
    """A schedule from text: ``15W``, or by the time of day ``08:00-18:00=15W,else=7W``.

    Ranges may cross midnight and must not overlap; ``else`` holds for the rest of the day, and may be left out where
    there is none.
    """
    if "=" not in text:
        return Schedule.constant(_watts(text, text))
    ranges: list[tuple[float, float, float, str]] = []
    rest_w: float | None = None
    for part in text.split(","):
        when, equals, watts = (piece.strip() for piece in part.partition("="))
        if not equals:
            raise InputError(f"{part.strip()!r} in the schedule {text!r} makes no sense.", hint=_EXAMPLE)
        level_w = _watts(watts, text)
        if when.lower() == "else":
            if rest_w is not None:
                raise InputError(f"The schedule {text!r} has two parts with else.", hint=_EXAMPLE)
            rest_w = level_w
        else:
            ranges += [(begin_s, end_s, level_w, when) for begin_s, end_s in _range(when, text)]
    return Schedule.of(_daily_steps(sorted(ranges), rest_w, text), DAY_S)


def read_schedule(path: Path | str) -> Schedule:
    """A schedule from a CSV file with the columns ``at_s,power_w`` (elapsed) or ``time,power_w`` (each day)."""
    path = Path(path)
    columns, rows = read_rows(path)
    daily = "time" in columns
    if "power_w" not in columns or daily == ("at_s" in columns):
        raise InputError(f"The schedule {path} lacks its columns.", hint=_COLUMNS)
    steps = _rows(path, rows, "time" if daily else "at_s")
    if not steps:
        raise InputError(f"The schedule {path} is empty.", hint="Give it at least one line below the first.")
    if not daily and steps[0][0] != 0:
        raise InputError(
            f"The schedule {path} begins at {steps[0][0]:g} s.", hint="Its first line of watts must be for 0 s."
        )
    return Schedule.of(steps, DAY_S if daily else None)


def _rows(path: Path, rows: Rows, column: str) -> list[tuple[float, float]]:
    steps: list[tuple[float, float]] = []
    for line, row in rows:
        where = f"The schedule {path}, line {line}"
        begin_s = _time_of_day(row[column] or "") if column == "time" else _float(row[column])
        level_w = _float(row["power_w"])
        if begin_s is None or not math.isfinite(begin_s) or begin_s < 0 or (column == "time" and begin_s >= DAY_S):
            expected = "a time of day such as 08:00" if column == "time" else "a number of seconds"
            raise InputError(f"{where}: {column} is {row[column]!r}.", hint=f"Make line {line} begin with {expected}.")
        if level_w is None or not (math.isfinite(level_w) and level_w > 0):
            raise InputError(
                f"{where}: power_w is {row['power_w']!r}, and must be watts above zero.",
                hint=f"Change line {line}. {_ABOVE_ZERO}",
            )
        if steps and begin_s <= steps[-1][0]:
            what = "is the same as" if begin_s == steps[-1][0] else "comes before"
            raise InputError(
                f"{where}: its time {what} that of the line above.",
                hint=f"Sort the lines by time; look at line {line}.",
            )
        steps.append((begin_s, level_w))
    return steps


def _daily_steps(
    ranges: list[tuple[float, float, float, str]], rest_w: float | None, text: str
) -> list[tuple[float, float]]:
    """Steps that cover the day from ranges in order, with what holds between them."""
    steps: list[tuple[float, float]] = []
    at_s, before = 0.0, ""
    for begin_s, end_s, level_w, when in [*ranges, (DAY_S, DAY_S, 0.0, "")]:
        if begin_s < at_s:
            raise InputError(
                f"{before} and {when} overlap in the schedule {text!r}.", hint="Each minute has one value."
            )
        if begin_s > at_s:
            if rest_w is None:
                raise InputError(
                    f"The schedule {text!r} does not say what holds from {_clock(at_s)} to {_clock(begin_s)}.",
                    hint="Add else=7W, or a range for the rest of the day.",
                )
            steps.append((at_s, rest_w))
        if when:
            steps.append((begin_s, level_w))
        at_s, before = end_s, when
    return steps


def _range(when: str, text: str) -> list[tuple[float, float]]:
    """The part of a day that ``22:00-06:00`` names: two parts where it crosses midnight."""
    first, dash, last = when.partition("-")
    begin_s, end_s = _time_of_day(first.strip()), _time_of_day(last.strip())
    if not dash or begin_s is None or end_s is None or begin_s == DAY_S:
        raise InputError(f"{when!r} in the schedule {text!r} is no range of times.", hint=_EXAMPLE)
    if begin_s == end_s:
        raise InputError(f"The range {when} in the schedule {text!r} is empty.", hint="A whole day is 00:00-24:00.")
    if begin_s < end_s:
        return [(begin_s, end_s)]
    return [(begin_s, DAY_S), *([(0.0, end_s)] if end_s else [])]


def _watts(part: str, text: str) -> float:
    name, level_w, rest = parse_quantity(part)
    if name != "power_w" or rest:
        raise InputError(f"{part!r} in the schedule {text!r} is not a number of watts.", hint=_EXAMPLE)
    return level_w


def _time_of_day(text: str) -> float | None:
    match = _TIME.fullmatch(text.strip())
    if match is None:
        return None
    hours, minutes, seconds = int(match[1]), int(match[2]), float(match[3] or 0)
    at_s = 3600.0 * hours + 60.0 * minutes + seconds
    return at_s if minutes < 60 and seconds < 60 and at_s <= DAY_S else None


def _float(text: str | None) -> float | None:
    try:
        return float(text or "")
    except ValueError:
        return None


def _clock(at_s: float) -> str:
    """A time of day, as short as it can be read back."""
    seconds, micros = divmod(round(1e6 * at_s), 1_000_000)
    text = f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}"
    if seconds % 60 or micros:
        text += f":{seconds % 60:02d}"
    return text + f".{micros:06d}".rstrip("0") if micros else text


def _number(value: float) -> str:
    """A number that reads back as itself."""
    return repr(value).removesuffix(".0")
