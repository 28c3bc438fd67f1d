"""A sensor that is stuck: its readings stand still while what the device draws must have changed.

Readings that stay the same prove nothing by themselves: sensors read in whole steps, average over seconds and publish
late, and two modes may draw much the same. So what a sensor may show is followed on a scale of its own, from 0
(waiting) to 1 (steps with all clocks at their highest), between two bounds that hold for the quickest sensor as for the
slowest that we know. Only where the whole range has moved on, and not one reading has, the sensor is stuck. Whoever may
let a job pause need not wait for such a move: ``wants_a_pause`` says when a pause would tell, and ``wants_work`` when
some steps would, where a job has been waiting for long.

The scale is coarse on purpose: nothing here knows what a board draws, only that steps draw more than waiting, and that
they draw more where every clock is higher. Which of two clocks matters hangs on the job.
"""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from underwatt.records import PowerMode

if TYPE_CHECKING:
    from collections.abc import Mapping

# The slowest sensors: an INA3221 that averages 512 conversions publishes every 3.4 s; a large GPU averages over 1 s.
LAG_S, LATE_S = 4.0, 4.0
MOVED = 0.2  # so far the range must have moved on the scale: several times what any sensor's step is worth there
PROVING = 0.24  # a pause tells where steps have brought the range at least here
FEWEST_SAME = 60  # equal readings, before anything is said or asked for
UNMOVED_S = 30.0  # readings that are the same for so long, however slow a sensor is, before steps are to move them
FEWER_PAUSES = 10  # a sensor that was asked and found well is asked again after so many times more equal readings
LEAST_STEPS = 0.3  # where steps lie at the lowest clocks, at least
NO_CLOCK = "power_limit_w"  # a limit above what a job draws changes nothing
SURE_STEP_S, SLOWER = 4.0, 1.5  # a longer step, and so much longer than the last, may have been a wait for data


class Level(NamedTuple):
    """A range on the scale of what a device draws."""

    least: float
    most: float

    def after(self, seconds: float, drawn: Level) -> Level:
        """What a sensor shows when this was drawn for a while: it may have followed at once, or slowly."""
        keep = math.exp(-seconds / LAG_S)
        least, most = (towards + keep * (now - towards) for now, towards in zip(self, drawn, strict=True))
        return Level(min(least, drawn.least), max(most, drawn.most))


UNKNOWN, WAITING = Level(0.0, 1.0), Level(0.0, 0.0)


class _Equal(NamedTuple):
    """Readings that were all the same."""

    power_w: float
    since_s: float
    readings: int


class StuckWatch:
    """Told of readings, modes, steps and pauses in the order in which they happen, it says whether a sensor is stuck.

    Readings may come from another thread than all else.
    """

    def __init__(self) -> None:
        self._equal = _Equal(math.nan, math.inf, 0)
        self._mode, self._steps = PowerMode(), Level(LEAST_STEPS, 1.0)
        self._until_s: float | None = None  # all that happened up to here is known
        self._last_step_s = 0.0
        self._shows = UNKNOWN
        self._recent: deque[tuple[float, Level]] = deque()  # what no reading need show yet
        self._forget(math.inf)
        self._patience, self._asked = FEWEST_SAME, False
        self._patience_s, self._asked_to_work = UNMOVED_S, False

    @property
    def power_w(self) -> float:
        """The last reading."""
        return self._equal.power_w

    def read(self, at_s: float, power_w: float) -> None:
        """Power was read."""
        same = self._equal
        if power_w == same.power_w:
            self._equal = same._replace(readings=same.readings + 1)
        else:
            self._equal = _Equal(power_w, at_s, 1)

    def changed(self, at_s: float, mode: PowerMode, highest: Mapping[str, float]) -> None:
        """Clocks were set, of which ``highest`` names the highest; those that ``mode`` does not name stay."""
        self.worked(at_s)
        self._mode = self._mode.with_knobs(**mode.knobs())
        now, most = self._mode.knobs(), {name: value for name, value in highest.items() if name != NO_CLOCK}
        shares = [now[name] / most[name] for name in most if name in now]
        low, high = (min(shares), max(shares)) if shares and len(shares) == len(most) else (0.0, 1.0)
        self._steps = Level(*(LEAST_STEPS + (1 - LEAST_STEPS) * share for share in (low, high)))

    def worked(self, until_s: float) -> None:
        """Steps followed each other until now."""
        if self._until_s is None:
            self.unknown(until_s)
            return
        seconds = until_s - self._until_s
        if seconds <= 0:
            return
        is_work = seconds <= max(SURE_STEP_S, SLOWER * self._last_step_s)
        self._last_step_s = seconds
        self._lived(until_s, self._steps if is_work else UNKNOWN)

    def waited(self, begin_s: float, end_s: float) -> None:
        """Nothing was done for a while."""
        self.worked(begin_s)
        self._lived(end_s, WAITING)

    def unknown(self, until_s: float) -> None:
        """Something went on until now of which nothing is known."""
        self._lived(until_s, UNKNOWN)

    def is_unproven(self, since_s: float) -> bool:
        """Whether readings have been the same since a moment, and no pause has shown yet that they can move."""
        return self._patience == FEWEST_SAME and self._equal.since_s <= since_s

    @property
    def is_stuck(self) -> bool:
        """Whether readings stood still while they must have moved."""
        return self._equal.readings >= FEWEST_SAME and self._highest - self._lowest >= MOVED

    def wants_a_pause(self) -> bool:
        """Whether readings stand still for so long that a pause should show whether they can move."""
        same = self._equal
        wants = same.readings >= self._patience and same.since_s == self._since_s and self._has_seen_work()
        if self._asked and not wants:
            self._patience *= FEWER_PAUSES  # it has moved: all is well
        self._asked = wants
        return wants

    def wants_work(self) -> bool:
        """Whether readings stand still for so long in a wait that steps should show whether they can move."""
        same = self._equal
        is_same = same.readings >= FEWEST_SAME and same.since_s == self._since_s
        still_s = (self._until_s or 0.0) - same.since_s
        if self._asked_to_work and not is_same:
            self._patience_s *= FEWER_PAUSES
        wants = is_same and still_s > self._patience_s and not self._has_seen_work()
        self._asked_to_work = wants or (self._asked_to_work and is_same)
        return wants

    def _has_seen_work(self) -> bool:
        """Whether there was enough of it, since readings are the same, for a pause to differ from it."""
        recent = (shown.least for at_s, shown in self._recent if at_s >= self._equal.since_s)
        return max(self._highest, *recent, -math.inf) >= PROVING

    def _forget(self, since_s: float) -> None:
        self._since_s, self._highest, self._lowest = since_s, -math.inf, math.inf

    def _lived(self, until_s: float, drawn: Level) -> None:
        begin_s = until_s if self._until_s is None else self._until_s
        if until_s < begin_s:
            return
        self._shows = self._shows.after(until_s - begin_s, drawn)
        self._until_s = until_s
        self._recent.append((until_s, self._shows))
        if self._equal.since_s != self._since_s:
            self._forget(self._equal.since_s)
        while self._recent and self._recent[0][0] <= until_s - LATE_S:
            at_s, shown = self._recent.popleft()
            if at_s >= self._since_s:
                self._highest = max(self._highest, shown.least)
                self._lowest = min(self._lowest, shown.most)
