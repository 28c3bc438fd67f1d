"""Joules between readings of power: by the hardware's counter, unless there is none, or it has stopped."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from underwatt.records import PowerSample

# A counter of joules that has not moved for so long, while power is read, has stopped.
STOPPED_S = 2.0


class Joules:
    """Follows readings, one after the other."""

    def __init__(self) -> None:
        self._still_s = self._still_j = 0.0

    def between(self, before: PowerSample, after: PowerSample) -> float:
        """Joules from one reading to the next."""
        seconds = after.at_s - before.at_s
        read_j = (before.power_w + after.power_w) / 2 * seconds
        if after.energy_j is None or before.energy_j is None or after.energy_j < before.energy_j:
            return read_j
        if after.energy_j > before.energy_j:
            self._still_s = self._still_j = 0.0
            return after.energy_j - before.energy_j
        self._still_s += seconds
        if self._still_s > STOPPED_S:
            waiting_j, self._still_j = self._still_j, 0.0
            return waiting_j + read_j
        self._still_j += read_j
        return 0.0
