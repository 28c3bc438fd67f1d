"""One Jetson, by its kernel files: asked, read, set and put back, in numbers and texts.

The Jetson driver makes Underwatt's records of it; the service answers its clients with it. Whoever asks, a mode is
checked here against the values that the board itself has listed.
"""

import math
import os
import time
from typing import TYPE_CHECKING, NamedTuple

from . import FOLDER, GROUP, INSTALL, NAME, SOCKET
from .board_facts import (
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
from .errors import ApplyError, DeviceError, InputError, ModeError, NotPermittedError
from .knobs import (
    CAP_FILES,
    DEBUGFS,
    HZ_PER_MHZ,
    KHZ_PER_MHZ,
    KNOBS,
    MEMORY_UNTRIED_FROM,
    Cluster,
    Hardware,
    find_gpu,
    find_railgate,
)
from .sensors import PowerMonitor, ThermalZones
from .snapshot import Pinned, Restorer, take_snapshot
from .sysfs import Presence, Sysfs, Writes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from .board_facts import Board
    from .knobs import Tables

    Values = Mapping[str, tuple[float, ...]]

# Files keep Hz or kHz, tables decimals: two clocks closer than this are the same clock.
_SAME_MHZ = 0.06


class Identity(NamedTuple):
    """Who a board is."""

    name: str
    id: str
    address: str
    simulated: bool
    release: str
    power_of: str


class Ability(NamedTuple):
    """A knob or sensor, whether this user may use it, and what would permit it."""

    name: str
    kind: str
    usable: bool
    detail: str
    remedy: str = ""


class State(NamedTuple):
    """What runs now; what cannot be read is left out."""

    running: "dict[str, float]"
    rails_w: "dict[str, float]"
    temperatures_c: "dict[str, float]"
    throttle_reasons: "tuple[str, ...]"


class JetsonBoard:
    """Any Jetson, by the files of ``sysfs``: under ``/`` on the board itself, a directory in tests and simulations."""

    def __init__(self, sysfs: "Sysfs", now_s: "Callable[[], float]" = time.monotonic) -> None:
        self.sysfs = sysfs
        self._facts = detect_board(sysfs)
        self._seen = Hardware.find(sysfs, self._facts)
        self._monitor = PowerMonitor(sysfs, self._facts)
        self._thermal = ThermalZones(sysfs, now_s)
        self.conf, self._conf_error = _conf_or_error(sysfs)
        self.identity = self._identify()
        self._limits_seen: tuple[str, ...] | None = None
        self._values: Values = {}
        self._pinned = Pinned(sysfs)

    @property
    def _hardware(self) -> Hardware:
        """What can be set; a GPU that was not there is looked for again, as its node appears when it is first used."""
        if self._seen.gpu is None and not self._facts.read_only:
            gpu = find_gpu(self.sysfs)
            if gpu is not None:
                self._seen = self._seen._replace(gpu=gpu)
                self._limits_seen = None
        return self._seen

    def values(self) -> "Values":
        """What each knob may be set to, within the caps of the active nvpmodel mode; follows a mode switch."""
        hardware = self._hardware
        limits = tuple(self.sysfs.text_or_empty(path) for path in (STATUS_FILE, *CAP_FILES))
        if limits != self._limits_seen:
            self._values = allowed_values(hardware.tables(), self._caps())
            self._limits_seen = limits
        return self._values

    def stock_modes(self) -> "dict[str, dict[str, float]]":
        """The modes of nvpmodel.conf, each with every knob at its cap."""
        tables = self._hardware.tables(capped=False)
        modes = ((mode.name, allowed_values(tables, self.conf.caps(mode.id))) for mode in self.conf.modes.values())
        return {name: {knob: values[-1] for knob, values in allowed.items()} for name, allowed in modes}

    def abilities(self) -> "tuple[Ability, ...]":
        """Its knobs and sensors, which of them this user may use, and what would permit the others."""
        mode_id = self._mode_id()
        mode = self.conf.modes.get(mode_id) if mode_id is not None else None
        capped = f" (within nvpmodel mode {mode.id} {mode.name})" if mode and self._caps() != Caps() else ""
        knobs = [self._knob_ability(name, capped) for name in KNOBS]
        return (*knobs, *_sensor_abilities(self._monitor, self._thermal), self._nvpmodel_ability(mode_id))

    def power_w(self) -> float:
        """Total power now; raises ``SensorError`` rather than guess."""
        return self._monitor.total_w()

    def state(self, thermal: "ThermalZones | None" = None) -> State:
        """Clocks as they run, rails, temperatures, throttling since ``thermal`` was last asked."""
        cpu, gpu, emc, thermal = self._hardware.cpu, self._hardware.gpu, self._hardware.emc, thermal or self._thermal
        running = {
            "cpu_cores": cpu.running_cores() if cpu else None,
            "cpu_mhz": cpu.running_mhz() if cpu else None,
            "gpu_mhz": gpu.running_mhz() if gpu else None,
            "mem_mhz": emc.running_mhz() if emc else None,
        }
        known = {name: value for name, value in running.items() if value is not None}
        return State(known, self._monitor.rails_w(), thermal.temperatures_c(), thermal.throttle_reasons())

    def check(self, mode: "Mapping[str, float]") -> "dict[str, float]":
        """The mode in the table's spelling; raises ``ModeError`` for anything that the board has not listed."""
        values = self.values()
        try:
            return _exact(values, mode)
        except ModeError as exc:
            if not _allows(allowed_values(self._hardware.tables(), Caps()), mode):
                raise
            message = f"{exc.message} Nvpmodel mode {self._mode_id()}, which is active, caps it."
            raise ModeError(message, hint=self._how_to_lift(mode)) from exc

    def apply(self, mode: "Mapping[str, float]", before: "Mapping[str, str] | None" = None) -> None:
        """Set the knobs that ``mode`` names and check that they took; what fails midway is put back first.

        ``before``: a snapshot that was taken just now, where there is one.
        """
        exact = self.check(mode)
        self._require_writable(tuple(exact))
        before = before or self.snapshot()
        writes = Writes(self.sysfs)
        try:
            with self._pinned.changed_by(writes, self._mode_id()):
                self._hardware.write(writes, exact, self._caps())
        except DeviceError as exc:
            first = next(iter(writes.unsettled().values()), exc)  # a limit that did not take makes the next one refused
            kind = NotPermittedError if isinstance(first, NotPermittedError) else ApplyError
            raise kind(f"{first.message} {self._put_back(before)}", hint=first.hint) from exc

    def snapshot(self) -> "dict[str, str]":
        """The text of every file that ``apply`` could change, and the active nvpmodel mode.

        A limit that heat has lowered is kept as it was before: put back lowered, it would stay so.
        """
        hardware, caps = self._hardware, self._caps()
        found = take_snapshot(self.sysfs, hardware.files())
        for clock in hardware.ranges():
            cap = caps.cluster_khz(clock.cores) if isinstance(clock, Cluster) else caps.gpu_hz
            found.update({path: clock.before_heat(path, found[path], cap) for path in clock.files if path in found})
        return {**found, **(hardware.emc.held() if hardware.emc else {})}

    def restore(self, snapshot: "Mapping[str, str]") -> None:
        """Put back what ``snapshot`` found; may be repeated."""
        Restorer(self.sysfs, snapshot, self._pinned.paths).run()
        self._pinned.forget()

    def foreign_changes(self) -> "tuple[str, ...]":
        """What others have changed since it was set here, each said once; cheap enough for every few seconds."""
        return self._pinned.foreign_changes(self._mode_id())

    def _identify(self) -> Identity:
        root = self.sysfs.root
        identity = f"{self._facts.key}-{serial_number(self.sysfs) or 'no-serial'}"
        simulated = is_simulated(self.sysfs)
        return Identity(
            name=f"{self._facts.name} (simulated)" if simulated else self._facts.name,
            id=identity if root == "/" else f"{identity}@{root}",
            address=f"jetson:{root}",
            simulated=simulated,
            release=l4t_release(self.sysfs),
            power_of=f"module ({' + '.join(self._facts.total_rails)})" if self._facts.total_rails else "",
        )

    def _mode_id(self) -> "int | None":
        """The active nvpmodel mode; on a fresh board, which tells none, the default of its configuration."""
        told = active_id(self.sysfs)
        return self.conf.default_id if told is None else told

    def _caps(self) -> Caps:
        return self.conf.caps(self._mode_id())

    def _how_to_lift(self, mode: "Mapping[str, float]") -> str:
        """The nvpmodel mode that allows what was asked, one without a reboot if there is one."""
        now_id = self._mode_id()
        tables = self._hardware.tables(capped=False)
        able = [i for i in self._by_size() if _allows(allowed_values(tables, self.conf.caps(i)), mode)]
        if not able:
            return "No nvpmodel mode of this board allows it."
        best = min(able, key=lambda i: bool(self.conf.reboot_reasons(now_id, i)))
        reasons = self.conf.reboot_reasons(now_id, best)
        if not reasons:
            return f"Lift the cap with: sudo nvpmodel -m {best}"
        return (
            f"Switching nvpmodel from mode {now_id} to {best} changes {' and '.join(reasons)}, which needs a reboot. "
            f"Underwatt never reboots a board: run 'sudo nvpmodel -m {best}', reboot, and start again."
        )

    def _by_size(self) -> "list[int]":
        """The nvpmodel modes, the largest by its caps first: their numbers and names do not tell."""
        tables = self._hardware.tables(capped=False)
        sizes = {}
        for mode_id in sorted(self.conf.modes):
            highest = [values[-1] for values in allowed_values(tables, self.conf.caps(mode_id)).values()]
            sizes[mode_id] = math.exp(sum(map(math.log, highest)))
        return sorted(sizes, key=lambda mode_id: sizes[mode_id], reverse=True)

    def _put_back(self, before: "Mapping[str, str]") -> str:
        try:
            self.restore(before)
        except DeviceError as exc:
            return f"Putting back what was changed failed too: {exc.message}"
        return "What had been changed was put back."

    def _require_writable(self, knobs: "tuple[str, ...]") -> None:
        """Raise ``NotPermittedError`` unless every file that these knobs write may be read and written.

        One that is gone is an ``ApplyError``: no right would bring it back.
        """
        for knob in knobs:
            files = self._hardware.files_for(knob)
            gone = [path for path in files if self.sysfs.presence(path) is Presence.ABSENT]
            if gone:
                hint = "Its driver may have been unloaded; 'underwatt devices' shows what is there."
                raise ApplyError(f"Cannot set {knob}: {self.sysfs.full(gone[0])} is missing.", hint=hint)
            blocked = [path for path in files if not self.sysfs.settable(path)]
            if blocked:
                more = f" and {len(blocked) - 1} more" if len(blocked) > 1 else ""
                raise NotPermittedError(
                    f"This user may not set {knob}: {self.sysfs.full(blocked[0])}{more} cannot be written.",
                    hint=remedy(),
                )

    def _knob_ability(self, name: str, capped: str) -> Ability:
        """What can be done with a knob that a Jetson can have, also where this one lacks it."""
        values = self.values().get(name)
        if values is None:
            return Ability(name, "knob", False, *_why_missing(self.sysfs, self._facts, name))
        usable = all(self.sysfs.settable(path) for path in self._hardware.files_for(name))
        return Ability(name, "knob", usable, f"{_extent(name, values)}{capped}", "" if usable else remedy())

    def _nvpmodel_ability(self, mode_id: "int | None") -> Ability:
        if self._conf_error:
            return Ability("nvpmodel", "sensor", False, self._conf_error, "Repair /etc/nvpmodel.conf.")
        if mode_id is None:
            detail = "The active nvpmodel mode is not told; no caps are known."
            return Ability("nvpmodel", "sensor", False, detail, "Set one: sudo nvpmodel -m 0")
        mode = self.conf.modes.get(mode_id)
        known = mode.name if mode else "custom: its caps are not known"
        detail = f"mode {mode_id} ({known}) is active"
        largest = next(iter(self._by_size()), mode_id)
        if largest != mode_id:
            name = self.conf.modes[largest].name
            detail = f"{detail}; the largest is {largest} ({name}): sudo nvpmodel -m {largest}"
        return Ability("nvpmodel", "sensor", True, detail)


def remedy() -> str:
    """What permits a user to set knobs: a command that installs the helper or lets them use it, or where to look."""
    if os.path.exists(SOCKET) and not os.access(SOCKET, os.W_OK):
        return f'A helper is here; join its group and log in again: sudo usermod -aG {GROUP} "$USER".'
    if os.path.isdir(os.path.join("/", FOLDER)) and not os.path.exists(SOCKET):
        return f"The helper does not run: sudo systemctl restart {NAME}.socket. Or install it again: {INSTALL}."
    if os.path.exists(SOCKET):
        return f"A helper is here: use --device helper:. Where it does not answer, see: sudo journalctl -u {NAME}."
    return f"Install the helper, once: {INSTALL}. Or run with sudo. In a container, mount {os.path.dirname(SOCKET)}."


def allowed_values(tables: "Tables", caps: Caps) -> "dict[str, tuple[float, ...]]":
    """What the tables offer of each knob and the caps allow."""
    allowed: dict[str, tuple[float, ...]] = {}
    if tables.core_order:
        most = len(tables.allowed_cores(caps))
        allowed["cpu_cores"] = tuple(range(min(tables.fixed_cores, most) or 1, most + 1))
    for name, table, per_mhz, cap in (
        ("cpu_mhz", tables.cpu_khz, KHZ_PER_MHZ, caps.cluster_khz(tables.first_cluster)),
        ("gpu_mhz", tables.gpu_hz, HZ_PER_MHZ, caps.gpu_hz),
        ("mem_mhz", tables.emc_hz, HZ_PER_MHZ, caps.emc_hz),
    ):
        if table:
            # The vendor's files spell caps as they like, and the kernel takes the nearest clock.
            highest = table[-1] if cap is None else nearest(table, cap)
            allowed[name] = tuple(value / per_mhz for value in table if value <= highest)
    return allowed


def _exact(allowed: "Values", mode: "Mapping[str, float]") -> "dict[str, float]":
    exact: dict[str, float] = {}
    for name, value in mode.items():
        if name not in allowed:
            raise ModeError(f"This device has no knob {name}.", hint=f"Its knobs: {', '.join(allowed) or 'none'}.")
        closest = min(allowed[name], key=lambda entry: abs(entry - value))
        if not abs(closest - value) <= _SAME_MHZ:  # nor is what is no number
            raise ModeError(
                f"{name} = {value:g} is not allowed on this device; the nearest is {closest:g}.",
                hint=f"Allowed: {_extent(name, allowed[name])}.",
            )
        exact[name] = closest
    return exact


def _allows(allowed: "Values", mode: "Mapping[str, float]") -> bool:
    try:
        _exact(allowed, mode)
    except ModeError:
        return False
    return True


def _conf_or_error(sysfs: "Sysfs") -> "tuple[NvpConf, str]":
    """The modes of the board; a corrupt file costs the caps, not the device."""
    try:
        return parse_conf(sysfs.text_or_empty(CONF_FILE)), ""
    except InputError as exc:
        return NvpConf(), exc.message


def _sensor_abilities(monitor: "PowerMonitor", thermal: "ThermalZones") -> "tuple[Ability, ...]":
    """Power and temperature, tried by reading them."""
    try:
        monitor.total_w()
        rails = " + ".join(rail.name for rail in monitor.total_rails())
        power = Ability("power", "sensor", True, f"total of {rails}")
    except DeviceError as exc:
        power = Ability("power", "sensor", False, exc.message, exc.hint)
    zones = ", ".join(thermal.temperatures_c())
    if zones:
        return power, Ability("temperature", "sensor", True, zones)
    detail, remedy = "No thermal zone can be read.", "In a container, mount /sys."
    return power, Ability("temperature", "sensor", False, detail, remedy)


def _extent(name: str, values: "tuple[float, ...]") -> str:
    unit = "" if name == "cpu_cores" else " MHz"
    if len(values) == 1:
        return f"{values[0]:g}{unit}"
    return f"{values[0]:g} to {values[-1]:g}{unit}, {len(values)} values"


def _why_missing(sysfs: "Sysfs", facts: "Board", name: str) -> "tuple[str, str]":
    """Why a knob is not there, and what may bring it."""
    if facts.read_only:
        return facts.read_only, "Set its mode with nvpmodel; Underwatt measures what it draws."
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
            return "Only root may see the memory clocks of this board.", remedy()
        return "This board's memory clocks are not known or cannot be pinned.", "The other knobs still work."
    return "The kernel offers no such control here.", "In a container, mount /sys."
