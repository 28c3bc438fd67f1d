"""What may be spent: watts, and where asked for joules and time; read from text such as ``10W``, ``50Wh`` or ``2h``."""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from underwatt.errors import InputError
from underwatt.tables import read_rows

if TYPE_CHECKING:
    from collections.abc import Iterable

    from underwatt.records import Measurement
    from underwatt.tables import Rows


_POWER = {"mW": 1e-3, "W": 1.0, "kW": 1e3}
_ENERGY = {"J": 1.0, "kJ": 1e3, "MJ": 1e6, "Wh": 3600.0, "kWh": 3.6e6}
_TIME = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_BOUNDS = {
    unit: (name, factor)
    for name, factors in (("power_w", _POWER), ("energy_j", _ENERGY), ("deadline_s", _TIME))
    for unit, factor in factors.items()
}
_SPELLED = {"watt": "W", "watts": "W"}
# Case matters only where milli and mega would be mixed up: 10w is 10 W, but 10mj is nothing.
_ANY_CASE = {unit.lower(): bound for unit, bound in _BOUNDS.items() if unit not in ("mW", "MJ")}
_UNITS = f"{', '.join(_POWER)} for power, {', '.join(_ENERGY)} for energy, {', '.join(_TIME)} for a deadline"
_NUMBER = re.compile(r"([+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:e[+-]?\d+)?)", re.IGNORECASE)
_QUANTITY = re.compile(rf"{_NUMBER.pattern}\s*([a-zµ]+)", re.IGNORECASE)
_MEANING = re.compile(r"(peak|mean)(?:\s+over\s+(.+))?", re.IGNORECASE)


class Watts(str, Enum):
    """What the watts of a budget bound: every reading, or the mean over a window."""

    PEAK = "peak"
    MEAN = "mean"


@dataclass(frozen=True, slots=True)
class Budget:
    """Bounds that a setting must keep; ``None`` is no bound, and there is at least one.

    ``window_s`` says over how long watts are averaged; without it, over the whole training.
    """

    power_w: float | None = None
    watts: Watts = Watts.MEAN
    window_s: float | None = None
    energy_j: float | None = None
    deadline_s: float | None = None

    def __post_init__(self) -> None:
        bounds = {"power": self.power_w, "energy": self.energy_j, "deadline": self.deadline_s}
        if all(value is None for value in bounds.values()):
            raise InputError("A budget must bound power, energy or time.", hint="Give one, such as 10W.")
        for name, value in {**bounds, "window": self.window_s}.items():
            if value is not None and not (math.isfinite(value) and value > 0):
                raise InputError(f"The {name} of a budget must be a positive number, not {value:g}.")
        if self.window_s is not None and (self.power_w is None or self.watts is Watts.PEAK):
            raise InputError("Only mean watts have a window.", hint="Write for instance 10W mean over 60s.")

    def drawn_w(self, measurement: Measurement) -> float:
        """The watts of a measurement that this budget bounds: the upper end of their 95% interval, where one is known.

        Everything that asks whether a measured setting keeps a budget asks this, so that all give one answer.
        """
        drawn = measurement.peak_w if self.watts is Watts.PEAK else measurement.power_w
        if measurement.usable and not math.isfinite(drawn):
            raise InputError(
                f"The {self.watts.value} power of {measurement.setting} was not recorded.",
                hint="Measure it again, or give the budget as mean watts.",
            )
        return drawn + (measurement.power_w_ci95 if math.isfinite(measurement.power_w_ci95) else 0.0)

    def allows(self, measurement: Measurement) -> bool:
        """Whether the measured watts keep the budget; energy and deadline depend on the samples to the target."""
        return measurement.usable and (self.power_w is None or self.drawn_w(measurement) <= self.power_w)

    def __str__(self) -> str:
        parts = []
        if self.power_w is not None:
            window = "" if self.window_s is None else f" over {self.window_s:g} s"
            parts.append(f"{self.power_w:g} W {self.watts.value}{window}")
        if self.energy_j is not None:
            parts.append(_said(self.energy_j, ("J", "Wh", "kWh"), _ENERGY))
        if self.deadline_s is not None:
            parts.append(_said(self.deadline_s, ("s", "min", "h"), _TIME))
        return ", ".join(parts)


