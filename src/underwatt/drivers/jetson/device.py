"""A Jetson as a device: asked, read, set and put back through its kernel files."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from underwatt.device.space import Knob, ModeSpace
from underwatt.device.timing import Clock, SystemClock
from underwatt.drivers.jetson.board_facts import (
    CONF_FILE,
    STATUS_FILE,
    Caps,
    NvpConf,
    active_id,
    detect_board,
    is_simulated,
    l4t_release,
    nearest,
    parse_conf,
    release_major,
    serial_number,
)
from underwatt.drivers.jetson.kernel_files import collect, held_by_others
from underwatt.drivers.jetson.knobs import (
    CAP_FILES,
    DEBUGFS,
    HZ_PER_MHZ,
    KHZ_PER_MHZ,
    MEMORY_UNTRIED_FROM,
    Cluster,
    Hardware,
    Tables,
    find_gpu,
    find_railgate,
)
from underwatt.drivers.jetson.sensors import PowerMonitor, ThermalZones
from underwatt.drivers.jetson.snapshot import Pinned, Restorer, take_snapshot
from underwatt.drivers.jetson.sysfs import Presence, Sysfs, Writes
from underwatt.errors import ApplyError, DeviceError, InputError, ModeError, NotPermittedError
from underwatt.records import Capability, DeviceInfo, DeviceState, PowerMode, PowerSample

if TYPE_CHECKING:
    from collections.abc import Mapping

    from underwatt.drivers.jetson.board_facts import Board

_UDEV = {
    "cpu_cores": 'SUBSYSTEM=="cpu", RUN+="/bin/sh -c \'chgrp underwatt /sys%p/online; chmod g+w /sys%p/online\'"',
    "cpu_mhz": 'SUBSYSTEM=="cpu", RUN+="/bin/sh -c \'cd /sys%p/cpufreq && chgrp underwatt scaling_m*_freq && '
    "chmod g+w scaling_m*_freq'\"",
    "gpu_mhz": 'SUBSYSTEM=="devfreq", RUN+="/bin/sh -c \'cd /sys%p && chgrp underwatt m??_freq && '
    "chmod g+w m??_freq'\"",
}


class JetsonDevice:
    """Any Jetson, by the files under ``root``: ``/`` on the board itself, a directory in tests and simulations."""

    def __init__(self, root: str | Path = "/", clock: Clock | None = None, sysfs: Sysfs | None = None) -> None:
        self._sysfs = sysfs or Sysfs(Path(root).absolute())
        self.clock: Clock = clock or SystemClock()
        self._board = detect_board(self._sysfs)
        self._seen = Hardware.find(self._sysfs, self._board)
        self._monitor = PowerMonitor(self._sysfs, self._board)
        self._thermal = ThermalZones(self._sysfs, self.clock)
        self._conf, self._conf_error = _conf_or_error(self._sysfs)
        self.info = self._identify()
        self._limits_seen: tuple[str, ...] | None = None
        self._tables = Tables()
        self._space = build_space(self._tables, Caps())
        self._pinned = Pinned(self._sysfs)

    @property
    def _hardware(self) -> Hardware:
        """What can be set; a GPU that was not there is looked for again, as its node appears when it is first used."""
        if self._seen.gpu is None and not self._board.read_only:
            gpu = find_gpu(self._sysfs)
            if gpu is not None:
                self._seen = replace(self._seen, gpu=gpu)
                self._limits_seen = None
        return self._seen

    @property
    def space(self) -> ModeSpace:
        """The knobs of this board, within the caps of its active nvpmodel mode; follows a mode switch."""
        hardware = self._hardware
        limits = tuple(self._sysfs.text_or_empty(path) for path in (STATUS_FILE, *CAP_FILES))
        if limits != self._limits_seen:
            self._tables = hardware.tables()
            self._space = build_space(self._tables, self._caps())
            self._limits_seen = limits
        return self._space

    def stock_modes(self) -> dict[str, PowerMode]:
        """The modes of nvpmodel.conf, each with every knob at its cap."""
        tables = self._hardware.tables(capped=False)
        return {mode.name: build_space(tables, self._conf.caps(mode.id)).highest for mode in self._conf.modes.values()}

    def capabilities(self) -> tuple[Capability, ...]:
        """Its knobs and sensors, which of them this user may use, and what would permit the others."""
        mode_id = self._mode_id()
        mode = self._conf.modes.get(mode_id) if mode_id is not None else None
        capped = f" (within nvpmodel mode {mode.id} {mode.name})" if mode and self._caps() != Caps() else ""
        knobs = (self._knob_capability(name, capped) for name in self._hardware.knobs)
        sensors = sensor_capabilities(self._monitor, self._thermal)
        return (*knobs, *sensors, self._nvpmodel_capability(mode_id))

    def read_power(self) -> PowerSample:
        """Total power now; raises ``SensorError`` rather than guess."""
        power_w = self._monitor.total_w()
        return PowerSample(self.clock.now_s(), power_w)

    def read_state(self) -> DeviceState:
        """Clocks as they run, rails, temperatures, throttling; what cannot be read is left out."""
        cpu, gpu, emc, thermal = self._hardware.cpu, self._hardware.gpu, self._hardware.emc, self._thermal
        running = PowerMode(
            cpu_cores=cpu.running_cores() if cpu else None,
            cpu_mhz=cpu.running_mhz() if cpu else None,
            gpu_mhz=gpu.running_mhz() if gpu else None,
            mem_mhz=emc.running_mhz() if emc else None,
        )
        return DeviceState(running, self._monitor.rails_w(), thermal.temperatures_c(), thermal.throttle_reasons())

    def apply(self, mode: PowerMode) -> None:
        """Set the knobs that ``mode`` names and check that they took; what fails midway is put back first."""
        exact = self._checked(mode)
        require_writable(self._sysfs, self._hardware, tuple(exact.knobs()))
        before = self.snapshot()
        writes = Writes(self._sysfs)
        try:
            with self._pinned.changed_by(writes, self._mode_id()):
                self._hardware.write(writes, exact.knobs(), self._caps())
        except DeviceError as exc:
            first = next(iter(writes.unsettled().values()), exc)  # a limit that did not take makes the next one refused
            kind = NotPermittedError if isinstance(first, NotPermittedError) else ApplyError
            raise kind(f"{first.message} {self._put_back(before)}", hint=first.hint) from exc

    def snapshot(self, mode: PowerMode | None = None) -> Mapping[str, str]:  # noqa: ARG002 - always all of it
        """The text of every file that ``apply`` could change, and the active nvpmodel mode.

        A limit that heat has lowered is kept as it was before: put back lowered, it would stay so.
        """
        hardware, caps = self._hardware, self._caps()
        found = take_snapshot(self._sysfs, hardware.files())
        for clock in hardware.ranges():
            cap = caps.cluster_khz(clock.cores) if isinstance(clock, Cluster) else caps.gpu_hz
            found.update({path: clock.before_heat(found[path], cap) for path in clock.files if path in found})
        return {**found, **(hardware.emc.held() if hardware.emc else {})}

    def restore(self, snapshot: Mapping[str, str]) -> None:
        """Put back what ``snapshot`` found; may be repeated."""
        Restorer(self._sysfs, snapshot, self._pinned.paths).run()
        self._pinned.forget()

    def foreign_changes(self) -> tuple[str, ...]:
        """What others have changed since it was set here, each said once; cheap enough for every few seconds."""
        return self._pinned.foreign_changes(self._mode_id())

    def kernel_files(self) -> dict[str, str]:
        """The files that tell what this board can do, and nothing of whose it is."""
        return collect(self._sysfs, self._conf)

    def held_by_others(self) -> tuple[str, ...]:
        """Clocks that are pinned, idle states that are off, the fan, and services that may change them."""
        return held_by_others(self._sysfs, self.kernel_files())

    def close(self) -> None:
        """Nothing is held open."""

    def _identify(self) -> DeviceInfo:
        root = self._sysfs.root
        identity = f"{self._board.key}-{serial_number(self._sysfs) or 'no-serial'}"
        simulated = is_simulated(self._sysfs)
        release = l4t_release(self._sysfs)
        return DeviceInfo(
            backend="jetson",
            name=f"{self._board.name} (simulated)" if simulated else self._board.name,
            id=identity if root == "/" else f"{identity}@{root}",
            address=f"jetson:{root}",
            simulated=simulated,
            software={"l4t": release} if release else {},
            power_of=f"module ({' + '.join(self._board.total_rails)})" if self._board.total_rails else "",
        )

    def _mode_id(self) -> int | None:
        """The active nvpmodel mode; on a fresh board, which tells none, the default of its configuration."""
        told = active_id(self._sysfs)
        return self._conf.default_id if told is None else told

    def _caps(self) -> Caps:
        return self._conf.caps(self._mode_id())

    def _checked(self, mode: PowerMode) -> PowerMode:
        """The mode in the table's spelling; where only the active nvpmodel mode forbids it, the error says so."""
        space = self.space
        try:
            return space.check(mode)
        except ModeError as exc:
            if mode not in build_space(self._tables, Caps()):
                raise
            raise ModeError(
                f"{exc.message} Nvpmodel mode {self._mode_id()}, which is active, caps it.",
                hint=self._how_to_lift(mode),
            ) from exc

    def _how_to_lift(self, mode: PowerMode) -> str:
        """The nvpmodel mode that allows what was asked, one without a reboot if there is one."""
        now_id = self._mode_id()
        tables = self._hardware.tables(capped=False)
        able = [i for i in self._by_size() if mode in build_space(tables, self._conf.caps(i))]
        if not able:
            return "No nvpmodel mode of this board allows it."
        best = min(able, key=lambda i: bool(self._conf.reboot_reasons(now_id, i)))
        reasons = self._conf.reboot_reasons(now_id, best)
        if not reasons:
            return f"Lift the cap with: sudo nvpmodel -m {best}"
        return (
            f"Switching nvpmodel from mode {now_id} to {best} changes {' and '.join(reasons)}, which needs a reboot. "
            f"Underwatt never reboots a board: run 'sudo nvpmodel -m {best}', reboot, and start again."
        )

    def _by_size(self) -> list[int]:
        """The nvpmodel modes, the largest by its caps first: their numbers and names do not tell."""
        tables = self._hardware.tables(capped=False)
        highest = {i: build_space(tables, self._conf.caps(i)).highest.knobs() for i in sorted(self._conf.modes)}
        return sorted(highest, key=lambda i: math.prod(highest[i].values()), reverse=True)

    def _put_back(self, before: Mapping[str, str]) -> str:
        try:
            self.restore(before)
        except DeviceError as exc:
            return f"Putting back what was changed failed too: {exc.message}"
        return "What had been changed was put back."

    def _knob_capability(self, name: str, capped: str) -> Capability:
        """What can be done with a knob that a Jetson can have, also where this one lacks it."""
        knob = self.space.knob(name)
        if knob is None:
            return Capability(name, "knob", False, *_why_missing(self._sysfs, self._board, name))
        blocked = blocked_files(self._sysfs, self._hardware.files_for(name))
        return Capability(name, "knob", not blocked, f"{_extent(knob)}{capped}", remedy_for(name) if blocked else "")

    def _nvpmodel_capability(self, mode_id: int | None) -> Capability:
        if self._conf_error:
            return Capability("nvpmodel", "sensor", False, self._conf_error, "Repair /etc/nvpmodel.conf.")
        if mode_id is None:
            detail = "The active nvpmodel mode is not told; no caps are known."
            return Capability("nvpmodel", "sensor", False, detail, "Set one: sudo nvpmodel -m 0")
        mode = self._conf.modes.get(mode_id)
        known = mode.name if mode else "custom: its caps are not known"
        detail = f"mode {mode_id} ({known}) is active"
        largest = next(iter(self._by_size()), mode_id)
        if largest != mode_id:
            name = self._conf.modes[largest].name
            detail = f"{detail}; the largest is {largest} ({name}): sudo nvpmodel -m {largest}"
        return Capability("nvpmodel", "sensor", True, detail)


