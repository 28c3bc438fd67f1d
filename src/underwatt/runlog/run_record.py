"""A run as its log tells it: events, power readings, and the proof that the budget was held."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np

from underwatt.budget import parse_budget
from underwatt.control.judge import TOLERANCE
from underwatt.errors import InputError
from underwatt.events import BudgetChanged, Ended, Event, Progressed, Resumed, Started, Verdict as Verdict
from underwatt.runlog.tally import TICKS, WINDOW_S, Tallied, Tallier, Tally, tally_all

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    from underwatt.measure.meter import Trace

    Floats = NDArray[np.float64]

DONE = ("reached", "finished")  # the outcomes of a training that did what it was to do

_Kind = TypeVar("_Kind", bound=Event)


class Points(NamedTuple):
    """Power over a whole run: single readings, or those of each second where only the recent ones are kept singly."""

    at_s: Floats
    low_w: Floats
    mean_w: Floats
    high_w: Floats
    readings: Floats
    energy_j: Floats  # drawn in the time that each stands for

    @classmethod
    def none(cls) -> Points:
        """A run without readings."""
        return cls(*(np.empty(0) for _ in cls._fields))

    @classmethod
    def of_readings(cls, read: Tallied) -> Points:
        """Each reading by itself."""
        power_w = read.power / TICKS
        ones = np.ones(len(power_w))
        return cls(read.at / TICKS, power_w, power_w, power_w, ones, power_w * read.span / TICKS)

    def __add__(self, other: Points) -> Points:  # type: ignore[override]
        return Points(*map(np.concatenate, zip(self, other, strict=True)))


@dataclass(frozen=True, slots=True)
class Settled:
    """What a log keeps of readings that it has let go: what they add up to, and figures of each second."""

    tally: Tally
    until: int  # ticks: the time of the last of them
    points: Points


@dataclass(frozen=True, eq=False)
class RunRecord:
    """What a log held; ``events`` is everything but the readings, of which ``power`` has those that are kept singly.

    These are all of a short run, and the last hour of a long one, of which ``settled`` has the rest. A reading stands
    for the time since the one before it; the time between a run's death and its resumption counts for none.
    """

    events: tuple[Event, ...]
    power: Trace
    settled: Settled | None = None
    damage: tuple[str, ...] = field(default=())  # what lines were left out, and why

    @property
    def start(self) -> Started:
        """How the run began."""
        first = self.events[0]
        assert isinstance(first, Started), "a log begins so"
        return first

    @property
    def end(self) -> Ended | None:
        """How the run ended; none where it is under way, was killed, or was resumed since."""
        last = [event for event in self.events if isinstance(event, (Started, Resumed, Ended))][-1]
        return last if isinstance(last, Ended) else None

    @property
    def said(self) -> Verdict | None:
        """The last verdict that the run itself gave, at its end or on its way; none where it gave none."""
        told = [event for event in self.events if isinstance(event, (Progressed, Ended)) and event.verdict is not None]
        return told[-1].verdict if told else None

    @property
    def deadline_s(self) -> float | None:
        """The deadline that it was given last, in seconds since it began."""
        given = [event.budget for event in self.of(Resumed) if event.budget] or [self.start.budget]
        try:
            return parse_budget(given[-1].split(", ")[-1]).deadline_s  # it stands last
        except InputError:  # what stands there is of a schedule
            return None

    @property
    def late_s(self) -> float | None:
        """By how much it ended after its deadline, negative before it; none where neither is known to be so."""
        if self.end is None or self.deadline_s is None:
            return None
        late_s = self.end.at_s - self.deadline_s
        return late_s if late_s > 0 or self.end.outcome in DONE else None

    @property
    def warning(self) -> str | None:
        """What there is to say of damage to the log."""
        if not self.damage:
            return None
        lines = "1 line" if len(self.damage) == 1 else f"{len(self.damage)} lines"
        return f"{lines} of the log cannot be read and are left out, the first because: {self.damage[0]}"

    def of(self, kind: type[_Kind]) -> tuple[_Kind, ...]:
        """The events of one kind."""
        return tuple(event for event in self.events if isinstance(event, kind))

    @cached_property
    def budget_steps(self) -> tuple[Floats, Floats]:
        """When the budget changed, and the watts that held from then on; inf where only energy or time is bounded."""
        steps = self._budgets()
        watts = [np.inf if step.power_w is None else step.power_w for step in steps]
        return np.array([step.at_s for step in steps], dtype=float), np.array(watts, dtype=float)

    @cached_property
    def windows_s(self) -> Floats:
        """Over how long readings are averaged to compare them with each step of the budget; 0 for peaks."""
        windows = [0.0 if step.watts == "peak" else step.window_s or WINDOW_S for step in self._budgets()]
        return np.array(windows, dtype=float)

    def budget_at(self, at_s: ArrayLike) -> Floats:
        """The watts that the budget allowed at some moments; inf before there was one."""
        begins_s, watts = self.budget_steps
        return np.concatenate([[np.inf], watts])[np.searchsorted(begins_s, np.asarray(at_s, dtype=float), "right")]

    @cached_property
    def tally(self) -> Tally:
        """What every reading of the run adds up to, also of those that the log has let go."""
        return sum((part.tally for part in self._tallied), Tally() if self.settled is None else self.settled.tally)

    @cached_property
    def points(self) -> Points:
        """Power over the whole run, in as much detail as there is."""
        parts = [Points.of_readings(part) for part in self._tallied]
        return sum(parts, Points.none() if self.settled is None else self.settled.points)

    def verdict(self) -> Verdict:
        """How the budget was kept: as the run itself judged it (``control.judge``), which alone knows its steps.

        Where it said nothing, each reading is compared with the budget then in force, peaks singly, means as means
        over its window, or over ``WINDOW_S``; see ``runlog.tally``.
        """
        return self.said or self.tally.verdict

    def energy_j(self) -> float:
        """Joules used, by the readings."""
        return self.tally.energy_j

    def energy_over_j(self, *, window_s: float = 0.0, lag_s: float = 0.0) -> float:
        """Joules above the budget: of every reading, or of the trailing mean over ``window_s``."""
        if window_s == lag_s == 0.0:
            return self.tally.energy_over_j
        return sum(part.energy_over_j for part in self._tallied_by(window_s, lag_s, TOLERANCE))

    def time_over_s(self, tolerance: float = TOLERANCE, window_s: float = WINDOW_S, lag_s: float = 0.0) -> float:
        """Seconds in which the trailing mean over ``window_s`` exceeded the budget then in force by over ``tolerance``.

        The mean reaches back no further than the last drop of the budget; ``lag_s`` is the sensor's own, as in
        ``runlog.tally.Tallier``.
        """
        return sum(part.tally.over for part in self._tallied_by(window_s, lag_s, tolerance)) / TICKS

    def _tallied_by(self, window_s: float, lag_s: float, tolerance: float) -> list[Tallied]:
        if self.settled is not None:
            raise InputError(
                "This run is longer than single readings are kept, so that other windows cannot be tried on it.",
                hint="verdict() and energy_over_j() tell of every reading.",
            )
        tallier = Tallier(window_s=window_s, lag_s=lag_s, tolerance=tolerance)
        tallier, parts = tally_all(self.events, self.power.at_s, self.power.power_w, tallier)
        return [*parts, tallier.settle()]

    @cached_property
    def _tallied(self) -> list[Tallied]:
        """The readings that are not settled."""
        until = None if self.settled is None else self.settled.until
        tallier, parts = tally_all(self.events, self.power.at_s, self.power.power_w, until=until)
        return [*parts, tallier.settle()]

    def _budgets(self) -> list[BudgetChanged]:
        return sorted(self.of(BudgetChanged), key=lambda step: step.at_s)
