"""The budget as it holds now: watts by elapsed time, replaced when somebody asks for others while the run goes on."""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING, Protocol

from underwatt.budget import DAY_S, Budget, Watts, parse_watts

if TYPE_CHECKING:
    from collections.abc import Callable

POLL_S = 0.2
# A wall clock that differs by more from the time that has passed was set, has changed to or from summer time, or went
# on while the machine slept.
CLOCK_SLACK_S = 1.0


class MayFail(Protocol):
    """Something beside the training that may fail without ending it."""

    def take_news(self) -> tuple[str, str] | None:
        """Level and words, where it has begun to fail, or works again, and nobody was told yet."""


class BudgetSource(MayFail, Protocol):
    """Where other budgets may be posted while a run goes on; a run's inbox is one."""

    def take(self) -> str | None:
        """The newest budget that was not taken yet."""

    def has_news(self) -> bool:
        """Whether there may be one; cheap enough to ask with every reading."""


class LiveBudget:
    """Watts by elapsed time; energy, deadline and what the watts mean stay as they were given.

    ``budget`` is what holds with the most watts that are ever allowed, as planning takes it; ``schedule`` is the watts
    by elapsed time, ``None`` where none are bounded. ``wall_clock`` tells the time of day, and is looked at again with
    every poll; without it the day goes as the elapsed time does, as on a simulated board.
    """

    def __init__(
        self,
        budget: Budget,
        *,
        inbox: BudgetSource | None = None,
        time_of_day_s: float = 0.0,
        wall_clock: Callable[[], float] | None = None,
    ) -> None:
        self.inbox = inbox  # where other budgets may be posted while the run goes on
        self._wall_clock = wall_clock
        self._time_of_day_s = wall_clock() if wall_clock else time_of_day_s  # when 0 seconds had elapsed
        self._next_poll_s = -math.inf
        self._hold(budget)

    @classmethod
    def from_now(cls, budget: Budget, *, simulated: bool) -> LiveBudget:
        """For a run that starts at this time of day; on a simulated device, simulated seconds count from it."""
        return cls(budget, time_of_day_s=now_on_the_wall_s(), wall_clock=None if simulated else now_on_the_wall_s)

    def _hold(self, budget: Budget) -> None:
        self._given, self.budget = budget, budget.constant()
        course = budget.course
        self.schedule = course and course.starting_at(self._time_of_day_s)

    def resumes(self, elapsed_s: float) -> None:
        """The run began earlier, and so many seconds of it are over; what holds by the time of day holds as before."""
        self._time_of_day_s = (self._time_of_day_s - elapsed_s) % DAY_S % DAY_S
        self._hold(self._given)

    def __str__(self) -> str:
        plain = self._given == Budget(power_w=self._given.power_w) if self._given.power_w else False
        return str(self._given.course if plain else self._given)

    @property
    def bounds_peaks(self) -> bool:
        """Whether every reading is bounded, and not a mean of them."""
        return self.budget.watts is Watts.PEAK

    def change(self, text: str) -> None:
        """Other watts from now on, such as ``7W`` or ``7W peak``, or a schedule by the time of day."""
        self._hold(replace(self._given, **parse_watts(text)))

    def has_news(self) -> bool:
        """Whether somebody asked for another budget and was not heard yet."""
        return self.inbox is not None and self.inbox.has_news()

    def poll(self, elapsed_s: float) -> bool:
        """Whether somebody asked for another budget; looks a few times a second, at the wall clock too."""
        if elapsed_s < self._next_poll_s:
            return False
        self._next_poll_s = elapsed_s + POLL_S
        self._follow_clock(elapsed_s)
        text = self.inbox.take() if self.inbox is not None else None
        if text is None:
            return False
        self.change(text)
        return True

    def _follow_clock(self, elapsed_s: float) -> None:
        """What holds by the time of day holds by the clock on the wall, whatever happened to it since the start."""
        if self._wall_clock is None:
            return
        begun_s = (self._wall_clock() - elapsed_s) % DAY_S % DAY_S
        if abs(math.remainder(begun_s - self._time_of_day_s, DAY_S)) > CLOCK_SLACK_S:
            self._time_of_day_s = begun_s
            self._hold(self._given)

    def power_w(self, elapsed_s: float) -> float:
        """The watts that hold at a moment; inf where none are bounded."""
        return self.schedule.power_w(elapsed_s) if self.schedule else math.inf

    def lowest_w(self, begin_s: float, end_s: float) -> float:
        """The least that holds at any moment of an interval: a step under way cannot be cut short."""
        if self.schedule is None:
            return math.inf
        pieces = self.schedule.pieces(begin_s, end_s)
        return min((level_w for _, _, level_w in pieces), default=self.schedule.power_w(begin_s))

    def most_w(self, elapsed_s: float) -> float:
        """The most that holds at any moment from one on; inf where none are bounded."""
        if self.schedule is None:
            return math.inf
        if self.schedule.period_s is not None:
            return self.schedule.highest_w
        levels = zip(self.schedule.begins_s, self.schedule.levels_w, strict=True)
        return max([self.power_w(elapsed_s), *(level_w for begin_s, level_w in levels if begin_s > elapsed_s)])

    def next_change_s(self, elapsed_s: float) -> float:
        """When other watts will hold, as far as it is known."""
        return self.schedule.next_change_s(elapsed_s) if self.schedule else math.inf


def now_on_the_wall_s() -> float:
    """Seconds since midnight by the clock on the wall: what people call eight o'clock, in summer and in winter."""
    now = datetime.now().astimezone()
    return 3600.0 * now.hour + 60.0 * now.minute + now.second + now.microsecond / 1e6