def _conf_or_error(sysfs: Sysfs) -> tuple[NvpConf, str]:
    """The modes of the board; a corrupt file costs the caps, not the device."""
    try:
        return parse_conf(sysfs.text_or_empty(CONF_FILE)), ""
    except InputError as exc:
        return NvpConf(), exc.message


def build_space(tables: Tables, caps: Caps) -> ModeSpace:
    """The modes that the tables offer and the caps allow."""
    knobs: list[Knob] = []
    if tables.core_order:
        most = len(tables.allowed_cores(caps))
        knobs.append(Knob("cpu_cores", tuple(range(min(tables.fixed_cores, most) or 1, most + 1))))
    for name, table, per_mhz, cap in (
        ("cpu_mhz", tables.cpu_khz, KHZ_PER_MHZ, caps.cluster_khz(tables.first_cluster)),
        ("gpu_mhz", tables.gpu_hz, HZ_PER_MHZ, caps.gpu_hz),
        ("mem_mhz", tables.emc_hz, HZ_PER_MHZ, caps.emc_hz),
    ):
        if table:
            # The vendor's files spell caps as they like, and the kernel takes the nearest clock.
            allowed = [value for value in table if cap is None or value <= nearest(table, cap)]
            knobs.append(Knob(name, tuple(value / per_mhz for value in allowed)))
    return ModeSpace(knobs)


