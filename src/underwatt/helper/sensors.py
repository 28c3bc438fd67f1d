"""What a Jetson's sensors tell: the watts of its rails and their total, temperatures, and why it slows itself down."""

import re
import time
from typing import TYPE_CHECKING, NamedTuple

from .board_facts import KNOWN_TOTALS, Board
from .errors import DeviceError, SensorError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from .sysfs import Sysfs

MAX_PLAUSIBLE_W = 1000.0  # ten times what any Jetson can draw
# The shunt amplifier of an idle rail may be a step or two (8 or 20 mA) below zero; more than that is garbage.
MAX_OFFSET = 50
_JP4_NAMES = "sys/bus/i2c/drivers/ina3221x/*/iio:device*/rail_name_*"
_JP5_LABELS = "sys/bus/i2c/drivers/ina3221/*/hwmon/hwmon*/in[0-9]*_label"
_HWMON_NAMES = "sys/class/hwmon/hwmon*/name"
_SUM_CHANNEL = "7"  # the driver's sum of shunt voltages: no rail of its own
_COLDEST_C, _HOTTEST_C = -60.0, 150.0
_CONSTANT_ZONES = ("PMIC-Die",)  # reports 100 °C whatever happens
_NO_THROTTLE = ("fan", "hot-surface")  # these act or warn without slowing anything
_BUSY_S = 0.02  # a sensor that converts is asked again for so long
_SERIOUS = ("OC1", "OC2")  # one event tells of a supply that gives way
# The others halve the clock for about 1 ms an event, several times a second on a board that is well: 20 events a
# second cost 1% of the speed.
_OFTEN_PER_S = 20.0


class PowerRail(NamedTuple):
    """One measured supply: the product of its files, times ``watts_per_unit``, is its power."""

    name: str
    files: "tuple[str, ...]"
    watts_per_unit: float


def find_rails(sysfs: "Sysfs") -> "tuple[PowerRail, ...]":
    """Every rail that a power sensor reports here, whatever the JetPack generation; reads names, no values."""
    rails: list[PowerRail] = []
    for path in sysfs.glob(_JP4_NAMES):
        folder, channel = path.rsplit("/", 1)[0], path.rsplit("_", 1)[1]
        tree = f"{folder.rsplit('/', 1)[0]}/of_node/channel@{channel}/ti,rail-name"
        # Only root reads the names of the driver; the device tree's are the same, and anyone's to read.
        name = _label(sysfs, path) or _label(sysfs, tree)
        rails.append(PowerRail(name, (f"{folder}/in_power{channel}_input",), 1e-3))
    for path in sysfs.glob(_JP5_LABELS):
        folder, file = path.rsplit("/", 1)
        channel = re.sub(r"\D", "", file)
        if channel != _SUM_CHANNEL:
            files = (f"{folder}/in{channel}_input", f"{folder}/curr{channel}_input")
            rails.append(PowerRail(_label(sysfs, path), files, 1e-6))
    for path in sysfs.glob(_HWMON_NAMES):
        folder = path.rsplit("/", 1)[0]
        if _label(sysfs, path) == "ina238" and sysfs.exists(f"{folder}/power1_input"):
            name = _label(sysfs, f"{folder}/power1_label") or _label(sysfs, f"{folder}/in1_label") or "VIN"
            rails.append(PowerRail(name, (f"{folder}/power1_input",), 1e-6))
    named = tuple(rail for rail in rails if rail.name not in ("", "NC"))
    return named or tuple(rail for rail in rails if not rail.name)


def total_of(board: Board, rails: "tuple[PowerRail, ...]") -> "tuple[PowerRail, ...]":
    """The rails whose sum is the board's total; raises ``SensorError`` rather than sum what happens to be there."""
    if board.no_sensor:
        raise SensorError(board.no_sensor, hint="Use an external meter, or plan with a profile of the 4 GB board.")
    by_name = {rail.name: rail for rail in rails}
    if by_name and not any(by_name):
        hint = "Run with sudo."
        raise SensorError(f"Only root may read which rail is which on this {board.name}.", hint=hint)
    if not by_name:
        hint = "Check that the ina3221 driver is loaded and, in a container, that /sys is mounted."
        raise SensorError(f"No power sensor found on this {board.name}.", hint=hint)
    for names in (board.total_rails,) if board.total_rails else KNOWN_TOTALS:
        if all(name in by_name for name in names):
            return tuple(by_name[name] for name in names)
    wanted = " + ".join(board.total_rails) or "any known total"
    raise SensorError(
        f"The power sensors of this {board.name} report {', '.join(sorted(by_name))}, but not {wanted}.",
        hint="A part of the rails is not the total; check that every ina3221 is bound to its driver.",
    )


def _label(sysfs: "Sysfs", path: str) -> str:
    return sysfs.text_or_empty(path).strip("\0 \t\r\n")


