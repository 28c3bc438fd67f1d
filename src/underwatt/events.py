"""What happens in a run, as records: the controller makes them, the log keeps them, displays and reports read them.

``at_s`` is the device's time since the training began. ``to_line`` and ``from_line`` are the one way to the log's JSON
lines and back.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any, ClassVar

from underwatt.errors import InputError
from underwatt.records import DeviceInfo, Measurement, PowerMode, Setting, WorkloadInfo, from_json, to_json

ALLOWED_SHARE = 0.01  # of the judged time may be over the budget
# Less than this proves nothing: it is mostly the sensor finding out what the device draws.
FEWEST_JUDGED_S, FEWEST_JUDGED = 5.0, 0.5
_DECIMALS = 4  # a tenth of a millisecond, a tenth of a milliwatt
_LARGEST = 1e12  # of a time, watts or joules
_COLUMNS = ("mean_w", "low_w", "high_w", "readings")


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened at a moment of a run."""

    kind: ClassVar[str]
    at_s: float = math.nan


@dataclass(frozen=True, slots=True, kw_only=True)
class Started(Event):
    """A run begins: what is trained, on what, within what."""

    kind: ClassVar[str] = "start"
    started_at: str
    job: str
    device: DeviceInfo
    workload: WorkloadInfo
    budget: str
    batch_sizes: tuple[int, ...]
    goal: str = "soonest"
    target: float | None = None
    simulated: bool = False
    idle_w: float | None = None
    pid: int | None = None
    version: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed(Event):
    """A run goes on after it was stopped, or its log does after it was lost."""

    kind: ClassVar[str] = "resume"
    started_at: str = ""
    pid: int | None = None
    why: str = ""
    budget: str = ""  # empty where it is the one before


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetChanged(Event):
    """Other watts are allowed from now on; ``power_w`` is ``None`` where watts are not bounded."""

    kind: ClassVar[str] = "budget"
    power_w: float | None
    watts: str = "mean"  # or "peak"
    window_s: float | None = None
    why: str = ""  # "start", "schedule" or "changed"


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingChanged(Event):
    """Another setting is trained with, or the same in another state of the controller."""

    kind: ClassVar[str] = "setting"
    setting: Setting
    state: str
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured(Event):
    """A setting was measured by the training steps themselves."""

    kind: ClassVar[str] = "measured"
    measurement: Measurement


@dataclass(frozen=True, slots=True)
class Expected:
    """What the whole training is expected to take at a setting."""

    time_s: float
    power_w: float
    energy_j: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned(Event):
    """A search has ended with this setting."""

    kind: ClassVar[str] = "plan"
    chosen: Setting
    expected: Expected
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progressed(Event):
    """Where the training stands, about once a second."""

    kind: ClassVar[str] = "progress"
    steps: int
    samples: int
    batch_size: int
    state: str
    loss: float | None = None
    step_s: float = math.nan
    power_w: float = math.nan
    budget_w: float = math.nan
    energy_j: float = math.nan
    time_left_s: float | None = None
    gap_share: float = math.nan  # of the time, spent in pauses
    share: float | None = None  # of the way to the target
    running: PowerMode | None = None  # clocks as they ran when the device was last asked
    temperature_c: float | None = None  # of its hottest part, then
    verdict: Verdict | None = None  # so far; a run that is killed says no other


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored(Event):
    """The model was tested."""

    kind: ClassVar[str] = "score"
    samples: int
    value: float
    target: float | None = None
    took_s: float | None = None  # pauses included


@dataclass(frozen=True, slots=True, kw_only=True)
class Noted(Event):
    """Something worth saying; ``level`` is ``info`` or ``warning``."""

    kind: ClassVar[str] = "note"
    level: str
    text: str


