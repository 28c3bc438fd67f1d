"""Temperatures of a Jetson, and why it slows itself down."""

from __future__ import annotations

from typing import TYPE_CHECKING

from underwatt.errors import DeviceError

if TYPE_CHECKING:
    from underwatt.device.jetson.sysfs import Sysfs

_COLDEST_C, _HOTTEST_C = -60.0, 150.0
_CONSTANT_ZONES = ("PMIC-Die",)  # reports 100 °C whatever happens
_NO_THROTTLE = ("fan", "hot-surface")  # these act or warn without slowing anything


class Thermal:
    """Reads zones, cooling devices and over-current counters; remembers the counters between reads."""

    def __init__(self, sysfs: Sysfs) -> None:
        self._sysfs = sysfs
        self._events: dict[str, int] = {}

    def temperatures_c(self) -> dict[str, float]:
        """Degrees of each zone that can be read; powered-down zones are left out."""
        temperatures_c: dict[str, float] = {}
        for zone in self._sysfs.glob("sys/class/thermal/thermal_zone*"):
            try:
                name = self._sysfs.read_word(f"{zone}/type").removesuffix("-therm").removesuffix("-thermal")
                temperature_c = self._sysfs.read_int(f"{zone}/temp") / 1000
            except DeviceError:
                continue
            if name not in _CONSTANT_ZONES and _COLDEST_C < temperature_c < _HOTTEST_C:
                temperatures_c[name] = temperature_c
        return temperatures_c

    def throttle_reasons(self) -> tuple[str, ...]:
        """Cooling devices that hold something back now, and over-current events since the last call."""
        return (*self._cooling(), *self._over_current())

    def _cooling(self) -> tuple[str, ...]:
        reasons = []
        for device in self._sysfs.glob("sys/class/thermal/cooling_device*"):
            try:
                name = self._sysfs.read_word(f"{device}/type")
                state = self._sysfs.read_int(f"{device}/cur_state")
            except DeviceError:
                continue
            if state > 0 and not any(word in name for word in _NO_THROTTLE):
                reasons.append(f"thermal: {name} at {state}")
        return tuple(reasons)

    def _over_current(self) -> tuple[str, ...]:
        reasons = []
        for path in self._sysfs.glob("sys/class/hwmon/hwmon*/oc[0-9]*_event_cnt"):
            try:
                count = self._sysfs.read_int(path)
            except DeviceError:
                continue
            # The counters run since boot: only what was added since the last look tells about now.
            new = count - self._events.get(path, count)
            self._events[path] = count
            if new > 0:
                name = path.rsplit("/", 1)[1].removesuffix("_event_cnt").upper()
                reasons.append(f"over-current: {name} ({new} events)")
        return tuple(reasons)
