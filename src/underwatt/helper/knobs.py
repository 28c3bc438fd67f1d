"""The knobs of a Jetson: CPU cores and clocks, the GPU clock, the memory clock; found by reading, set by writing files.

Nothing here knows devices or power modes: a mode comes in as numbers by knob name, what the hardware offers goes out as
``Tables``. Clocks are kept in the unit of their files, kHz for the CPU and Hz for the rest.
"""

import re
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from .board_facts import nearest, release_major
from .errors import DeviceError, ModeError
from .sysfs import PATIENCE_S, Presence, Wanted, Writes

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from .board_facts import Board, Caps
    from .sysfs import Sysfs

KHZ_PER_MHZ = 1_000
HZ_PER_MHZ = 1_000_000
KNOBS = ("cpu_cores", "cpu_mhz", "gpu_mhz", "mem_mhz")
CPU_FOLDER = "sys/devices/system/cpu"
DEBUGFS = "sys/kernel/debug"
CAP_FILES = ("sys/kernel/nvpmodel_emc_cap/emc_iso_cap", "sys/kernel/nvpmodel_clk_cap/emc")
COOLERS = "sys/class/thermal/cooling_device*"
# From this release on the vendor's own tool sets a floor instead of a fixed clock. Files do not tell the two apart, so
# that this is the one thing that a release number decides, until someone has tried it on a board.
MEMORY_UNTRIED_FROM = 38
_CHIPS = ("gm20b", "gp10b", "gv11b", "ga10b")
_KNOWN_NODES = ("57000000.gpu", "17000000.gp10b", "17000000.gv11b", "17000000.ga10b", "17000000.gpu", "gpu-gpc-0")
_KNOWN_PLACES = (
    "sys/class/devfreq/{node}",
    "sys/devices/{node}/devfreq/{node}",
    "sys/devices/gpu.0/devfreq/{node}",
    "sys/devices/platform/{node}/devfreq/{node}",
    "sys/devices/platform/bus@0/{node}/devfreq/{node}",
    "sys/devices/{node}/devfreq_dev",
    "sys/devices/platform/{node}/devfreq_dev",
    "sys/devices/platform/bus@0/{node}/devfreq_dev",
)
_RAILGATES = (
    "sys/devices/gpu.0/railgate_enable",
    "sys/devices/*.g*/railgate_enable",
    "sys/devices/platform/*.g*/railgate_enable",
    "sys/devices/platform/bus@0/*.g*/railgate_enable",
)
_ROUNDED_HZ = 60_000  # firmware may take a memory clock that differs by this much, which is the same one
_SAME_CLOCK = 0.005  # a bound this close to a table entry is that entry, spelled exactly


class ClockRange:
    """A clock that the kernel keeps between a minimum and a maximum, by the files of one folder."""

    prefix, per_mhz = "", HZ_PER_MHZ
    cooler = ""  # what the names of cooling devices that lower its maximum have in common

    def __init__(self, sysfs: "Sysfs", folder: str) -> None:
        self.sysfs, self.folder = sysfs, folder

    def file(self, name: str) -> str:
        """One of its files."""
        return f"{self.folder}/{self.prefix}{name}"

    @property
    def files(self) -> "tuple[str, str]":
        """What setting the clock changes."""
        return self.file("min_freq"), self.file("max_freq")

    def table(self) -> "tuple[int, ...]":
        """Every clock the hardware has, ascending, in the unit of its files."""
        return self.sysfs.read_ints(self.file("available_frequencies"))

    def pin(self, writes: Writes, clock: int) -> None:
        """Hold the clock at one value."""
        self.put(writes, f"{clock}\n", f"{clock}\n")

    def put(self, writes: Writes, low: str, high: str, *, always: bool = False) -> None:
        """Set both limits; one that heat holds down for now has been taken all the same."""
        ends = (Wanted(text, excuse=self._held_below) for text in (low, high))
        writes.put_range(self.files, *ends, always=always)

    def _held_below(self, found: int, wanted: int) -> bool:
        return found < wanted and found in self.heat_limits()

    def heat_limits(self) -> "frozenset[int]":
        """The maxima that cooling devices impose now: each takes as many entries from the top as its state says."""
        table = _or_empty(self.table)
        limits = set()
        for device in self.sysfs.glob(COOLERS) if table else ():
            state = self.sysfs.int_or_none(f"{device}/cur_state") or 0
            if state > 0 and self.cooler in self.sysfs.text_or_empty(f"{device}/type"):
                limits.add(table[max(0, len(table) - 1 - state)])
        return frozenset(limits)

    def before_heat(self, path: str, found: str, cap: "int | None") -> str:
        """A limit without what heat has taken from it: as high as the active mode allows, where it shows heat's own.

        A minimum that is the lowest clock of all is not heat's doing, however hot it is.
        """
        limits = self.heat_limits()
        if not limits or not found.strip().isdecimal() or int(found) not in limits:
            return found
        table = self.table()
        if path == self.files[0] and int(found) == table[0]:
            return found
        return f"{table[-1] if cap is None else nearest(table, cap)}\n"

    def running_mhz(self) -> "float | None":
        """The clock now, or ``None`` where it is not told, as while a GPU is powered down."""
        clock = self.sysfs.int_or_none(self.file("cur_freq"))
        return clock / self.per_mhz if clock and clock > 0 else None


