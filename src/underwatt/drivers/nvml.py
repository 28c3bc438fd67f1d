"""NVIDIA GPUs through NVML (nvidia-ml-py): read without privilege, set with it.

Each call is probed on its own: there are boards (Orin under JetPack 6) where ``nvmlInit`` works and every query
fails, cards without a power sensor, and containers that may read and not set. Whether a listed clock can be locked no
query tells, and trying would undo somebody's lock, which NVML cannot show: so the first mode that is set tells, and
what the driver does not support is no knob from then on.
"""

from __future__ import annotations

import math
import os
from contextlib import ExitStack, suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from underwatt._imports import require
from underwatt.device.space import Knob, ModeSpace
from underwatt.device.timing import SystemClock
from underwatt.errors import ApplyError, DeviceError, NoDeviceError, NotPermittedError, SensorError, UnderwattError
from underwatt.records import Capability, DeviceInfo, DeviceState, PowerMode, PowerSample

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from underwatt.device.timing import Clock

_SETTING_REMEDY = "Run as root (sudo), or give the container CAP_SYS_ADMIN; a duty cycle needs no permission."
_REFUSED_REMEDY = "Check `nvidia-smi -q -d POWER,CLOCK` for what is allowed, or set nothing with --no-modes."
_LOST_REMEDY = "Check `nvidia-smi`; the driver may have lost the card."
_CAP_SYS_ADMIN_BIT = 21
_LIMIT_STEPS = 20
_PLAUSIBLE_W = 5000.0
# Cards count joules in steps of up to a tenth of a second: a look each so often, for so long, sees one.
_COUNTER_LOOK_S, _COUNTER_WAIT_S, _COUNTER_LATE_S = 0.004, 0.22, 0.5
# Where the last look was longer ago, because another thread had the interpreter, nobody saw when the counter moved.
_SURE_S = 0.03
# Data-centre cards move it on a beat of their own (an H200 within 5 ms in two minutes): after so many moves on it the
# beat says when. It may drift by so much, and a move may come so much before it.
_BEAT_S, _CONFIRMED, _DRIFT, _EARLY_S = 0.1, 5, 1e-4, 0.005
_UNLOCKED = "unlocked"
_CLOCK_KNOBS = {  # how NVML locks each clock, and how it lets go
    "mem_mhz": ("nvmlDeviceSetMemoryLockedClocks", "nvmlDeviceResetMemoryLockedClocks"),
    "gpu_mhz": ("nvmlDeviceSetGpuLockedClocks", "nvmlDeviceResetGpuLockedClocks"),
}
_TELLING = (
    "nvmlDeviceGetPowerUsage",
    "nvmlDeviceGetTotalEnergyConsumption",
    "nvmlDeviceGetPowerManagementLimitConstraints",
    "nvmlDeviceGetSupportedMemoryClocks",
)
# A clock held down by the power limit is no throttling: that is what the limit is for.
_THROTTLE_REASONS = {
    "HwSlowdown": "hardware slowdown",
    "SwThermalSlowdown": "too hot (software)",
    "HwThermalSlowdown": "too hot (hardware)",
    "HwPowerBrakeSlowdown": "power brake",
}


class _Beat:
    """When the counter moved, as far as that can be known: a look sees that it did, and may come late."""

    def __init__(self) -> None:
        self._at_s = -math.inf  # a moment at which it moved
        self._confirmed = 0  # moves on the beat, one after the other

    def moved_s(self, before_s: float, asked_s: float, told_s: float) -> float | None:
        """When it last moved, of which a look that began at ``before_s`` saw nothing; ``None`` where nobody knows.

        The look that saw it lasted from ``asked_s`` to ``told_s``.
        """
        is_seen = told_s - before_s < _SURE_S
        beats = math.floor((told_s - self._at_s + _EARLY_S) / _BEAT_S) if self._confirmed else 0
        on_beat_s = self._at_s + beats * _BEAT_S
        if not on_beat_s > before_s - _EARLY_S:  # the look before would have seen that
            self._at_s, self._confirmed = told_s, int(is_seen)
            return told_s if is_seen else None
        late_s = told_s - on_beat_s
        self._at_s = on_beat_s + min(late_s, _DRIFT * beats * _BEAT_S)
        if self._confirmed < _CONFIRMED:
            self._confirmed += is_seen
            return told_s if is_seen else None
        is_doubtful = on_beat_s > asked_s and on_beat_s - _BEAT_S > before_s - _EARLY_S  # this beat, or the one before
        return None if is_doubtful else min(on_beat_s, told_s)