class Judgement(str, Enum):
    """What can be said of a run's budget."""

    HELD = "held"
    NOT_HELD = "not held"
    TOO_SHORT = "too short to say"
    UNBOUNDED = "no watts were bounded"


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a run kept its budget, and how much of it could be judged."""

    bounded_s: float = 0.0  # that readings cover while watts were bounded
    judged_s: float = 0.0  # of it, without what a sensor's lag excuses
    over_s: float = 0.0  # that the mean was above the budget by more than the tolerance, or a reading above its peak
    peaks: int = 0  # seconds with a reading above a budget of peak watts
    worst_over: float = 0.0  # the most that it was above the budget, as a share of it
    since_s: float | None = None  # when it was first above
    why: str = ""  # where the run knows

    @property
    def judgement(self) -> Judgement:
        """The verdict in a word."""
        if self.bounded_s == 0:
            return Judgement.UNBOUNDED
        if self.peaks or self.over_s > max(ALLOWED_SHARE * self.judged_s, ALLOWED_SHARE * FEWEST_JUDGED_S):
            return Judgement.NOT_HELD
        return Judgement.HELD if self.judged_s >= FEWEST_JUDGED_S else Judgement.TOO_SHORT

    @property
    def is_enough(self) -> bool:
        """Whether so much was judged that it says something of the whole."""
        return self.judged_s >= max(FEWEST_JUDGED_S, FEWEST_JUDGED * self.bounded_s)

    @property
    def held(self) -> bool | None:
        """Whether the budget was held; ``None`` where that cannot be said."""
        return {Judgement.HELD: True, Judgement.NOT_HELD: False}.get(self.judgement)

    def __str__(self) -> str:
        if self.judgement is Judgement.UNBOUNDED:
            return "No watts were bounded."
        if self.judgement is Judgement.TOO_SHORT:
            return f"Too short to say whether the budget was held: {self.judged_s:.1f} s were judged."
        if self.judgement is Judgement.HELD:
            return f"The budget was held: above it for {self.over_s:.1f} s of {self.judged_s:.0f} s."
        since = "" if self.since_s is None else f", first at {self.since_s:.0f} s"
        why = f" {self.why}" if self.why else ""
        return (
            f"The budget was NOT held: above it for {self.over_s:.1f} s of {self.judged_s:.0f} s{since}, "
            f"by up to {100 * self.worst_over:.1f}%.{why}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended(Event):
    """A run is over."""

    kind: ClassVar[str] = "end"
    outcome: str
    restored: bool
    energy_j: float = math.nan
    samples: int = 0
    steps: int = 0
    score: float | None = None
    error: str | None = None
    verdict: Verdict | None = None


@dataclass(frozen=True, slots=True)
class Readings:
    """Power readings of about a second; NaN is one that failed. No event: there are ten a second of them."""

    kind: ClassVar[str] = "power"
    at_s: tuple[float, ...]
    power_w: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Seconds:
    """What lasts of the power readings of about a minute: figures of each second, and how the budget was kept.

    ``at_s`` is where the first second begins; a second without readings has NaN watts. What follows ``readings`` is
    exact, and adds up to that of every reading of the run: see ``runlog.tally``.
    """

    kind: ClassVar[str] = "seconds"
    at_s: float
    mean_w: tuple[float, ...]
    low_w: tuple[float, ...]
    high_w: tuple[float, ...]
    readings: tuple[float, ...]
    until_s: float  # when the last of the readings was made
    span_s: float
    bounded_s: float
    judged_s: float
    over_s: float
    energy_j: float
    energy_over_j: float
    readings_over: int
    peaks: int
    first_over_s: float | None
    worst_over: float


Line = Event | Readings | Seconds  # what a line of the log may hold


KINDS: dict[str, type[Event]] = {one.kind: one for one in Event.__subclasses__()}


def to_line(event: Line) -> bytes:
    """A line of the log."""
    plain = {"kind": event.kind, "at_s": None, **{part.name: getattr(event, part.name) for part in fields(event)}}
    plain["at_s"] = _rounded(plain["at_s"])
    if isinstance(event, Readings):
        plain["power_w"] = _rounded(plain["power_w"])
    text = json.dumps(to_json(plain), ensure_ascii=False, separators=(",", ":"), default=_plain)
    return text.encode("utf-8", errors="replace") + b"\n"


def from_line(line: bytes | str) -> Line | None:
    """What a line of the log holds; ``None`` for a kind that is not known.

    Raises ``ValueError`` for what is no line of a log, ``InputError`` for one of a known kind that makes no sense.
    """
    try:
        plain = json.loads(line)
        kind, at_s = plain["kind"], plain["at_s"]
    except (TypeError, KeyError, RecursionError) as exc:
        raise ValueError("It is no line of a run's log.") from exc
    if kind == Readings.kind:
        return _readings(at_s, plain.get("power_w"))
    if kind == Seconds.kind:
        return _seconds(plain)
    record = KINDS.get(kind) if isinstance(kind, str) else None
    if record is None:
        return None
    found = from_json(record, plain, kind)
    if not abs(found.at_s) < _LARGEST:
        raise InputError(f"{kind} does not say when.")
    if isinstance(found, BudgetChanged) and not all(
        value is None or 0 < value < _LARGEST for value in (found.power_w, found.window_s)
    ):
        raise InputError(f"{kind} has {found.power_w} W over {found.window_s} s, which nobody can be given.")
    return found


def _readings(at_s: Any, power_w: Any) -> Readings:
    """By hand: the recent part of a log is mostly these."""
    found = Readings(_numbers(at_s), _numbers(power_w))
    if len(found.at_s) != len(found.power_w) or not all(abs(at) < _LARGEST for at in found.at_s):
        raise InputError("Every reading has its time, and there are as many of these.")
    return found


def _seconds(plain: dict[str, Any]) -> Seconds:
    """By hand: the lasting part of a log is mostly these."""
    values: dict[str, Any] = {part.name: plain.get(part.name) for part in fields(Seconds)}
    columns = {name: _numbers(values[name]) for name in _COLUMNS}
    sums = [value for name, value in values.items() if name not in (*_COLUMNS, "first_over_s")]
    sums += [values["first_over_s"] or 0.0]  # none where nothing was over
    if not all(type(value) in (int, float) and abs(value) < _LARGEST for value in sums):
        raise InputError("Seconds have sums that are numbers.")
    if len(set(map(len, columns.values()))) != 1:
        raise InputError("Every second has a mean, a lowest and a highest reading, and their number.")
    return Seconds(**values | columns)


def _numbers(values: Any) -> tuple[float, ...]:
    """A list of them; null is NaN, and so is what is too large to be seconds or watts."""
    if not isinstance(values, list) or not all(value is None or type(value) in (int, float) for value in values):
        raise InputError("Readings are lists of numbers.")
    return tuple(float(value) if value is not None and abs(value) < _LARGEST else math.nan for value in values)


def _rounded(value: Any) -> Any:
    return tuple(map(_rounded, value)) if isinstance(value, tuple) else round(value, _DECIMALS)


def _plain(value: Any) -> Any:
    """Numbers of NumPy and PyTorch as Python's; anything else as text, for a log must not end a training."""
    return to_json(value.tolist()) if hasattr(value, "tolist") else str(value)