class Gpu(ClockRange):
    """The GPU, by its devfreq node."""

    cooler = "devfreq"


class Cluster(ClockRange):
    """Cores that share one clock, reached through the folder of one of them that is on."""

    prefix, per_mhz, cooler = "scaling_", KHZ_PER_MHZ, "cpufreq"

    def __init__(self, sysfs: "Sysfs", folder: str, cores: "tuple[int, ...]" = ()) -> None:
        super().__init__(sysfs, folder)
        self.cores = cores

    def release(self, writes: Writes) -> None:
        """Let the clock range over all the hardware has: what the kernel starts a cluster with."""
        low, high = (self.sysfs.read(f"{self.folder}/cpuinfo_{end}_freq") for end in ("min", "max"))
        self.put(writes, low, high)


class Cpu(NamedTuple):
    """The cores of a board; asks the kernel each time, since folders come and go with their cores."""

    sysfs: "Sysfs"
    cores: "tuple[int, ...]"
    switchable: "frozenset[int]"

    @property
    def online_files(self) -> "tuple[str, ...]":
        """What switching cores changes."""
        return tuple(online_file(core) for core in self.cores if core in self.switchable)

    def online(self) -> "frozenset[int]":
        """The cores that are on now; a core that cannot be switched is on."""
        return frozenset(core for core in self.cores if core not in self.switchable or self._is_on(core))

    def _is_on(self, core: int) -> bool:
        return self.sysfs.read_word(online_file(core), patience_s=PATIENCE_S) == "1"

    def running_cores(self) -> "int | None":
        """How many cores are on, or ``None`` where it is not told."""
        try:
            return len(self.online())
        except DeviceError:
            return None

    def switch(self, writes: Writes, core: int, *, on: bool) -> None:
        """Turn one core on or off; core 0 runs the kernel's own work and stays on."""
        if core == 0 and not on:
            raise ModeError("Core 0 cannot be taken offline.", hint="Ask for at least one core.")
        writes.put(online_file(core), Wanted(f"{int(on)}\n"))
        writes.rights_late = writes.rights_late or on

    def awake_clusters(self) -> "tuple[Cluster, ...]":
        """The clusters with a core that is on: the files of the others may show, and cannot be written."""
        online = self.online()
        return tuple(cluster for cluster in self.clusters() if online & set(cluster.cores))

    def clusters(self) -> "tuple[Cluster, ...]":
        """The clusters that show a clock now, that of core 0 first; one with all cores off may show none."""
        found: list[Cluster] = []
        for core in self.cores:
            folder = f"{CPU_FOLDER}/cpu{core}/cpufreq"
            if not any(core in cluster.cores for cluster in found) and self.sysfs.exists(f"{folder}/scaling_max_freq"):
                related = re.findall(r"\d{1,4}", self.sysfs.text_or_empty(f"{folder}/related_cpus"))
                found.append(Cluster(self.sysfs, folder, tuple(sorted({core, *map(int, related)}))))
        return tuple(found)

    def order(self) -> "tuple[int, ...]":
        """The order in which cores are used: the cluster of core 0 first, then by number."""
        first = next((c.cores for c in self.clusters() if self.cores[0] in c.cores), self.cores[:1])
        return (*(core for core in self.cores if core in first), *(c for c in self.cores if c not in first))

    def running_mhz(self) -> "float | None":
        """The clock of core 0's cluster now, or ``None`` where it is not told."""
        khz = self.sysfs.int_or_none(f"{CPU_FOLDER}/cpu{self.cores[0]}/cpufreq/scaling_cur_freq")
        return khz / KHZ_PER_MHZ if khz and khz > 0 else None


