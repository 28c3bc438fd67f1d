"""Pauses between steps that hold the mean power at the budget: a closed loop on the joules that were measured.

What was drawn beyond the budget is a debt, and a pause pays it back. What was drawn less is no credit to speak of: the
budget of one second is not saved for a later one.

A hardware counter of joules says what was drawn at once. Other sensors average and lag, and pausing by what they say
would swing; there the debt is reckoned with the watts that the setting is known to draw, and the readings correct those
over seconds.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from underwatt.profile.meter import Meter
    from underwatt.records import PowerSample

# A debt or credit below the budget's joules of this time is left alone: readings are noisy.
SLACK_S = 0.02
# The debt of a long step is paid back in pieces of at most this: in between somebody may change the budget.
LONGEST_PAUSE_S = 0.25
FORGIVEN_S = 0.1
# Readings correct the reckoning each time so many seconds of them have come, by this share of what they differ.
LEARN_S, LEARN_SHARE = 2.0, 0.5
# Idling must draw at least this share less than the budget, or pausing pays nothing back.
LEAST_RELIEF = 0.02


class Pacer:
    """How long to wait after a step."""

    def __init__(self, meter: Meter, idle_w: float, now_s: float) -> None:
        self._meter = meter
        self._idle_w = idle_w
        self._budget_w = math.inf
        self._busy_w: float | None = None
        self._bias_w = self._error_j = self._error_s = 0.0
        self._blind_until_s = -math.inf
        self._debt_j = 0.0
        self._last: PowerSample | None = None
        self._counted_s = now_s
        self._paused_s = 0.0  # since the last reading
        self.energy_j = 0.0  # drawn since the start, as far as it was read

    @property
    def can_hold(self) -> bool:
        """Whether idling draws enough less than the budget for pauses to help."""
        return self._budget_w * (1 - LEAST_RELIEF) > self._idle_w

    def set_budget(self, power_w: float, idle_w: float) -> None:
        """Hold other watts from now on; a pause is expected to draw ``idle_w``."""
        self._budget_w, self._idle_w = power_w, idle_w

    def expect(self, busy_w: float | None, blind_until_s: float = -math.inf) -> None:
        """Steps draw so many watts from now on; until a moment readings still tell of what was before."""
        self._busy_w = busy_w
        self._bias_w = self._error_j = self._error_s = 0.0
        self._blind_until_s = blind_until_s if busy_w is not None else -math.inf

    def forgive(self) -> None:
        """Pay back no more than a fraction of a second: a measurement that drew too much is over."""
        self.take_in()
        self._debt_j = min(self._debt_j, FORGIVEN_S * self._budget_w) if self._budget_w < math.inf else 0.0

    def paused(self, seconds: float) -> None:
        """So long was waited."""
        self._paused_s += seconds

    def pause_s(self, now_s: float) -> float:
        """How long to wait now; 0 where the budget is kept."""
        self.take_in()
        if self._budget_w == math.inf:
            return 0.0
        debt_j = self._debt_j + self._since_last_j(now_s)
        if debt_j <= SLACK_S * self._budget_w or not self.can_hold:
            return 0.0
        return min(LONGEST_PAUSE_S, debt_j / (self._budget_w - self._idle_w))

    def take_in(self) -> None:
        """Count the readings since the last look."""
        if self._meter.newest is self._last:
            return
        for sample in self._meter.readings_after(self._counted_s):
            if self._last is not None:
                self._add(self._last, sample)
            self._last = sample
            self._counted_s = sample.at_s

    def _add(self, before: PowerSample, after: PowerSample) -> None:
        seconds = after.at_s - before.at_s
        counted = after.energy_j is not None and before.energy_j is not None and after.energy_j >= before.energy_j
        drawn_j = (before.power_w + after.power_w) / 2 * seconds
        if counted:
            assert after.energy_j is not None
            assert before.energy_j is not None
            drawn_j = after.energy_j - before.energy_j
        self.energy_j += drawn_j
        paused_s = min(self._paused_s, seconds)
        self._paused_s -= paused_s
        if self._busy_w is not None and not counted:
            reckoned_j = self._busy_w * (seconds - paused_s) + self._idle_w * paused_s + self._bias_w * seconds
            if before.at_s >= self._blind_until_s:
                self._learn(drawn_j - reckoned_j, seconds)
            drawn_j = reckoned_j
        if self._budget_w < math.inf:
            debt_j = self._debt_j + drawn_j - self._budget_w * seconds
            self._debt_j = max(debt_j, -SLACK_S * self._budget_w)

    def _learn(self, error_j: float, seconds: float) -> None:
        """Correct what is reckoned with by what was read, once enough was."""
        self._error_j += error_j
        self._error_s += seconds
        if self._error_s >= LEARN_S:
            self._bias_w += LEARN_SHARE * self._error_j / self._error_s
            self._error_j = self._error_s = 0.0

    def _since_last_j(self, now_s: float) -> float:
        """The debt of the time for which there is no reading yet."""
        if self._last is None:
            return 0.0
        seconds = max(0.0, now_s - self._last.at_s)
        paused_s = min(self._paused_s, seconds)
        busy_w = self._last.power_w if self._busy_w is None else self._busy_w
        bias_w = 0.0 if self._busy_w is None else self._bias_w
        return busy_w * (seconds - paused_s) + self._idle_w * paused_s + (bias_w - self._budget_w) * seconds
