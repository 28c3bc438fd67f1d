"""Pauses between steps that hold the mean power at the budget: a closed loop on the joules that were measured.

Each step is followed by a pause in proportion to it. The proportion comes from the watts that the setting is known to
draw, and is corrected by the debt: the joules drawn so far beyond the budget. The correction is slow against the lag of
any sensor, so that nothing swings, and as the debt is a sum of all that was read, the mean is exact in the long run. A
debt that stays says that the proportion itself is wrong, because something else draws too, say: it is then trimmed.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from underwatt.profile.meter import Meter
    from underwatt.records import PowerSample

# Bounds of the debt, as seconds of the budget. What was not drawn is no credit to speak of: the budget of one second is
# not saved for a later one. And what was drawn too much long ago is over.
CREDIT_S, PAUSING_CREDIT_S, LARGEST_DEBT_S = 0.02, 0.05, 0.3
FORGIVEN_S = 0.1  # the debt that is left after a measurement that drew too much
# Where steps as such keep the budget, a debt below this is left alone: readings are noisy.
SLACK_S = 0.02
# A debt is paid back over this time: with a counter of joules, and with a sensor that averages and lags.
COUNTED_S, READ_S = 1.0, 3.0
# The proportion is trimmed so many times slower than that, which lets it settle without swinging, and down to this.
TRIM_SLOWER, LOWEST_TRIM = 3.0, -0.3
# Shorter pauses are saved up, longer ones taken in pieces: in between somebody may change the budget.
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.001, 0.25
LEAST_BUSY = 0.02
# Idling must draw at least this share less than the budget, or pausing pays nothing back.
LEAST_RELIEF = 0.02


class Pacer:
    """How long to wait after a step."""

    def __init__(self, meter: Meter, idle_w: float, now_s: float) -> None:
        self._meter = meter
        self._idle_w = idle_w
        self._budget_w = math.inf
        self._busy_w: float | None = None
        self._blind_until_s = -math.inf
        self._debt_j = 0.0
        self._trim = 0.0  # share by which steps get less time than the proportion says
        self._last: PowerSample | None = None
        self._counted_s = now_s
        self._paused_s = 0.0  # not matched with readings yet
        self._busy_from_s = now_s  # when the last pause ended
        self._owed_s = 0.0  # pauses that are due
        self._absent_until_s = -math.inf
        self.energy_j = 0.0  # drawn since the start, as far as it was read

    @property
    def can_hold(self) -> bool:
        """Whether idling draws enough less than the budget for pauses to help."""
        return self._budget_w * (1 - LEAST_RELIEF) > self._idle_w

    def set_budget(self, power_w: float, idle_w: float) -> None:
        """Hold other watts from now on; a pause is expected to draw ``idle_w``."""
        self._budget_w, self._idle_w = power_w, idle_w
        self._owed_s = 0.0

    def expect(self, busy_w: float | None, blind_until_s: float = -math.inf) -> None:
        """Steps draw so many watts from now on; until a moment readings still tell of what was before."""
        self._busy_w = busy_w
        self._blind_until_s = blind_until_s if busy_w is not None else -math.inf
        self._trim = 0.0
        if self._budget_w < math.inf:
            self._debt_j = max(self._debt_j, -CREDIT_S * self._budget_w)

    def settled(self, busy_w: float, *, forgive: bool) -> None:
        """The watts of a step are known now; ``forgive`` most of the debt of a measurement that drew too much."""
        self.take_in()
        self.expect(busy_w)
        if forgive and self._budget_w < math.inf:
            self._debt_j = min(self._debt_j, FORGIVEN_S * self._budget_w)

    def stepped(self, now_s: float) -> None:
        """A step has ended: a pause in proportion to it is due."""
        self.take_in()
        busy_s = max(0.0, now_s - self._busy_from_s)
        self._busy_from_s = now_s
        if self._budget_w == math.inf or not self.can_hold:
            return
        self._owed_s += busy_s * (1 / self._busy_share() - 1)

    def pause_s(self) -> float:
        """How long to wait now; 0 where the budget is kept."""
        return min(self._owed_s, LONGEST_PAUSE_S) if self._owed_s >= SHORTEST_PAUSE_S else 0.0

    def paused(self, seconds: float, now_s: float) -> None:
        """So long was waited."""
        self._paused_s += seconds
        self._owed_s -= seconds
        self._busy_from_s = now_s

    def skip(self, now_s: float) -> None:
        """No pause is wanted now."""
        self.take_in()
        self._owed_s = 0.0
        self._busy_from_s = now_s

    def absent(self, now_s: float) -> None:
        """What was drawn until now was not drawn by steps, and no pause is due for it but by its joules."""
        self._absent_until_s = self._busy_from_s = now_s

    def _busy_share(self) -> float:
        """The share of the time that steps may take."""
        share = 1.0
        if self._busy_w is not None and self._busy_w > self._budget_w:
            share = (self._budget_w - self._idle_w) / (self._busy_w - self._idle_w)
        debt_s = self._debt_j / self._budget_w
        if share == 1.0 and debt_s <= SLACK_S and not self._trim:
            return 1.0
        # With steps that keep the budget as they are, there is nothing but the debt to pause for.
        return min(1.0, max(share * (1 - debt_s / self._payback_s() - self._trim), LEAST_BUSY))

    def _payback_s(self) -> float:
        return COUNTED_S if self._last is not None and self._last.energy_j is not None else READ_S

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
        if after.energy_j is not None and before.energy_j is not None and after.energy_j >= before.energy_j:
            drawn_j = after.energy_j - before.energy_j
        else:
            drawn_j = (before.power_w + after.power_w) / 2 * seconds
        self.energy_j += drawn_j
        paused_s = min(self._paused_s, seconds)
        self._paused_s -= paused_s
        if self._budget_w == math.inf:
            return
        if self._absent_until_s < before.at_s < self._blind_until_s and self._busy_w is not None:
            drawn_j = self._busy_w * (seconds - paused_s) + self._idle_w * paused_s
        pausing = self._busy_w is not None and self._busy_w > self._budget_w
        least_j = -(PAUSING_CREDIT_S if pausing else CREDIT_S) * self._budget_w
        debt_j = self._debt_j + drawn_j - self._budget_w * seconds
        self._debt_j = min(max(debt_j, least_j), LARGEST_DEBT_S * self._budget_w)
        # Credit is bounded: where it is used up, the proportion is further off than the debt says.
        debt_s = self._debt_j / self._budget_w if debt_j > least_j else -LARGEST_DEBT_S
        if pausing or debt_s > SLACK_S or self._trim:
            trim = self._trim + debt_s * seconds / (TRIM_SLOWER * self._payback_s() ** 2)
            self._trim = min(max(trim, LOWEST_TRIM if pausing else 0.0), 1 - LEAST_BUSY)
