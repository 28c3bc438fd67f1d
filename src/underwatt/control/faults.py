"""Two kinds of trouble that a run lives with for a while: a sensor that is silent, and a clock that heat holds down."""

from __future__ import annotations

import math
from enum import Enum
from typing import TYPE_CHECKING

from underwatt.errors import SensorError

if TYPE_CHECKING:
    from underwatt.device.base import Device
    from underwatt.measure.meter import Meter
    from underwatt.records import PowerMode, PowerSample

STATE_PERIOD_S = 1.0  # how often the device is asked whether it slows itself down


class Sensor(Enum):
    """What a look at the readings finds: that they come, come again, have just stopped, or still do not come."""

    WORKS = "works"
    BACK = "back"
    FAILED = "failed"
    SILENT = "silent"


class SensorGuard:
    """A sensor may be silent for some seconds; then nobody can say that the budget is kept."""

    def __init__(self, silent_s: float, limit_s: float) -> None:
        self._silent_s, self._limit_s = silent_s, limit_s
        self._since_s: float | None = None
        self.error = SensorError("Power cannot be read.")  # why it failed last

    def look(self, now_s: float, meter: Meter, begun_s: float) -> Sensor:
        """Whether there are readings; raises ``SensorError`` where there have been none for too long."""
        newest = meter.newest
        last_s = begun_s if newest is None else newest.at_s
        if now_s - last_s <= self._silent_s:
            return Sensor.BACK if self.back(newest) else Sensor.WORKS
        self.error = meter.failure or SensorError(f"Power was last read {now_s - last_s:.1f} s ago.")
        return Sensor.FAILED if self.lost(now_s, self.error) else Sensor.SILENT

    @property
    def is_lost(self) -> bool:
        """Whether power cannot be read at the moment."""
        return self._since_s is not None

    def lost(self, now_s: float, error: SensorError) -> bool:
        """A reading failed; whether that is news. Raises ``SensorError`` where it has lasted too long."""
        if self._since_s is None:
            self._since_s = now_s
            return True
        if now_s - self._since_s > self._limit_s:
            raise SensorError(
                f"Power could not be read for {self._limit_s:g} s, so the budget cannot be kept: {error.message}",
                hint="Mend the sensor, then go on where the training stopped.",
            ) from error
        return False

    def back(self, newest: PowerSample | None) -> bool:
        """Whether the sensor was lost and has read again."""
        if self._since_s is None or newest is None or newest.at_s <= self._since_s:
            return False
        self._since_s = None
        return True


class ThrottleGuard:
    """Clocks above the one that heat allows are of no use for a while."""

    def __init__(self, keep_s: float) -> None:
        self._keep_s = keep_s
        self._until_s = self._next_look_s = -math.inf
        self.highest_mhz = math.inf

    @property
    def active(self) -> bool:
        """Whether some clocks are not to be used."""
        return self.highest_mhz < math.inf

    def is_over(self, now_s: float) -> bool:
        """Whether the while has just ended."""
        if not self.active or now_s <= self._until_s:
            return False
        self.highest_mhz = math.inf
        return True

    def look(self, now_s: float, device: Device, asked: PowerMode) -> str:
        """Ask the device now and then whether it slows itself down; what it says, where that is news."""
        if now_s < self._next_look_s:
            return ""
        self._next_look_s = now_s + STATE_PERIOD_S
        state = device.read_state()
        running_mhz = state.running.gpu_mhz
        if not state.throttle_reasons or self.active or not asked.gpu_mhz or not running_mhz:
            return ""
        if running_mhz >= asked.gpu_mhz:
            return ""
        self.highest_mhz, self._until_s = running_mhz, now_s + self._keep_s
        return f"The device slows itself down ({', '.join(state.throttle_reasons)})."