class NvmlDevice:
    """One GPU. ``nvml`` is the library's module, or something that answers like it."""

    def __init__(self, where: str = "0", *, nvml: Any = None, clock: Clock | None = None) -> None:
        self._nvml = _library(nvml)
        self.clock: Clock = clock or SystemClock()
        self._handle = _open_handle(self._nvml, where)
        self._why_not: dict[str, str] = {}
        self._unsupported: set[str] = set()  # knobs that the driver lists and does not set
        uuid = _text(self._ask("identity", self._nvml.nvmlDeviceGetUUID) or where)
        name = _text(self._ask("name", self._nvml.nvmlDeviceGetName) or "NVIDIA GPU")
        driver = self._try("driver", self._nvml.nvmlSystemGetDriverVersion)
        self.info = DeviceInfo(
            backend="nvml",
            name=name,
            id=f"nvml-{uuid}",
            address=f"nvml:{uuid}",
            software={"driver": _text(driver)} if driver is not None else {},
            power_of="GPU and its memory",  # NVML: the GPU and its associated circuitry
        )
        self._beat = _Beat()
        self._read_mw = self._choose_power_reader()
        self._has_counter = self._ask("energy counter", self._nvml.nvmlDeviceGetTotalEnergyConsumption) is not None

    def _try(self, what: str, call: Callable[..., Any], *arguments: Any) -> Any:
        """The call's answer, or ``None`` with the reason kept for ``capabilities``."""
        try:
            return call(*arguments)
        except self._nvml.NVMLError as exc:
            self._why_not[what] = str(exc)
            return None

    def _ask(self, what: str, call: Callable[..., Any], *arguments: Any) -> Any:
        return self._try(what, call, self._handle, *arguments)

    def _choose_power_reader(self) -> Callable[[], float] | None:
        """The instant reading where there is one: the usual one is a one-second average on newer cards."""

        def instant_mw() -> float:
            field = self._nvml.nvmlDeviceGetFieldValues(self._handle, [self._nvml.NVML_FI_DEV_POWER_INSTANT])[0]
            if field.nvmlReturn != 0:
                raise self._nvml.NVMLError(field.nvmlReturn)
            return float(field.value.uiVal)

        def usual_mw() -> float:
            return float(self._nvml.nvmlDeviceGetPowerUsage(self._handle))

        for what, reader in (("instant power", instant_mw), ("power", usual_mw)):
            value_mw = self._try(what, reader)
            if value_mw is not None and value_mw > 0:
                return reader
        return None

    @property
    def space(self) -> ModeSpace:
        """Power limit, locked GPU clock and locked memory clock, as far as the card states and sets them."""
        return self._listed.only(knob.name for knob in self._listed.knobs if knob.name not in self._unsupported)

    @cached_property
    def _listed(self) -> ModeSpace:
        knobs: list[Knob] = []
        limits_mw = self._ask("power_limit_w", self._nvml.nvmlDeviceGetPowerManagementLimitConstraints)
        limit_mw = self._ask("power_limit_w", self._nvml.nvmlDeviceGetPowerManagementLimit)  # to be put back
        if limit_mw is not None and limits_mw is not None and limits_mw[1] > limits_mw[0]:
            low_w, high_w = (value / 1000 for value in limits_mw)
            step_w = max(5.0, round((high_w - low_w) / _LIMIT_STEPS / 5) * 5)
            grid = {high_w - step_w * n for n in range(int((high_w - low_w) / step_w) + 1)} | {low_w}
            knobs.append(Knob("power_limit_w", tuple(sorted(grid)), continuous=True))
        memory_mhz = self._ask("mem_mhz", self._nvml.nvmlDeviceGetSupportedMemoryClocks)
        if memory_mhz:
            knobs.append(Knob("mem_mhz", tuple(sorted({float(mhz) for mhz in memory_mhz}))))
            graphics_mhz = self._ask("gpu_mhz", self._nvml.nvmlDeviceGetSupportedGraphicsClocks, max(memory_mhz))
            if graphics_mhz:
                knobs.append(Knob("gpu_mhz", tuple(sorted({float(mhz) for mhz in graphics_mhz}))))
        return ModeSpace(knobs)

    def capabilities(self) -> tuple[Capability, ...]:
        """What this card states and this user may set."""
        permitted = _may_administer()
        remedy = "" if permitted else _SETTING_REMEDY
        found: list[Capability] = []
        for name in ("gpu_mhz", "mem_mhz", "power_limit_w"):
            knob = self.space.knob(name)
            if knob is None:
                why = self._why_not.get(name, "the driver states no range")
                found.append(Capability(name, "knob", False, f"not on this card: {why}"))
                continue
            detail = f"{knob.values[0]:g} to {knob.values[-1]:g}, {len(knob.values)} steps"
            if name != "power_limit_w":
                detail += "; NVML cannot show an earlier lock: restoring unlocks what was set here"
            found.append(Capability(name, "knob", permitted, detail, remedy))
        reads = "reads" if self._read_mw else f"cannot be read: {self._why_not.get('power', 'no answer')}"
        found.append(Capability("power", "sensor", self._read_mw is not None, reads))
        counter = "counts" if self._has_counter else f"not here: {self._why_not.get('energy counter', 'no answer')}"
        found.append(Capability("energy", "sensor", self._has_counter, counter))
        return tuple(found)

    def read_power(self) -> PowerSample:
        """Watts now, and the energy counter where there is one: read at the moment it moves.

        A counter that moves ten times a second, read at any moment, is wrong by what a tenth of a second draws; over
        a few seconds that is percents. So this waits for it, a tenth of a second at most; the moment given is the
        counter's, which lies a few milliseconds back, or more where the machine is busy.
        """
        if self._read_mw is None:
            raise SensorError(
                f"{self.info.name} does not report its power ({self._why_not.get('power', 'no answer')}).",
                hint="Without a power reading no budget can be held on this device.",
            )
        try:
            at_s, energy_j = self._wait_for_counter() if self._has_counter else (self.clock.now_s(), None)
            power_w = self._read_mw() / 1000
        except self._nvml.NVMLError as exc:
            raise SensorError(f"{self.info.name} stopped reporting its power ({exc}).", hint=_LOST_REMEDY) from exc
        if not 0 < power_w < _PLAUSIBLE_W:
            raise SensorError(f"{self.info.name} reports {power_w:g} W, which cannot be.", hint=_LOST_REMEDY)
        return PowerSample(at_s, power_w, energy_j)

    def _wait_for_counter(self) -> tuple[float, float]:
        """When the counter has moved, and joules as of then; or as of now, where it does not move at all."""
        read, now_s = self._nvml.nvmlDeviceGetTotalEnergyConsumption, self.clock.now_s
        asked_s = now_s()
        until_s, latest_s = asked_s + _COUNTER_WAIT_S, asked_s + _COUNTER_LATE_S
        last_mj = read(self._handle)
        while True:
            self.clock.sleep(_COUNTER_LOOK_S)
            before_s, asked_s = asked_s, now_s()
            counted_mj, told_s = read(self._handle), now_s()
            moved_s = self._beat.moved_s(before_s, asked_s, told_s) if counted_mj != last_mj else None
            if moved_s is None and (counted_mj != last_mj or told_s - asked_s > _SURE_S):
                until_s = min(told_s + _COUNTER_WAIT_S, latest_s)  # nobody knows when it moved: the next move is seen
            if moved_s is not None or told_s >= until_s:
                return told_s if moved_s is None else moved_s, float(counted_mj) / 1000
            last_mj = counted_mj

    def read_state(self) -> DeviceState:
        """Clocks as they run, the limit in force, temperature, and why the card is slowed down."""
        nvml = self._nvml
        gpu_mhz = self._ask("running gpu_mhz", nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_SM)
        mem_mhz = self._ask("running mem_mhz", nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_MEM)
        limit_mw = self._ask("running power_limit_w", nvml.nvmlDeviceGetPowerManagementLimit)
        degrees_c = self._ask("temperature", nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU)
        bits = self._ask("throttling", nvml.nvmlDeviceGetCurrentClocksThrottleReasons) or 0
        flags = {text: getattr(nvml, f"nvmlClocksThrottleReason{name}", 0) for name, text in _THROTTLE_REASONS.items()}
        limit_w = limit_mw / 1000 if limit_mw else None
        return DeviceState(
            running=PowerMode(gpu_mhz=gpu_mhz or None, mem_mhz=mem_mhz or None, power_limit_w=limit_w),
            temperatures_c={} if degrees_c is None else {"gpu": float(degrees_c)},
            throttle_reasons=tuple(text for text, flag in flags.items() if bits & flag),
        )

    def apply(self, mode: PowerMode) -> None:
        """Set limit and locked clocks, and read back what can be read back.

        A knob that the driver turns out not to support is left alone from then on; a mode of nothing else is refused.
        """
        asked = self._listed.check(mode).knobs()
        for knob, (lock, _) in _CLOCK_KNOBS.items():
            if knob in asked:
                self._set(knob, getattr(self._nvml, lock), round(asked[knob]), round(asked[knob]))
        if mode.power_limit_w is not None:
            self._set_limit_mw(round(mode.power_limit_w * 1000))
        if asked and self._unsupported.issuperset(asked):
            why = "; ".join(f"{knob}: {self._why_not[knob]}" for knob in asked)
            raise ApplyError(
                f"{self.info.name} lists what it does not let anybody set ({why}).",
                hint="Set nothing with --no-modes: batch size and pauses alone then hold the budget.",
            )

    def snapshot(self, mode: PowerMode | None = None) -> dict[str, str]:
        """The power limit in force, and which clocks are about to be locked: NVML does not show an earlier lock."""
        names = [knob.name for knob in self.space.knobs if mode is None or knob.name in mode.knobs()]
        found = {knob: _UNLOCKED for knob in _CLOCK_KNOBS if knob in names}
        if "power_limit_w" in names:
            limit_mw = self._ask("power_limit_w", self._nvml.nvmlDeviceGetPowerManagementLimit)
            if limit_mw is not None:
                found["power_limit_mw"] = str(limit_mw)
        return found

    def restore(self, snapshot: Mapping[str, str]) -> None:
        """Unlock the clocks that were locked, and put the power limit back to what it was, default or not.

        One that is refused keeps none of the others as it is; it is raised when they are back.
        """
        with ExitStack() as last_first:
            if "power_limit_mw" in snapshot:
                last_first.callback(self._put_limit_back, int(snapshot["power_limit_mw"]))
            for knob, (_, reset) in _CLOCK_KNOBS.items():
                if snapshot.get(knob) == _UNLOCKED:
                    last_first.callback(self._set, knob, getattr(self._nvml, reset))

    def close(self) -> None:
        """Let go of the library."""
        self._try("shutdown", self._nvml.nvmlShutdown)

    def _put_limit_back(self, wanted_mw: int) -> None:
        if self._ask("power_limit_w", self._nvml.nvmlDeviceGetPowerManagementLimit) != wanted_mw:
            self._set_limit_mw(wanted_mw)

    def _set_limit_mw(self, limit_mw: int) -> None:
        if not self._set("power_limit_w", self._nvml.nvmlDeviceSetPowerManagementLimit, limit_mw):
            return
        found_mw = self._ask("power_limit_w", self._nvml.nvmlDeviceGetPowerManagementLimit)
        if found_mw is None or abs(found_mw - limit_mw) > 1000:
            found = "nothing" if found_mw is None else f"{found_mw / 1000:g} W"
            raise ApplyError(
                f"The power limit was set to {limit_mw / 1000:g} W and reads back {found}.", hint=_REFUSED_REMEDY
            )

    def _set(self, knob: str, call: Callable[..., Any], *arguments: Any) -> bool:
        """Set a knob, or let go of it; whether the driver supports that. What it does not support, it never set."""
        if knob in self._unsupported:
            return False
        try:
            call(self._handle, *arguments)
        except self._nvml.NVMLError as exc:
            if exc.value in (self._nvml.NVML_ERROR_NOT_SUPPORTED, self._nvml.NVML_ERROR_FUNCTION_NOT_FOUND):
                self._unsupported.add(knob)
                self._why_not[knob] = str(exc)
                return False
            what = f"{knob} of {self.info.name}"
            if exc.value == self._nvml.NVML_ERROR_NO_PERMISSION:
                raise NotPermittedError(f"{what} may not be set by this user.", hint=_SETTING_REMEDY) from exc
            raise ApplyError(f"{what} was refused ({exc}).", hint=_REFUSED_REMEDY) from exc
        return True