def find_cpu(sysfs: "Sysfs") -> "Cpu | None":
    """The cores of this board, on or off."""
    names = (path.rsplit("/cpu", 1)[1] for path in sysfs.glob(f"{CPU_FOLDER}/cpu[0-9]*"))
    cores = tuple(sorted(int(name) for name in names if name.isdecimal()))
    if not cores:
        return None
    return Cpu(sysfs, cores, frozenset(core for core in cores if core and sysfs.exists(online_file(core))))


def online_file(core: int) -> str:
    """The file that says, and sets, whether a core is on."""
    return f"{CPU_FOLDER}/cpu{core}/online"


def find_gpu(sysfs: "Sysfs") -> "Gpu | None":
    """The devfreq node of the GPU: by what its device tree says it is, then in the places where boards keep it."""
    of_nodes = sysfs.glob("sys/class/devfreq/*/device/of_node")
    named = [of_node[: -len("/device/of_node")] for of_node in of_nodes if _is_gpu(sysfs, of_node)]
    known = [place.format(node=name) for place in _KNOWN_PLACES for name in _KNOWN_NODES]
    there = (node for node in (*named, *known) if sysfs.exists(f"{node}/available_frequencies"))
    return next((Gpu(sysfs, node) for node in there), None)


def find_railgate(sysfs: "Sysfs") -> "str | None":
    """The file that wakes a GPU which is powered down, or ``None`` where there is none."""
    return next((path for pattern in _RAILGATES for path in sysfs.glob(pattern)), None)


def _is_gpu(sysfs: "Sysfs", of_node: str) -> bool:
    texts = (sysfs.text_or_empty(f"{of_node}/{file}") for file in ("name", "compatible"))
    words = (word for text in texts for word in text.strip("\0\n").split("\0"))
    return any(word == "gpu" or word.endswith(_CHIPS) for word in words)


class EmcNode(NamedTuple):
    """Where one generation keeps the memory clock: ``lock`` at 1 holds ``rate``."""

    rate: str
    lock: str
    low: str
    high: str
    running: str

    def wanted_rate(self, text: str) -> Wanted:
        """A rate as it is to be read back: from its own file, or from the one that tells the clock that runs."""
        return Wanted(text, _ROUNDED_HZ, "" if self.running == self.rate else self.running)


def tells_rate(text: str) -> bool:
    """Whether the text of a rate's file is a rate; that of ``override.emc`` gives back whether it is enabled."""
    return text.strip() not in ("", "0", "1")


_BPMP, _CLK, _BWM = f"{DEBUGFS}/bpmp/debug/clk/emc", f"{DEBUGFS}/clk/override.emc", f"{DEBUGFS}/tegra_bwmgr"
BPMP = EmcNode(f"{_BPMP}/rate", f"{_BPMP}/mrq_rate_locked", f"{_BPMP}/min_rate", f"{_BPMP}/max_rate", f"{_BPMP}/rate")
OVERRIDE = EmcNode(
    f"{_CLK}/clk_update_rate", f"{_CLK}/clk_state", f"{_BWM}/emc_min_rate", f"{_BWM}/emc_max_rate", f"{_CLK}/clk_rate"
)


