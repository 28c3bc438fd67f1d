"""The search of a run: which setting to measure next, while training, for the watts that are in force."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from underwatt.planning.search import FIRST, Search
from underwatt.records import Measurement, Status

if TYPE_CHECKING:
    from collections.abc import Sequence

    from underwatt.control.headroom import Room
    from underwatt.control.knowledge import Knowledge
    from underwatt.control.options import ControlOptions
    from underwatt.planning.problem import Problem
    from underwatt.planning.search import Ask
    from underwatt.records import Profile

# Without knobs there are only some batch sizes: so many of them are worth a look in any case.
MOST_BATCH_SIZES = 8
CAUTION_TO_FIT = 4.0  # while training, a setting that may not fit is hardly worth a try
# Training on while another setting is measured costs about so many seconds: a few at a setting that is somewhat slower.
MEASURING_COSTS_S = 0.6


class Seeker:
    """Searches anew for each level of the budget, with all that is known, and remembers for which it has."""

    def __init__(
        self,
        problem: Problem,
        room: Room,
        knowledge: Knowledge,
        options: ControlOptions,
        *,
        known: Sequence[Measurement] = (),
        references: Sequence[Profile] = (),
    ) -> None:
        first = FIRST if problem.candidates.knobs else min(len(problem), MOST_BATCH_SIZES)
        self._search = Search(problem, references=references, known=known, first=first, caution=CAUTION_TO_FIT)
        self._room, self._knowledge, self._options = room, knowledge, options
        self._level_w = math.nan
        self._done_w: list[float] = []

    @property
    def is_done(self) -> bool:
        """Whether there was a search for about as many watts already."""
        level_w, near = self._room.left_w, self._options.same_level
        return any(math.isclose(level_w, done_w, rel_tol=near) for done_w in self._done_w)

    @property
    def has_ended_once(self) -> bool:
        """Whether there was a search, for whatever watts, that came to its end."""
        return bool(self._done_w)

    def ask(self, elapsed_s: float, time_left_s: float) -> Ask | None:
        """The setting to measure next; ``None`` where that is worth nothing."""
        level_w = self._room.left_w
        if not math.isclose(level_w, self._level_w, rel_tol=1e-3):
            time_s = self._room.time_at_level_s(elapsed_s, time_left_s, self._options.same_level)
            self._search = self._search.under(
                self._room.search_problem(),
                most=self._options.most_a_level,
                least_gain=max(self._options.least_gain, MEASURING_COSTS_S / time_s),
            )
            self._level_w = level_w
        ask = self._search.ask()
        while ask is not None and not self._knowledge.usable(ask.setting):
            self._search.tell(Measurement(ask.setting, status=Status.FAILED))
            ask = self._search.ask()
        return ask

    def ends(self) -> None:
        """The search for the watts in force is over."""
        self._done_w.append(self._room.left_w)

    def tell(self, measurement: Measurement) -> None:
        """Take in a measurement, as it would be without drift."""
        self._search.tell(measurement)