def _library(nvml: Any) -> Any:
    return nvml if nvml is not None else require("pynvml", extra="nvml")


def _open_handle(nvml: Any, where: str) -> Any:
    """A card by UUID or by number."""
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as exc:
        hint = "Install the NVIDIA driver, or check that the container sees it."
        raise NoDeviceError(f"NVML does not start ({exc}).", hint=hint) from exc
    try:
        if where.isdecimal():
            return nvml.nvmlDeviceGetHandleByIndex(int(where))
        return nvml.nvmlDeviceGetHandleByUUID(where)
    except nvml.NVMLError as exc:
        hint = "`underwatt devices` lists those that are here."
        raise NoDeviceError(f"NVML has no GPU {where!r} ({exc}).", hint=hint) from exc


def _answers(nvml: Any, handle: Any) -> bool:
    """Whether a card tells anything of what Underwatt reads or sets: Orin's NVML knows its name and nothing else."""
    for query in _TELLING:
        with suppress(nvml.NVMLError):
            getattr(nvml, query)(handle)
            return True
    return False


def _may_administer() -> bool:
    """Whether this process holds CAP_SYS_ADMIN, which NVML's setters need."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
        bits = next(line.split()[1] for line in status.splitlines() if line.startswith("CapEff:"))
        return bool(int(bits, 16) >> _CAP_SYS_ADMIN_BIT & 1)
    except (OSError, StopIteration, ValueError):
        return os.geteuid() == 0


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


class NvmlBackend:
    """Finds the GPUs that NVML lists and that tell something of their power or clocks."""

    name = "nvml"

    def __init__(self, nvml: Any = None) -> None:
        self._nvml = nvml

    def affinity(self) -> float:
        """Quite sure where NVML lists a card; a Jetson's own backend is surer."""
        return 0.8 if self.find() else 0.0

    def find(self) -> tuple[str, ...]:
        """UUIDs of the cards that answer."""
        try:
            nvml = _library(self._nvml)
        except UnderwattError:
            return ()
        uuids: list[str] = []
        with suppress(nvml.NVMLError):  # no driver here
            nvml.nvmlInit()
            for index in range(nvml.nvmlDeviceGetCount()):
                with suppress(nvml.NVMLError):  # one lost card hides no other
                    handle = nvml.nvmlDeviceGetHandleByIndex(index)
                    uuid = _text(nvml.nvmlDeviceGetUUID(handle))
                    uuids += [uuid] if _answers(nvml, handle) else []
        return tuple(uuids)

    def open(self, where: str) -> NvmlDevice:
        """Open a card by UUID or number; the first by default."""
        nvml, where = _library(self._nvml), where or "0"
        if not _answers(nvml, _open_handle(nvml, where)):
            raise DeviceError(
                f"NVML starts here but does not answer for GPU {where!r}.",
                hint="On a Jetson use --device jetson: its GPU is read and set through sysfs.",
            )
        return NvmlDevice(where, nvml=nvml)


backend = NvmlBackend()
