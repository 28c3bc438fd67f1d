"""A run as its log tells it: events, every power reading, and the proof that the budget was held."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Literal, TypeVar

import numpy as np

from underwatt.events import BudgetChanged, Ended, Event, Resumed, SettingChanged, Started
from underwatt.measure.steady import SENSOR_LAG_S

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    from underwatt.measure.meter import Trace

    Floats = NDArray[np.float64]

_Kind = TypeVar("_Kind", bound=Event)
TOLERANCE = 0.02
WINDOW_S = 1.0  # where the budget bounds the mean and does not say over how long
# Less than this proves nothing: it is mostly the sensor finding out what the device draws.
FEWEST_JUDGED_S, FEWEST_JUDGED = 5.0, 0.5


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a run kept its budget, and how much of it could be judged."""

    bounded_s: float  # that readings cover while watts were bounded
    judged_s: float  # of it, without what a sensor's lag excuses
    over_s: float  # that power was above the budget by more than the tolerance

    @property
    def is_enough(self) -> bool:
        """Whether so much was judged that it says something."""
        return self.judged_s >= max(FEWEST_JUDGED_S, FEWEST_JUDGED * self.bounded_s)


@dataclass(frozen=True, eq=False)
class RunRecord:
    """What a log held; ``events`` is everything but the readings, which are in ``power``.

    A reading stands for the time since the one before it; the time between a run's death and its resumption counts for
    none.
    """

    events: tuple[Event, ...]
    power: Trace

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

    def of(self, kind: type[_Kind]) -> tuple[_Kind, ...]:
        """The events of one kind."""
        return tuple(event for event in self.events if isinstance(event, kind))

    @cached_property
    def budget_steps(self) -> tuple[Floats, Floats]:
        """When the budget changed, and the watts that held from then on; inf where only energy or time is bounded."""
        steps = self._budgets()
        watts = [np.inf if step.power_w is None else step.power_w for step in steps]
        return np.array([step.at_s for step in steps], dtype=float), np.array(watts, dtype=float)

    def budget_at(self, at_s: ArrayLike) -> Floats:
        """The watts that the budget allowed at some moments; inf before there was one."""
        begins_s, watts = self.budget_steps
        return np.concatenate([[np.inf], watts])[np.searchsorted(begins_s, np.asarray(at_s, dtype=float), "right")]

    def span_s(self) -> Floats:
        """How long each reading stands for."""
        at_s = self.power.at_s
        begins_s = np.array([event.at_s for event in self.events if isinstance(event, (Started, Resumed))] or [0.0])
        before_s = np.concatenate([[begins_s[0]], at_s])[:-1]
        span_s: Floats = np.maximum(0.0, at_s - np.maximum(before_s, _latest(begins_s, at_s, "right")))
        return span_s

    def energy_j(self) -> float:
        """Joules used, by the readings."""
        return float(np.sum(self.power.power_w * self.span_s()))

    def energy_over_j(self, *, window_s: float = 0.0, lag_s: float = 0.0) -> float:
        """Joules above the budget: of every reading, or of the trailing mean over ``window_s``."""
        over_w, span_s = self._over_w(window_s, lag_s)
        return float(np.sum(np.maximum(0.0, over_w) * span_s))

    def time_over_s(self, tolerance: float = TOLERANCE, window_s: float = WINDOW_S, lag_s: float = 0.0) -> float:
        """Seconds in which the trailing mean over ``window_s`` exceeded the budget then in force by over ``tolerance``.

        The mean reaches back no further than the last drop of the budget: what was drawn under a higher one was
        allowed. ``lag_s`` is the sensor's own: readings after a drop, or after a change of setting, that are back
        within the budget before it is over still showed what was before, and are not counted. What stays above counts
        from the change on.
        """
        over_w, span_s = self._over_w(window_s, lag_s)
        return float(np.sum(span_s[over_w > tolerance * self._judged_by_w()]))

    def verdict(self, tolerance: float = TOLERANCE, lag_s: float = SENSOR_LAG_S) -> Verdict:
        """How the budget was kept, each reading judged as the budget then in force says: peaks singly, means as means.

        A mean that does not say over how long is taken over ``WINDOW_S``.
        """
        bound_w = self._judged_by_w()
        over_w, span_s = self._over_w(self._held(self.windows_s, 0.0), lag_s)
        bounded = np.isfinite(bound_w)
        return Verdict(
            float(np.sum(span_s[bounded])),
            float(np.sum(span_s[bounded & ~self._excused(lag_s)])),
            float(np.sum(span_s[over_w > tolerance * bound_w])),
        )

    @cached_property
    def windows_s(self) -> Floats:
        """Over how long readings are averaged to judge them by each step of the budget; 0 for peaks."""
        windows = [0.0 if step.watts == "peak" else step.window_s or WINDOW_S for step in self._budgets()]
        return np.array(windows, dtype=float)

    def _budgets(self) -> list[BudgetChanged]:
        return sorted(self.of(BudgetChanged), key=lambda step: step.at_s)

    def _changes_s(self) -> Floats:
        """When the setting became another one; entering a state is no change."""
        events = self.of(SettingChanged)
        later = [now.at_s for before, now in pairwise(events) if now.setting != before.setting]
        return np.array([*(event.at_s for event in events[:1]), *later], dtype=float)

    def _drops_s(self) -> Floats:
        """When the budget fell."""
        steps_s, steps_w = self.budget_steps
        drops_s: Floats = steps_s[1:][steps_w[1:] < steps_w[:-1]]
        return drops_s

    def _excused(self, lag_s: float) -> NDArray[np.bool_]:
        """Readings above the budget since a change, where they are back within it before the lag is over."""
        at_s = self.power.at_s
        excused = np.zeros(len(at_s), dtype=bool)
        if lag_s <= 0:
            return excused
        within = self.power.power_w <= (1 + TOLERANCE) * self._judged_by_w()
        changes_s = np.union1d(self._drops_s(), self._changes_s())
        begins = np.searchsorted(at_s, changes_s, "right")
        ends = np.minimum(np.searchsorted(at_s, changes_s + lag_s, "right"), [*begins[1:], len(at_s)])
        for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
            back = np.flatnonzero(within[begin:end])
            if len(back):
                excused[begin : begin + back[0]] = True
        return excused

    def _over_w(self, window_s: float | Floats, lag_s: float) -> tuple[Floats, Floats]:
        """How far the trailing mean lies above the budget (not at all where not counted), and for how long."""
        at_s, power_w, span_s = self.power.at_s, self.power.power_w, self.span_s()
        steps_s, drops_s = self.budget_steps[0], self._drops_s()
        counted = ~self._excused(lag_s)
        first = np.searchsorted(at_s, np.maximum(at_s - window_s, _latest(drops_s, at_s)), "right")
        first = np.minimum(first, np.arange(len(at_s)))  # the reading itself, however short the window
        total_w = np.concatenate([[0.0], np.cumsum(np.where(counted, power_w, 0.0))])
        count = np.concatenate([[0], np.cumsum(counted)])
        last = np.arange(1, len(at_s) + 1)
        mean_w = (total_w[last] - total_w[first]) / np.maximum(1, count[last] - count[first])
        mean_w = np.where(last - first == 1, power_w, mean_w)  # exact, where there is nothing to add up
        over_w = np.where(counted, mean_w - self._judged_by_w(), -np.inf)
        # A reading just after a change of the budget speaks for the time since the change only.
        return over_w, np.minimum(span_s, at_s - _latest(steps_s, at_s))

    def _judged_by_w(self) -> Floats:
        """The budget of the time that each reading stands for; one at the moment of a change stands for that before."""
        return self._held(self.budget_steps[1], np.inf)

    def _held(self, of_steps: Floats, before: float) -> Floats:
        """What each reading falls under of a value that every step of the budget has."""
        at = np.searchsorted(self.budget_steps[0], self.power.at_s, "left")
        held: Floats = np.concatenate([[before], of_steps])[at]
        return held


def _latest(moments_s: Floats, at_s: Floats, side: Literal["left", "right"] = "left") -> Floats:
    """The last of some moments before each time, or with ``right`` not after it; -inf where there is none."""
    moments_s = np.sort(moments_s)
    return np.concatenate([[-np.inf], moments_s])[np.searchsorted(moments_s, at_s, side)]