def blocked_files(sysfs: Sysfs, files: tuple[str, ...]) -> tuple[str, ...]:
    """The files that this user may not both read and write."""
    return tuple(path for path in files if not sysfs.settable(path))


def remedy_for(knob: str) -> str:
    """What permits setting a knob: sudo, or a rule for a group where the file lets itself be given one."""
    if knob == "mem_mhz":
        return "Run with sudo: the memory clock is set through debugfs, which only root may enter."
    return (
        "Run with sudo, or let a group named underwatt set it: put "
        f"{_UDEV[knob]} into /etc/udev/rules.d/99-underwatt.rules and reboot; in a container, mount /sys writable."
    )


def require_writable(sysfs: Sysfs, hardware: Hardware, knobs: tuple[str, ...]) -> None:
    """Raise ``NotPermittedError`` unless every file that these knobs write may be read and written.

    One that is gone is an ``ApplyError``: no right would bring it back.
    """
    for knob in knobs:
        files = hardware.files_for(knob)
        gone = [path for path in files if sysfs.presence(path) is Presence.ABSENT]
        if gone:
            hint = "Its driver may have been unloaded; 'underwatt devices' shows what is there."
            raise ApplyError(f"Cannot set {knob}: {sysfs.full(gone[0])} is missing.", hint=hint)
        blocked = blocked_files(sysfs, files)
        if blocked:
            more = f" and {len(blocked) - 1} more" if len(blocked) > 1 else ""
            raise NotPermittedError(
                f"This user may not set {knob}: {sysfs.full(blocked[0])}{more} cannot be written.",
                hint=remedy_for(knob),
            )