class Emc(NamedTuple):
    """A memory clock that can be pinned by those who may enter debugfs."""

    sysfs: "Sysfs"
    node: "EmcNode"
    known_mhz: "tuple[float, ...]"

    @property
    def files(self) -> "tuple[str, str]":
        """What pinning the clock changes."""
        return self.node.rate, self.node.lock

    def table(self, *, capped: bool = True) -> "tuple[int, ...]":
        """The known clocks within the board's bounds and, where wanted, the cap that stands, ascending."""
        low, high = (self.sysfs.int_or_none(path) for path in (self.node.low, self.node.high))
        caps = [self.sysfs.int_or_none(path) for path in CAP_FILES] if capped else []
        return within_bounds(self.known_mhz, low, high, next((cap for cap in caps if cap), None))

    def pin(self, writes: Writes, hz: int) -> None:
        """Hold the clock at one value: locked first, or the firmware would move it again.

        A lock may count how often it was set, so that it is set only where it is not.
        """
        if self.sysfs.read_word(self.node.lock, patience_s=PATIENCE_S) != "1":
            writes.put(self.node.lock, Wanted("1\n"))
        writes.put(self.node.rate, self.node.wanted_rate(f"{hz}\n"))

    def held(self) -> "dict[str, str]":
        """What a snapshot needs beyond ``files``: the rate that another holds, where the rate's file does not tell."""
        lock, rate = (self.sysfs.text_or_empty(path) for path in (self.node.lock, self.node.rate))
        if lock.strip() == "1" and not tells_rate(rate):
            return {self.node.running: self.sysfs.text_or_empty(self.node.running)}
        return {}

    def running_mhz(self) -> "float | None":
        """The clock now, or ``None`` where this user may not know."""
        hz = self.sysfs.int_or_none(self.node.running) or self.sysfs.int_or_none(self.node.rate)
        return hz / HZ_PER_MHZ if hz and hz > 0 else None


def find_emc(sysfs: "Sysfs", board: "Board") -> "Emc | None":
    """The memory clock of this board; kept where debugfs merely hides it, ``None`` where it is not there."""
    if release_major(sysfs) >= MEMORY_UNTRIED_FROM:
        return None
    node = OVERRIDE if board.emc_override else BPMP
    return None if sysfs.presence(node.rate) is Presence.ABSENT else Emc(sysfs, node, board.emc_mhz)


def within_bounds(
    known_mhz: "tuple[float, ...]", low: "int | None", high: "int | None", cap: "int | None"
) -> "tuple[int, ...]":
    """The known clocks between the bounds, the upper bound always among them, no entry above the cap.

    Of a board whose clocks are not known, the two bounds.
    """
    table = {round(mhz * HZ_PER_MHZ) for mhz in known_mhz}
    if high:
        table = {hz for hz in table if hz < high * (1 - _SAME_CLOCK)} | {high}
    if low:
        table = {hz for hz in table if hz >= low} | ({low} if not known_mhz else set())
    return tuple(sorted(hz for hz in table if not cap or hz <= cap)) or tuple(sorted(table))[:1]


class Tables(NamedTuple):
    """The values that the hardware lists for each knob; an empty one is a knob that is not there."""

    core_order: "tuple[int, ...]" = ()
    fixed_cores: int = 0  # cores that cannot be switched off
    first_cluster: "tuple[int, ...]" = ()
    cpu_khz: "tuple[int, ...]" = ()
    gpu_hz: "tuple[int, ...]" = ()
    emc_hz: "tuple[int, ...]" = ()

    def allowed_cores(self, caps: "Caps") -> "tuple[int, ...]":
        """The cores that may be on, in the order in which they are used."""
        return tuple(core for core in self.core_order if core not in caps.cores_off)


