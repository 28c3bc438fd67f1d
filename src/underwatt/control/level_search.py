"""Which setting to measure next for the watts in force, and for which watts that was found out before.

Settings are measured as they are where they keep the budget so: pauses would blur what a sensor reads. Where they need
pauses, as all of them do under a tight budget, they are measured with these, and what waiting draws at their clocks is
seen first.
"""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from underwatt.budget import Watts
from underwatt.planning.problem import LEAST_BUSY, Goal, busy_share
from underwatt.planning.search import FIRST, Ask, Search
from underwatt.records import Measurement, Status

if TYPE_CHECKING:
    from collections.abc import Sequence

    from underwatt.control.headroom import Headroom
    from underwatt.control.state import ControlOptions
    from underwatt.planning.problem import Problem
    from underwatt.records import Profile, Setting

# Chosen with benchmarks/hold.py: while training, a setting that may not fit is hardly worth a try; and training on
# while another setting is measured costs about so many seconds, a few at a setting that is somewhat slower.
CAUTION_TO_FIT = 4.0
MEASURING_COSTS_S = 0.6
PAUSED_COSTS_S, LEAST_PAUSED_S = 4.0, 60.0  # with pauses it takes longer; not begun for watts that change sooner
MORE_FOR_PEAK = 2
MOST_ANEW = 3  # measurements where only batch sizes are weighed otherwise; not tuned
MUCH_GAIN = 0.02  # no search ends at so many measurements while so much is to be gained, before there are twice as many
# What was found has turned out to draw too much, and the next best is worse by this share: the search was not over.
FELL_BEHIND = 0.03
CLEARLY_LESS = 0.7  # of each knob
MOST_TWICE = 4  # of the best ones
NEWS = 0.01  # of the budget, by which waiting draws otherwise than the search took it to draw
LEAST_LEFT = 0.05  # waiting that leaves less of the budget leaves next to nothing
DOUBT = 1.1  # so many times the most that is predicted steps are taken to draw before they were seen
# So few times what waiting draws are allowed that hardly anything keeps the budget without pauses.
TIGHT = 1.3