def sensor_capabilities(monitor: PowerMonitor, thermal: ThermalZones) -> tuple[Capability, ...]:
    """Power and temperature, tried by reading them."""
    try:
        monitor.total_w()
        rails = " + ".join(rail.name for rail in monitor.total_rails())
        power = Capability("power", "sensor", True, f"total of {rails}")
    except DeviceError as exc:
        power = Capability("power", "sensor", False, exc.message, exc.hint)
    if zones := ", ".join(thermal.temperatures_c()):
        return power, Capability("temperature", "sensor", True, zones)
    detail, remedy = "No thermal zone can be read.", "In a container, mount /sys."
    return power, Capability("temperature", "sensor", False, detail, remedy)


def _extent(knob: Knob) -> str:
    low, high, count = knob.values[0], knob.values[-1], len(knob.values)
    unit = "" if knob.name == "cpu_cores" else " MHz"
    return f"{low:g}{unit}" if count == 1 else f"{low:g} to {high:g}{unit}, {count} values"


def _why_missing(sysfs: Sysfs, board: Board, name: str) -> tuple[str, str]:
    """Why a knob is not there, and what may bring it."""
    if board.read_only:
        return board.read_only, "Set its mode with nvpmodel; Underwatt measures what it draws."
    if name == "gpu_mhz":
        gate = find_railgate(sysfs)
        wake = f", or: echo 0 | sudo tee {sysfs.full(gate)}" if gate else "."
        return (
            "No clock of a GPU shows; it may be powered down.",
            f"It shows once the GPU is used: start any CUDA program{wake}",
        )
    if name == "mem_mhz" and release_major(sysfs) >= MEMORY_UNTRIED_FROM:
        detail = "Nobody has tried to pin the memory clock of this release, whose own tool sets a floor instead."
        return detail, "The other knobs still work; tell us if you would try it."
    if name == "mem_mhz":
        clocks = sysfs.presence(f"{DEBUGFS}/clk")
        if clocks is Presence.ABSENT:
            return "debugfs is not mounted.", "Mount it: sudo mount -t debugfs none /sys/kernel/debug."
        if clocks is Presence.HIDDEN:
            return "Only root may see the memory clocks of this board.", remedy_for(name)
        return "This board's memory clocks are not known or cannot be pinned.", "The other knobs still work."
    return "The kernel offers no such control here.", "In a container, mount /sys."