class Hardware(NamedTuple):
    """What can be set on this board, found by reading only."""

    gpu: "Gpu | None"
    cpu: "Cpu | None"
    emc: "Emc | None"

    @classmethod
    def find(cls, sysfs: "Sysfs", board: "Board") -> "Hardware":
        """Look for each knob; a read-only board has none."""
        if board.read_only:
            return cls(None, None, None)
        return cls(find_gpu(sysfs), find_cpu(sysfs), find_emc(sysfs, board))

    def tables(self, *, capped: bool = True) -> "Tables":
        """Read the tables of all knobs; ``capped``: without the memory clocks that the active mode forbids."""
        clusters = self.cpu.clusters() if self.cpu else ()
        return Tables(
            core_order=self.cpu.order() if self.cpu and self.cpu.switchable else (),
            fixed_cores=len(self.cpu.cores) - len(self.cpu.switchable) if self.cpu else 0,
            first_cluster=clusters[0].cores if clusters else (),
            cpu_khz=_or_empty(clusters[0].table) if clusters else (),
            gpu_hz=_or_empty(self.gpu.table) if self.gpu else (),
            emc_hz=_or_empty(partial(self.emc.table, capped=capped)) if self.emc else (),
        )

    def ranges(self) -> "tuple[ClockRange, ...]":
        """The clocks that have a minimum and a maximum, as far as they show now."""
        return (*(self.cpu.clusters() if self.cpu else ()), *((self.gpu,) if self.gpu else ()))

    def files(self) -> "tuple[str, ...]":
        """Every file that setting a mode could change, as far as it shows now."""
        return tuple(file for knob in KNOBS for file in self.files_for(knob))

    def files_for(self, knob: str) -> "tuple[str, ...]":
        """The files that one knob writes; of CPU clocks, those of the clusters that show now."""
        if knob == "cpu_cores" and self.cpu:
            return self.cpu.online_files
        if knob == "cpu_mhz" and self.cpu:
            return tuple(file for cluster in self.cpu.clusters() for file in cluster.files)
        part = {"gpu_mhz": self.gpu, "mem_mhz": self.emc}.get(knob)
        return part.files if part else ()

    def write(self, writes: Writes, mode: "Mapping[str, float]", caps: "Caps") -> None:
        """Write a mode that has been checked: cores on, clocks, cores off, so that no clock file is away.

        Limits are waited for before cores go off: those of a cluster that is off arrive when it is on again.
        """
        tables = self.tables()
        wanted = set(tables.allowed_cores(caps)[: int(mode.get("cpu_cores", 0))])
        if "cpu_cores" in mode and self.cpu:
            for core in sorted(wanted - self.cpu.online()):
                self.cpu.switch(writes, core, on=True)
            writes.settle()
        if "cpu_mhz" in mode and self.cpu:
            khz = nearest(tables.cpu_khz, mode["cpu_mhz"] * KHZ_PER_MHZ)
            for cluster in self.cpu.awake_clusters():
                cluster.pin(writes, nearest_not_above(cluster.table(), khz, caps.cluster_khz(cluster.cores)))
        if "gpu_mhz" in mode and self.gpu:
            self.gpu.pin(writes, nearest(tables.gpu_hz, mode["gpu_mhz"] * HZ_PER_MHZ))
        if "mem_mhz" in mode and self.emc:
            self.emc.pin(writes, nearest(tables.emc_hz, mode["mem_mhz"] * HZ_PER_MHZ))
        writes.settle()
        if "cpu_cores" in mode and self.cpu:
            for core in sorted(self.cpu.online() - wanted):
                self.cpu.switch(writes, core, on=False)
            writes.settle()


def nearest_not_above(table: "Collection[int]", value: int, cap: "int | None" = None) -> int:
    """The largest entry that is not above ``value`` nor the entry that ``cap`` means, or the smallest there is."""
    ceiling = value if cap is None else min(value, nearest(table, cap))
    return max((entry for entry in table if entry <= ceiling), default=min(table))


def _or_empty(read: "Callable[[], tuple[int, ...]]") -> "tuple[int, ...]":
    """A table, or nothing where it cannot be read: the knob is then listed as missing, not guessed."""
    try:
        return tuple(value for value in read() if value > 0)
    except DeviceError:
        return ()
