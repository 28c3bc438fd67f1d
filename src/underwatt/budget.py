"""What may be spent: watts, constant or by a schedule, and where asked for joules and time.

``Budget`` holds it; ``parse_budget`` reads it from text: ``10W peak``, ``50Wh``, ``08:00-18:00=15W,else=7W``.
A new kind of bound is a field of ``Budget`` and a row of ``_KINDS``; what a setting takes of it, planning says.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from underwatt.csv_tables import read_rows
from underwatt.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from underwatt.records import Measurement


# What a budget is.


class Watts(str, Enum):
    """What the watts of a budget bound: every reading, or the mean over a window."""

    PEAK = "peak"
    MEAN = "mean"


@dataclass(frozen=True, slots=True)
class Budget:
    """Bounds that a setting must keep; ``None`` is no bound, and there is at least one.

    ``window_s`` says over how long watts are averaged; without it, over the whole training. Watts that change have a
    ``schedule``, and ``power_w`` is then the most that it ever allows.
    """

    power_w: float | None = None
    watts: Watts = Watts.MEAN
    window_s: float | None = None
    energy_j: float | None = None
    deadline_s: float | None = None
    schedule: Schedule | None = field(default=None, metadata={"omit_none": True})

    def __post_init__(self) -> None:
        if self.schedule is not None:
            if self.power_w not in (None, self.schedule.highest_w):
                raise InputError("Both power and a schedule say the watts of a budget.", hint="Give one of the two.")
            object.__setattr__(self, "power_w", self.schedule.highest_w)
            if len(self.schedule.levels_w) == 1:  # so that constant watts are equal, however they were given
                object.__setattr__(self, "schedule", None)
        bounds = {kind.called: getattr(self, kind.field) for kind in _KINDS}
        if all(value is None for value in bounds.values()):
            raise InputError("A budget must bound power, energy or time.", hint="Give one, such as 10W.")
        for name, value in {**bounds, "window": self.window_s}.items():
            if value is not None and not 0 < value < math.inf:
                raise InputError(f"The {name} of a budget must be a positive number, not {value:g}.")
        if self.window_s is not None and (self.power_w is None or self.watts is Watts.PEAK):
            raise InputError("Only mean watts have a window.", hint="Write for instance 10W mean over 60s.")

    @classmethod
    def of(cls, given: str | float | Schedule | Budget) -> Budget:
        """A budget from whatever says one: a text, watts, or a schedule."""
        if isinstance(given, Budget):
            return given
        if isinstance(given, str):
            return parse_budget(given)
        return cls(schedule=given) if isinstance(given, Schedule) else cls(power_w=given)

    def constant(self, power_w: float | None = None) -> Budget:
        """The same budget with these watts all the time, or with the most that it ever allows."""
        return replace(self, power_w=self.power_w if power_w is None else power_w, schedule=None)

    @property
    def course(self) -> Schedule | None:
        """The watts over time, whether they change or not; ``None`` where none are bounded."""
        return self.schedule or (None if self.power_w is None else Schedule.constant(self.power_w))

    def drawn_w(self, measurement: Measurement) -> float:
        """The watts of a measurement that this budget bounds: the upper end of their 95% interval, where one is known.

        Everything that asks whether a measured setting keeps a budget asks this, so that all give one answer.
        """
        drawn = measurement.power_w
        if self.watts is Watts.PEAK:  # no peak is below the mean, whatever pauses a sensor showed beside the steps
            drawn = measurement.peak_w if math.isnan(measurement.peak_w) else max(measurement.peak_w, drawn)
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
        meaning = self.watts.value + ("" if self.window_s is None else f" over {_number(self.window_s)} s")
        if self.schedule is not None:
            parts.append(str(self.schedule) if meaning == Watts.MEAN.value else f"{self.schedule} {meaning}")
        elif self.power_w is not None:
            parts.append(f"{_number(self.power_w)} W {meaning}")
        totals = ((kind, getattr(self, kind.field)) for kind in _KINDS if kind.field != "power_w")
        return ", ".join([*parts, *(_said(value, kind) for kind, value in totals if value is not None)])


# Reading one from text.


class _Kind(NamedTuple):
    """A kind of bound: its field, its name in messages, its units, and those of them that people like to read."""

    field: str
    called: str
    units: dict[str, float]
    said_in: tuple[str, ...]


_KINDS = (
    _Kind("power_w", "power", {"mW": 1e-3, "W": 1.0, "kW": 1e3}, ("W",)),
    _Kind("energy_j", "energy", {"J": 1.0, "kJ": 1e3, "MJ": 1e6, "Wh": 3600.0, "kWh": 3.6e6}, ("J", "Wh", "kWh")),
    _Kind("deadline_s", "deadline", {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}, ("s", "min", "h")),
)
_BOUNDS = {unit: (kind.field, factor) for kind in _KINDS for unit, factor in kind.units.items()}
_SPELLED = {"watt": "W", "watts": "W"}
# Case matters only where milli and mega would be mixed up: 10w is 10 W, but 10mj is nothing.
_ANY_CASE = {unit.lower(): bound for unit, bound in _BOUNDS.items() if unit not in ("mW", "MJ")}
_UNITS = ", ".join(f"{', '.join(kind.units)} ({kind.called})" for kind in _KINDS)
_NUMBER = re.compile(r"([+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:e[+-]?\d+)?)", re.IGNORECASE)
_QUANTITY = re.compile(rf"{_NUMBER.pattern}\s*([a-zµ]+)", re.IGNORECASE)
_WINDOW = re.compile(r"mean\s+over\s+(.+)", re.IGNORECASE)


def parse_budget(*texts: str) -> Budget:
    """A budget from texts; the unit of each bound says what it bounds: ``10W``, ``50Wh``, ``2h``, or ``10W, 50Wh``.

    Watts may be followed by what they bound: ``10W peak``, ``10W mean`` (the default) or ``10W mean over 60s``. By the
    time of day they are ``08:00-18:00=15W,else=7W``. What ``str`` makes of a budget reads back as the same budget.
    """
    return Budget(**_fields(*texts))


def whole_budget(
    budget: str | float | Schedule | Budget = "",
    *,
    schedule: Path | str | None = None,
    energy: str = "",
    deadline: str = "",
) -> Budget:
    """One budget from what a command was given: ``budget`` as in ``Budget.of`` or a file of watts, joules and time."""
    if budget and schedule is not None:
        raise InputError("--budget and --schedule both say the watts.", hint="Give one of the two.")
    more: dict[str, Any] = {}
    for option, text, bound in (("--energy", energy, "energy_j"), ("--deadline", deadline, "deadline_s")):
        said = _fields(text) if text else {}
        if text and said.keys() != {bound}:
            raise InputError(f"{option} {text} has the wrong unit.", hint="Such as --energy 50Wh --deadline 2h.")
        more |= said
    if schedule is not None:
        return Budget(schedule=read_schedule(schedule), **more)
    if isinstance(budget, str):
        if not (budget or more):
            raise InputError("No budget was given.", hint="Such as --budget 10W.")
        return parse_budget(*(text for text in (budget, energy, deadline) if text))
    found = Budget.of(budget)
    for kind in _KINDS:
        if kind.field in more and getattr(found, kind.field) is not None:
            raise InputError(f"The budget gives the {kind.called} twice.", hint=f"It is {found} already.")
    return replace(found, **more)


def parse_watts(text: str) -> dict[str, Any]:
    """What changes of a budget (see ``replace``) when other watts are asked for while a run goes on.

    Watts that do not say whether they are peak or mean go on meaning what they meant.
    """
    found = _fields(text)
    if not found.keys() <= {"power_w", "watts", "window_s", "schedule"}:
        what = "more than power" if "power_w" in found else "no power"
        raise InputError(
            f"{text!r} bounds {what}, and only the watts of a run under way can be changed.",
            hint="Give watts such as 7W, or a schedule such as 08:00-18:00=15W,else=7W.",
        )
    return {"schedule": None, **found}


def _fields(*texts: str) -> dict[str, Any]:
    """The fields of a budget that texts say; what watts bound only where it is said."""
    found: dict[str, Any] = {}
    for text in texts:
        parts = [part.strip() for part in text.split(",")]
        plain, steps = [part for part in parts if "=" not in part], [part for part in parts if "=" in part]
        for part in [*plain, ",".join(steps)] if steps else plain:
            said = _bound(part)
            if steps and "power_w" in said and "=" not in part:
                raise InputError(f"{part!r} in the schedule {text!r} makes no sense.", hint=_EXAMPLE)
            for twice in (kind.called for kind in _KINDS if kind.field in found.keys() & said.keys()):
                raise InputError(
                    f"The budget gives the {twice} twice, the second time with {part!r:.60}.", hint="Give it once."
                )
            found |= said
    if not found:
        raise InputError("The budget is empty.", hint=f"Give a number with a unit: {_UNITS}.")
    return found


def _bound(text: str) -> dict[str, Any]:
    """The fields that one bound says."""
    if "=" in text:
        schedule = _daily(text)
        return {"power_w": schedule.highest_w, "schedule": schedule}
    name, value, rest = _quantity(text)
    if rest and name != "power_w":
        raise InputError(f"{rest!r} in the budget {text!r} makes no sense.", hint="Only watts are peak or mean.")
    return {name: value, **(_meaning(rest, text) if rest else {})}


def _quantity(text: str) -> tuple[str, float, str]:
    """Which bound a text gives, its value, and what follows: ``10W peak`` is ``("power_w", 10.0, "peak")``."""
    match = _QUANTITY.match(text.strip())
    if match is None and _NUMBER.fullmatch(text.strip()):
        hint = f"Did you mean {text.strip()}W? Units: {_UNITS}."
        raise InputError(f"{text!r} is no budget: it has no unit.", hint=hint)
    if match is None:
        raise InputError(f"{text!r} is no budget.", hint=f"Give a number with a unit: {_UNITS}.")
    number, unit = float(match[1]), _SPELLED.get(match[2].lower(), match[2])
    bound = _BOUNDS.get(unit) or _ANY_CASE.get(unit.lower())
    if bound is None:
        raise InputError(f"The unit {unit!r} in the budget {text!r} is unknown.", hint=f"Use {_UNITS}.")
    name, factor = bound
    value = number * factor
    if not 0 < value < math.inf:
        raise InputError(f"A budget must be above zero and finite, and {text!r:.60} is not.", hint="Such as 10W.")
    return name, value, text.strip()[match.end() :].strip()


def _meaning(rest: str, text: str) -> dict[str, Any]:
    """What watts bound, from what follows them."""
    if rest.lower() in ("peak", "mean"):
        return {"watts": Watts(rest.lower()), "window_s": None}
    match = _WINDOW.fullmatch(rest)
    name, window_s, more = _quantity(match[1]) if match else ("", None, "")
    if name != "deadline_s" or more:
        hint = "Watts are peak, mean, or mean over 60s."
        raise InputError(f"{rest!r} in the budget {text!r} makes no sense.", hint=hint)
    return {"watts": Watts.MEAN, "window_s": window_s}


def _said(value: float, kind: _Kind) -> str:
    """A value in the largest unit that people like in which it is at least 1 and has four digits, else in full."""
    for unit in (*reversed(kind.said_in), *reversed(kind.units)):
        factor = kind.units[unit]
        short = f"{value / factor:.4g}"
        if value >= factor * (1 - 1e-9) and "e" not in short and float(short) * factor == value:
            return f"{short} {unit}"
    return f"{_number(value)} {kind.said_in[0]}"


def _number(value: float) -> str:
    """A number that reads back as itself."""
    return repr(float(value)).removesuffix(".0")


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
            if not 0 < level_w < math.inf:
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
        return self.levels_w[self._step(at_s) % len(self.levels_w)]

    def next_change_s(self, at_s: float) -> float:
        """The next moment at which other watts hold; inf where there is none."""
        return self._begin_s(self._step(at_s) + 1)

    def pieces(self, begin_s: float, end_s: float) -> list[tuple[float, float, float]]:
        """The stretches of an interval in which the watts stay the same: (begin, end, watts)."""
        if not (math.isfinite(begin_s) and math.isfinite(end_s)):
            raise InputError(f"An interval must be finite, not {begin_s:g} to {end_s:g} s.")
        found = []
        while begin_s < end_s:
            until_s = min(end_s, self.next_change_s(begin_s))
            found.append((begin_s, until_s, self.power_w(begin_s)))
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

    def _step(self, at_s: float) -> int:
        """The number of the level that holds at a moment, counted on from period to period."""
        if self.period_s is None:
            return max(0, bisect_right(self.begins_s, at_s) - 1)
        cycle = math.floor(at_s / self.period_s)
        step = cycle * len(self.begins_s) + bisect_right(self.begins_s, at_s - cycle * self.period_s) - 1
        # Subtracting periods rounds: the moment of a change itself must be found to be after it.
        while self._begin_s(step + 1) <= at_s:
            step += 1
        while self._begin_s(step) > at_s:
            step -= 1
        return step

    def _begin_s(self, step: int) -> float:
        cycle, index = divmod(step, len(self.begins_s))
        if self.period_s is None:
            return math.inf if cycle else self.begins_s[index]
        return cycle * self.period_s + self.begins_s[index]

    def __str__(self) -> str:
        if len(self.levels_w) == 1:
            return f"{_number(self.levels_w[0])}W"
        if self.period_s != DAY_S:
            return f"{len(self.levels_w)} levels from {self.lowest_w:g} to {self.highest_w:g} W"
        ends_s = (*self.begins_s[1:], self.begins_s[0] or DAY_S)
        spans = zip(self.begins_s, ends_s, self.levels_w, strict=True)
        return ",".join(f"{clock(b)}-{clock(e)}={_number(w)}W" for b, e, w in spans)


def _daily(text: str) -> Schedule:
    """A schedule by the time of day from text such as ``08:00-18:00=15W,else=7W``.

    Ranges may cross midnight and must not overlap; ``else`` holds for the rest of the day, and may be left out where
    there is none.
    """
    ranges: list[tuple[float, float, float, str]] = []
    rest_w: float | None = None
    for part in text.split(","):
        when, _, watts = (piece.strip() for piece in part.partition("="))
        name, level_w, more = _quantity(watts)
        if name != "power_w" or more:
            raise InputError(f"{watts!r} in the schedule {text!r} is not a number of watts.", hint=_EXAMPLE)
        if when.lower() == "else":
            if rest_w is not None:
                raise InputError(f"The schedule {text!r} has two parts with else.", hint=_EXAMPLE)
            rest_w = level_w
        else:
            ranges += [(begin_s, end_s, level_w, when) for begin_s, end_s in _range(when, text)]
    steps: list[tuple[float, float]] = []
    at_s, before = 0.0, ""
    for begin_s, end_s, level_w, when in [*sorted(ranges), (DAY_S, DAY_S, 0.0, "")]:
        if begin_s < at_s:
            hint = "Each minute has one value."
            raise InputError(f"{before} and {when} overlap in the schedule {text!r}.", hint=hint)
        if begin_s > at_s:
            if rest_w is None:
                raise InputError(
                    f"The schedule {text!r} does not say what holds from {clock(at_s)} to {clock(begin_s)}.",
                    hint="Add else=7W, or a range for the rest of the day.",
                )
            steps.append((at_s, rest_w))
        if when:
            steps.append((begin_s, level_w))
        at_s, before = end_s, when
    return Schedule.of(steps, DAY_S)


def read_schedule(path: Path | str) -> Schedule:
    """A schedule from a CSV file with the columns ``at_s,power_w`` (elapsed) or ``time,power_w`` (each day)."""
    path = Path(path)
    columns, rows = read_rows(path)
    daily = "time" in columns
    column = "time" if daily else "at_s"
    if not columns >= {"power_w", column} or columns >= {"time", "at_s"}:
        raise InputError(f"The schedule {path} lacks its columns.", hint=_COLUMNS)
    steps: list[tuple[float, float]] = []
    for line, row in rows:
        where, said, watts = f"The schedule {path}, line {line}", row[column] or "", row["power_w"] or ""
        begin_s, level_w = time_of_day_s(said) if daily else _float(said), _float(watts)
        if not 0 <= begin_s < (DAY_S if daily else math.inf):
            expected = "a time of day such as 08:00" if daily else "a number of seconds"
            raise InputError(f"{where}: {column} is {said!r}.", hint=f"Make line {line} begin with {expected}.")
        if not 0 < level_w < math.inf:
            hint = f"Change line {line}. {_ABOVE_ZERO}"
            raise InputError(f"{where}: power_w is {watts!r}, and must be watts above zero.", hint=hint)
        if not steps and not daily and begin_s != 0:
            hint = "Its first line of watts must be for 0 s."
            raise InputError(f"The schedule {path} begins at {begin_s:g} s.", hint=hint)
        if steps and begin_s <= steps[-1][0]:
            what = "is the same as" if begin_s == steps[-1][0] else "comes before"
            hint = f"Sort the lines by time; look at line {line}."
            raise InputError(f"{where}: its time {what} that of the line above.", hint=hint)
        steps.append((begin_s, level_w))
    if not steps:
        raise InputError(f"The schedule {path} is empty.", hint="Give it at least one line below the first.")
    return Schedule.of(steps, DAY_S if daily else None)


def _range(when: str, text: str) -> list[tuple[float, float]]:
    """The part of a day that ``22:00-06:00`` names: two parts where it crosses midnight."""
    first, dash, last = when.partition("-")
    begin_s, end_s = time_of_day_s(first.strip()), time_of_day_s(last.strip())
    if not dash or math.isnan(begin_s + end_s) or begin_s == DAY_S:
        raise InputError(f"{when!r} in the schedule {text!r} is no range of times.", hint=_EXAMPLE)
    if begin_s == end_s:
        raise InputError(f"The range {when} in the schedule {text!r} is empty.", hint="A whole day is 00:00-24:00.")
    if begin_s < end_s:
        return [(begin_s, end_s)]
    return [(begin_s, DAY_S), *([(0.0, end_s)] if end_s else [])]


def time_of_day_s(text: str) -> float:
    """Seconds since midnight; NaN where it is no time."""
    match = _TIME_OF_DAY.fullmatch(text.strip())
    if match is None:
        return math.nan
    hours, minutes, seconds = int(match[1]), int(match[2]), float(match[3] or 0)
    at_s = 3600.0 * hours + 60.0 * minutes + seconds
    return at_s if minutes < 60 and seconds < 60 and at_s <= DAY_S else math.nan


def _float(text: str) -> float:
    text = text.strip()  # of more than ``float`` itself takes off
    return float(text) if _NUMBER.fullmatch(text) else math.nan


def clock(at_s: float) -> str:
    """A time of day, as short as it can be read back."""
    seconds, micros = divmod(round(1e6 * at_s), 1_000_000)
    text = f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}"
    if seconds % 60 or micros:
        text += f":{seconds % 60:02d}"
    return text + f".{micros:06d}".rstrip("0") if micros else text