class PowerMonitor:
    """Reads the total and the rails; finds the sensor files at the first read, and again after a failure."""

    def __init__(self, sysfs: "Sysfs", board: Board) -> None:
        self._sysfs = sysfs
        self._board = board
        self._rails: tuple[PowerRail, ...] = ()
        self._total: tuple[PowerRail, ...] | None = None

    def total_rails(self) -> "tuple[PowerRail, ...]":
        """The rails that make the total."""
        if self._total is None:
            self._total = total_of(self._board, self._all_rails())
        return self._total

    def total_w(self) -> float:
        """Total power now; raises ``SensorError`` for a silent or implausible sensor, never returns zero."""
        try:
            power_w = sum([self._rail_w(rail) for rail in self.total_rails()])
            if power_w <= 0:
                hint = "Its driver may be suspended; look into dmesg."
                raise SensorError("The power sensor reads zero watts, which no running board draws.", hint=hint)
        except DeviceError:
            # A driver that comes back may have another hwmon number.
            self._rails, self._total = (), None
            raise
        return power_w

    def rails_w(self) -> "dict[str, float]":
        """Power of each rail that can be read now; one that cannot is left out, not zero."""
        powers_w: dict[str, float] = {}
        for rail in self._all_rails():
            try:
                powers_w[rail.name] = self._rail_w(rail)
            except DeviceError:
                self._rails = ()
        return powers_w

    def _all_rails(self) -> "tuple[PowerRail, ...]":
        if not self._rails:
            self._rails = find_rails(self._sysfs)
        return self._rails

    def _rail_w(self, rail: "PowerRail") -> float:
        power_w, reads = rail.watts_per_unit, f"The power sensor of rail {rail.name} reads"
        for file in rail.files:
            value = self._sysfs.read_int(file, patience_s=_BUSY_S)
            # Checked one by one: the product of two negative readings would look sound.
            if value < -MAX_OFFSET:
                hint = "A negative reading is garbage; look into dmesg."
                raise SensorError(f"{reads} {value} in {self._sysfs.full(file)}.", hint=hint)
            if value <= 0 and file.rsplit("/", 1)[-1].startswith("in") and len(rail.files) > 1:
                hint = "A rail without voltage would be missing from the total; look into dmesg."
                raise SensorError(f"{reads} {value} mV.", hint=hint)
            power_w *= value
        if power_w > MAX_PLAUSIBLE_W:
            hint = "A saturated or disconnected sensor does that; look into dmesg."
            raise SensorError(f"{reads} {power_w:g} W, more than any Jetson can draw.", hint=hint)
        return power_w


class ThermalZones:
    """Reads zones, cooling devices and over-current counters; remembers the counters between reads."""

    def __init__(self, sysfs: "Sysfs", now_s: "Callable[[], float]" = time.monotonic) -> None:
        self._sysfs = sysfs
        self._now_s = now_s
        self._events: dict[str, tuple[float, int]] = {}  # when a counter was looked at, and what it read

    def temperatures_c(self) -> "dict[str, float]":
        """Degrees of each zone that can be read; powered-down zones are left out."""
        temperatures_c: dict[str, float] = {}
        for zone in self._sysfs.glob("sys/class/thermal/thermal_zone*"):
            name = re.sub("-therm(al)?$", "", _label(self._sysfs, f"{zone}/type"))
            millidegrees = self._sysfs.int_or_none(f"{zone}/temp")
            if name in ("", *_CONSTANT_ZONES) or millidegrees is None:
                continue
            if _COLDEST_C < millidegrees / 1000 < _HOTTEST_C:
                temperatures_c[name] = millidegrees / 1000
        return temperatures_c

    def throttle_reasons(self) -> "tuple[str, ...]":
        """Cooling devices that hold something back now, and over-current events since the last call."""
        return (*self._cooling(), *self._over_current())

    def _cooling(self) -> "Iterator[str]":
        for device in self._sysfs.glob("sys/class/thermal/cooling_device*"):
            name = _label(self._sysfs, f"{device}/type")
            state = self._sysfs.int_or_none(f"{device}/cur_state") or 0
            if name and state > 0 and not any(word in name for word in _NO_THROTTLE):
                yield f"thermal: {name} at {state}"

    def _over_current(self) -> "Iterator[str]":
        for path in self._sysfs.glob("sys/class/hwmon/hwmon*/oc[0-9]*_event_cnt"):
            count = self._sysfs.int_or_none(path)
            if count is None:
                continue
            # The counters run since boot: only what was added since the last look tells about now.
            now_s = self._now_s()
            since_s, before = self._events.get(path, (now_s, count))
            name = path.rsplit("/", 1)[1].split("_", 1)[0].upper()
            often = _OFTEN_PER_S * max(1.0, now_s - since_s)
            if count - before >= (1 if name in _SERIOUS else often):
                yield f"over-current: {name} ({count - before} events)"
            elif path in self._events and name not in _SERIOUS and now_s - since_s < 1.0:
                continue  # too soon to tell how often: what came counts with what comes
            self._events[path] = (now_s, count)
