"""The budget as it holds now: a schedule of watts, replaced when somebody asks for another while the run goes on."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from underwatt.budget import DAY_S, Budget, Schedule, parse_budget, parse_quantity, parse_schedule
from underwatt.errors import InputError

if TYPE_CHECKING:
    from underwatt.runlog.inbox import Inbox

POLL_S = 0.2


class LiveBudget:
    """Watts by elapsed time; energy, deadline and what the watts mean stay as they were given."""

    def __init__(
        self,
        budget: Budget,
        schedule: Schedule | None = None,
        *,
        inbox: Inbox | None = None,
        time_of_day_s: float = 0.0,
    ) -> None:
        self.budget = budget
        self._time_of_day_s = time_of_day_s  # when 0 seconds had elapsed
        if schedule is None and budget.power_w is not None:
            schedule = Schedule.constant(budget.power_w)
        self._given = schedule
        self._schedule = schedule.starting_at(time_of_day_s) if schedule else None
        self._inbox = inbox
        self._next_poll_s = -math.inf

    def listen(self, inbox: Inbox) -> None:
        """Take budgets that are posted there while the run goes on."""
        self._inbox = inbox

    def resumes(self, elapsed_s: float) -> None:
        """The run began earlier, and so many seconds of it are over; what holds by the time of day holds as before."""
        self._time_of_day_s = (self._time_of_day_s - elapsed_s) % DAY_S % DAY_S
        self._schedule = self._given.starting_at(self._time_of_day_s) if self._given else None

    def __str__(self) -> str:
        plain = self.budget == Budget(power_w=self.budget.power_w) if self.budget.power_w else False
        scheduled = self._given is not None and len(self._given.levels_w) > 1
        return str(self._given if plain or scheduled else self.budget)

    @property
    def schedule(self) -> Schedule | None:
        """Watts by elapsed time; ``None`` where no watts are bounded."""
        return self._schedule

    def change(self, text: str) -> None:
        """Another budget from now on: watts such as ``7W`` or ``7W peak``, or a schedule by the time of day."""
        if "=" in text:
            self._schedule = parse_schedule(text).starting_at(self._time_of_day_s)
            return
        wanted = parse_budget(text)
        if wanted.power_w is None:
            raise InputError(f"{text!r} bounds no power.", hint="Give watts such as 7W.")
        self._schedule = Schedule.constant(wanted.power_w)
        self.budget = replace(self.budget, power_w=wanted.power_w)
        if parse_quantity(text)[2]:  # else they go on meaning what they meant
            self.budget = replace(self.budget, watts=wanted.watts, window_s=wanted.window_s)

    def has_news(self) -> bool:
        """Whether somebody asked for another budget and was not heard yet."""
        return self._inbox is not None and self._inbox.has_news()

    def poll(self, elapsed_s: float) -> bool:
        """Whether somebody asked for another budget; looks a few times a second."""
        if self._inbox is None or elapsed_s < self._next_poll_s:
            return False
        self._next_poll_s = elapsed_s + POLL_S
        text = self._inbox.take()
        if text is None:
            return False
        self.change(text)
        return True

    def power_w(self, elapsed_s: float) -> float:
        """The watts that hold at a moment; inf where none are bounded."""
        return self._schedule.power_w(elapsed_s) if self._schedule else math.inf

    def lowest_w(self, begin_s: float, end_s: float) -> float:
        """The least that holds at any moment of an interval: a step under way cannot be cut short."""
        if self._schedule is None:
            return math.inf
        lowest = self._schedule.power_w(begin_s)
        at_s = self._schedule.next_change_s(begin_s)
        while at_s < end_s:
            lowest = min(lowest, self._schedule.power_w(at_s))
            at_s = self._schedule.next_change_s(at_s)
        return lowest

    def next_change_s(self, elapsed_s: float) -> float:
        """When other watts will hold, as far as it is known."""
        return self._schedule.next_change_s(elapsed_s) if self._schedule else math.inf