class LevelSearch:
    """Searches anew for each level of the budget, with all that is known, and remembers for which it has."""

    def __init__(
        self,
        room: Headroom,
        options: ControlOptions,
        known: Sequence[Measurement] = (),
        references: Sequence[Profile] = (),
    ) -> None:
        self._references = references
        self._knowledge, self._options = room.knowledge, options
        self.start_over(room, known)

    def start_over(self, room: Headroom, known: Sequence[Measurement]) -> None:
        """Search as if nothing had been measured but this."""
        problem = room.base
        has_knobs = bool(problem.candidates.knobs)
        self._search = Search(
            problem,
            references=self._references,
            known=known,
            first=min(FIRST, len(problem)),
            caution=CAUTION_TO_FIT,
            much_gain=MUCH_GAIN,
            safe=has_knobs,  # without knobs, pauses hold the budget whatever a step draws
        )
        self._paused: Search | None = None  # among settings with the pauses that the watts in force ask for
        self._may_pause = False  # whether that search is still to come
        self._twice: set[Setting] = set()  # what was measured again, as the best
        self._level_w, self._base, self._goal = math.nan, problem, problem.goal
        self.done_w: list[float] = []  # for which watts there was a search of the same that came to its end
        self._made: dict[float, int] = {}  # measurements for these watts, however batch sizes were weighed
        self._found: dict[float, float] = {}  # how good what was found for these watts was

    def _is_same(self, room: Headroom) -> bool:
        """Whether the same is searched for, but for the watts."""
        return room.goal is self._goal and room.base is self._base

    def is_done(self, room: Headroom) -> bool:
        """Whether there was a search for about as many watts already, and what it found is not lost."""
        if not self._is_same(room) or self._knowledge.mistaken:
            return False
        return self._is_near(room.left_w, self.done_w) and not self._fell_behind(room)

    def _fell_behind(self, room: Headroom) -> bool:
        """Whether the best that is known is clearly worse than what the last search for such watts ended with.

        A board draws more once it is warm: what just fitted does no more, and the next best may be far below.
        """
        near = [score for watts, score in self._found.items() if self._is_near(room.left_w, [watts])]
        may_have = near and room.has_knobs and room.goal is Goal.SOONEST
        best = self._knowledge.best(room.problem()) if may_have else None
        return best is not None and best.fits and best.score(room.goal) > (1 + FELL_BEHIND) * near[-1]

    def _is_near(self, level_w: float, levels_w: list[float]) -> bool:
        return any(math.isclose(level_w, one_w, rel_tol=self._options.same_level) for one_w in levels_w)

    def ask(self, room: Headroom, elapsed_s: float, time_left_s: float) -> Ask | None:
        """The setting to measure next; ``None`` where that is worth nothing."""
        if self._knowledge.mistaken:
            self._knowledge.mistaken = False
            self.start_over(room, self._knowledge.measurements())
        elif self._is_same(room) and self._fell_behind(room):
            elsewhere = {w: score for w, score in self._found.items() if not self._is_near(room.left_w, [w])}
            self.start_over(room, self._knowledge.measurements())  # as they are known now
            self.done_w, self._found = list(elsewhere), elsewhere
        is_same = self._is_same(room)
        has_moved = not math.isclose(room.left_w, self._level_w, rel_tol=1e-3)
        if not is_same:
            if room.goal is not self._goal:
                self._made = {}
            self._goal, self._base, self.done_w, self._found = room.goal, room.base, [], {}
        if has_moved or not is_same:
            # Without pauses first: what keeps the budget so needs none, and is surely held.
            problem = replace(room.problem(), idle_w=None) if room.has_knobs else room.problem()
            self._search = self._search.under(problem, most=self._most(room))
            if self._is_near(room.left_w, [self._level_w]) and is_same:  # it has drifted
                self._paused = self._with_pauses(room) if self._paused else None
            else:
                self._paused, self._may_pause = None, room.has_knobs and room.can_pause
                self._twice.clear()
            self._level_w = room.left_w
        is_tight = self._is_tight(room, elapsed_s)
        if self._may_pause and self._search.best is None and is_tight:
            self._paused, self._may_pause = self._with_pauses(room), False
        now_w = self._paused.problem.idle_w if self._paused else None
        if now_w is not None and abs(self._usual_w(room) - now_w) > NEWS * room.held_w:
            self._paused = self._with_pauses(room)
        time_s = room.time_at_level_s(elapsed_s, time_left_s, self._options.same_level)
        ask = self._asked(time_s)
        if ask is None and self._may_pause and is_tight:
            self._paused, self._may_pause = self._with_pauses(room), False
            ask = self._asked(time_s)
        if ask is None and (doubtful := self._doubtful(room)) is not None:
            ask = Ask(doubtful, "to see whether the best that was measured is as good as it seemed")
        if ask is None and self._paused is not None and self._paused.best is None:
            self._paused = None
            ask = self._asked(time_s)
        return ask

    def _is_tight(self, room: Headroom, elapsed_s: float) -> bool:
        """Whether hardly anything, and that slowly, keeps the budget without pauses, for long enough to find what does.

        So it is where little more than what waiting draws is allowed, or what was measured draws more by far.
        """
        if room.live.next_change_s(elapsed_s) - elapsed_s < LEAST_PAUSED_S:
            return False
        idle_w = room.base.idle_w or 0.0
        least_w = min((known.power_w for known in self._knowledge.measurements()), default=0.0)
        return room.left_w < max(TIGHT * idle_w, (idle_w + least_w) / 2)

    def _doubtful(self, room: Headroom) -> Setting | None:
        """The best that was measured with pauses, once: of many readings that err, the best one errs most."""
        best = self._knowledge.best(room.problem()) if self._paused else None
        if best is None or not best.fits or best.measurement.power_w <= room.left_w:
            return None
        setting = best.measurement.setting
        if setting in self._twice or len(self._twice) >= MOST_TWICE:
            return None
        self._twice.add(setting)
        return setting

    def _asked(self, time_s: float) -> Ask | None:
        """A gain is worth what is left of the training, at watts like these, to have it in."""
        search = self._paused or self._search
        costs_s = PAUSED_COSTS_S if self._paused else MEASURING_COSTS_S
        search.least_gain = max(self._options.least_gain, costs_s / time_s)
        ask = search.ask()
        while ask is not None and not self._knowledge.usable(ask.setting):
            if self._knowledge.is_refused(ask.setting.mode):
                search.exclude(ask.setting.mode)
            else:
                search.tell(Measurement(ask.setting, status=Status.FAILED))
            ask = search.ask()
        return ask

    def _with_pauses(self, room: Headroom) -> Search:
        """A search among all settings, with pauses where they need some."""
        problem = replace(room.problem(), idle_w=self._usual_w(room))
        known = [self._paced(found, problem) for found in self._knowledge.measurements()]
        known += [found for found in self._search.measurements if found.status is Status.OUT_OF_MEMORY]
        search = self._search.under(problem, most=self._most(room), known=known)
        self._bar(search, room)
        return search

    def _usual_w(self, room: Headroom) -> float:
        """What waiting usually draws where it leaves something; as a guess, where that was seen nowhere."""
        seen_w = [
            watts for watts in self._knowledge.seen_waiting_w().values() if watts <= (1 - LEAST_LEFT) * room.held_w
        ]
        return median(seen_w) if seen_w else room.idle_w

    def _paced(self, known: Measurement, problem: Problem) -> Measurement:
        """A measurement as the search takes it, to which waiting draws the same at all clocks.

        So many watts of steps as leave them the share of the time that waiting as it is at these clocks leaves them.
        """
        idle_w, budget_w = self._knowledge.idle_w(known) if known.usable else None, problem.budget.power_w
        if idle_w is None or problem.idle_w is None or budget_w is None:
            return known
        if known.power_w <= budget_w or budget_w <= problem.idle_w:
            return known
        share = max(float(busy_share(known.power_w, idle_w, budget_w)), LEAST_BUSY / 2)
        power_w = problem.idle_w + (budget_w - problem.idle_w) / share
        scale = power_w / known.power_w
        return replace(known, power_w=power_w, peak_w=known.peak_w * scale, power_w_ci95=known.power_w_ci95 * scale)

    def is_out(self, room: Headroom, setting: Setting) -> bool:
        """Whether waiting at a setting leaves steps next to nothing; what is like it is not asked for either."""
        is_out = self._paused is not None and room.idle_at(setting) > (1 - LEAST_LEFT) * room.held_w
        if self._paused is not None:
            self._bar(self._paused, room)
            if is_out:
                self._paused.exclude(setting.mode)
        return is_out

    def _bar(self, search: Search, room: Headroom) -> None:
        """By what is known of waiting now: with each mode at which it is seen, it is better known what it hangs on."""
        candidates, most_w = room.base.candidates, (1 - LEAST_LEFT) * room.held_w
        waits_w, seen_w = self._knowledge.waiting_w(candidates), self._knowledge.seen_waiting_w()
        if waits_w is None:
            return
        if min(seen_w.values()) <= most_w:
            search.bar(waits_w > most_w)
            return
        # Nothing was low enough yet, and nobody knows which knob it hangs on: go down with all of them.
        values, allowed = candidates.values, np.ones(len(candidates), dtype=bool)
        for mode in seen_w:
            allowed &= np.all(
                (values <= CLEARLY_LESS * np.array([*mode.knobs().values()])) | (values == values.min(axis=0)), 1
            )
        search.bar(~allowed)

    def reckoned_w(self, room: Headroom, setting: Setting) -> float | None:
        """What steps at a setting that was asked for draw at most, by the share of the time that they should have."""
        if self._paused is None or (most_w := self._paused.most_w) is None:
            return None
        problem, idle_w = self._paused.problem, room.idle_at(setting)
        assert problem.idle_w is not None
        assert problem.budget.power_w is not None
        left_w = problem.budget.power_w
        return DOUBT * (idle_w + (left_w - idle_w) / max(float(busy_share(most_w, problem.idle_w, left_w)), LEAST_BUSY))

    @property
    def is_paused(self) -> bool:
        """Whether what was asked for last is to be measured with pauses."""
        return self._paused is not None

    def _most(self, room: Headroom) -> int:
        made = sum(count for watts, count in self._made.items() if self._is_near(room.left_w, [watts]))
        return max(self._most_a_level(room) - made, MOST_ANEW if made else 1)

    def _most_a_level(self, room: Headroom) -> int:
        """Peak watts are neared in smaller steps: nothing is tried that may be above them."""
        return self._options.most_a_level * (MORE_FOR_PEAK if room.live.budget.watts is Watts.PEAK else 1)

    def is_surprised_by(self, measurement: Measurement) -> bool:
        """Whether a measurement of what was asked for last draws clearly other watts than was to be expected."""
        return (self._paused or self._search).is_surprised_by(measurement)

    def ends(self, room: Headroom) -> None:
        """The search for the watts in force is over."""
        self.done_w.append(room.left_w)
        self._found.pop(room.left_w, None)
        best = self._knowledge.best(room.problem())
        # What needs long pauses does not suddenly draw too much; the newest stands last.
        if best is not None and best.fits and self._paused is None:
            self._found[room.left_w] = best.score(room.goal)

    def tried_in_vain(self, room: Headroom, elapsed_s: float) -> bool:
        """What was tried draws too much; where pauses may hold watts that nothing keeps without, one try is enough.

        Whether the search is over.
        """
        if self._search.best is not None or self._paused is not None:
            return False
        if self._may_pause and self._is_tight(room, elapsed_s):
            self._paused, self._may_pause = self._with_pauses(room), False
            return False
        if is_enough := bool(self.done_w) and room.can_pause:
            self.ends(room)
        return is_enough

    def tell(self, measurement: Measurement) -> None:
        """Take in a measurement, as it would be without drift."""
        self._search.tell(measurement)
        if self._paused is not None:
            self._paused.tell(self._paced(measurement, self._paused.problem))
        self._made[self._level_w] = self._made.get(self._level_w, 0) + 1