def _said(value: float, units: tuple[str, ...], factors: dict[str, float]) -> str:
    """A value in the largest of the units in which it is at least 1."""
    fitting = [unit for unit in units if value >= factors[unit] * (1 - 1e-9)]
    unit = fitting[-1] if fitting else units[0]
    return f"{value / factors[unit]:.4g} {unit}"


def parse_budget(*texts: str) -> Budget:
    """A budget from one text for each bound; its unit says which: ``10W``, ``50Wh`` or ``2h``.

    Watts may be followed by what they bound: ``10W peak``, ``10W mean`` (the default) or ``10W mean over 60s``.
    """
    found: dict[str, float] = {}
    meaning, window_s = Watts.MEAN, None
    for text in texts:
        name, value, rest = parse_quantity(text)
        if name in found:
            raise InputError(f"The budget bounds {_SAID[name]} twice, the second time with {text!r}.")
        found[name] = value
        if rest and name == "power_w":
            meaning, window_s = _meaning(rest, text)
        elif rest:
            raise InputError(f"{rest!r} in the budget {text!r} makes no sense.", hint="Only watts are peak or mean.")
    if not found:
        raise InputError("The budget is empty.", hint=f"Give a number with a unit: {_UNITS}.")
    return Budget(watts=meaning, window_s=window_s, **found)


_SAID = {"power_w": "power", "energy_j": "energy", "deadline_s": "time"}


def parse_quantity(text: str) -> tuple[str, float, str]:
    """Which bound a text gives, its value, and what follows: ``10W peak`` is ``("power_w", 10.0, "peak")``."""
    match = _QUANTITY.match(text.strip())
    if match is None and _NUMBER.fullmatch(text.strip()):
        raise InputError(
            f"{text!r} is no budget: it has no unit.", hint=f"Did you mean {text.strip()}W? Units: {_UNITS}."
        )
    if match is None:
        raise InputError(f"{text!r} is no budget.", hint=f"Give a number with a unit: {_UNITS}.")
    number, unit = float(match[1]), _SPELLED.get(match[2].lower(), match[2])
    bound = _BOUNDS.get(unit) or _ANY_CASE.get(unit.lower())
    if bound is None:
        raise InputError(f"The unit {unit!r} in the budget {text!r} is unknown.", hint=f"Use {_UNITS}.")
    name, factor = bound
    value = number * factor
    if not (math.isfinite(value) and value > 0):
        raise InputError(f"A budget must be above zero and finite, and {text!r} is not.")
    return name, value, text.strip()[match.end() :].strip()


def _meaning(rest: str, text: str) -> tuple[Watts, float | None]:
    match = _MEANING.fullmatch(rest)
    if match is None:
        raise InputError(
            f"{rest!r} in the budget {text!r} makes no sense.", hint="Watts are peak, mean, or mean over 60s."
        )
    meaning = Watts(match[1].lower())
    if match[2] is None:
        return meaning, None
    name, window_s, more = parse_quantity(match[2])
    if name != "deadline_s" or more or meaning is Watts.PEAK:
        raise InputError(f"{rest!r} in the budget {text!r} makes no sense.", hint="Write for instance mean over 60s.")
    return meaning, window_s


# Watts over time: constant, by the time of day, or from a file; always a step function.

DAY_S = 86_400.0
_TIME_OF_DAY = re.compile(r"(\d{1,2}):(\d\d)(?::(\d\d(?:\.\d+)?))?")
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
    match = _TIME_OF_DAY.fullmatch(text.strip())
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
