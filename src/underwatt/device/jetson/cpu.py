"""CPU cores and clocks of a Jetson: which cores are on, and the clock range of each cluster that shares one."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from underwatt.device.jetson.sysfs import write_range
from underwatt.errors import DeviceError, ModeError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from underwatt.device.jetson.sysfs import Sysfs

CPU_FOLDER = "sys/devices/system/cpu"
KHZ_PER_MHZ = 1_000


@dataclass(frozen=True, slots=True)
class Cluster:
    """Cores that share one clock, reached through the folder of one of them that is on."""

    sysfs: Sysfs
    cores: tuple[int, ...]
    folder: str

    @property
    def files(self) -> tuple[str, str]:
        """What setting the clock changes."""
        return f"{self.folder}/scaling_min_freq", f"{self.folder}/scaling_max_freq"

    def table_khz(self) -> tuple[int, ...]:
        """Every clock the hardware has, ascending."""
        return self.sysfs.read_ints(f"{self.folder}/scaling_available_frequencies")

    def pin(self, khz: int) -> None:
        """Hold the clock at one value."""
        write_range(self.sysfs, self.files, f"{khz}\n", f"{khz}\n")

    def release(self) -> None:
        """Let the clock range over all the hardware has: what the kernel starts a cluster with."""
        low, high = (self.sysfs.read(f"{self.folder}/cpuinfo_{end}_freq") for end in ("min", "max"))
        write_range(self.sysfs, self.files, low, high)


@dataclass(frozen=True, slots=True)
class Cpu:
    """The cores of a board; asks the kernel each time, since folders come and go with their cores."""

    sysfs: Sysfs
    cores: tuple[int, ...]
    switchable: frozenset[int]

    @property
    def online_files(self) -> tuple[str, ...]:
        """What switching cores changes."""
        return tuple(online_file(core) for core in self.cores if core in self.switchable)

    def online(self) -> frozenset[int]:
        """The cores that are on now; a core that cannot be switched is on."""
        return frozenset(
            core for core in self.cores if core not in self.switchable or self.sysfs.read_word(online_file(core)) == "1"
        )

    def running_cores(self) -> int | None:
        """How many cores are on, or ``None`` where it is not told."""
        try:
            return len(self.online())
        except DeviceError:
            return None

    def switch(self, core: int, *, on: bool) -> None:
        """Turn one core on or off; core 0 runs the kernel's own work and stays on."""
        if core == 0 and not on:
            raise ModeError("Core 0 cannot be taken offline.", hint="Ask for at least one core.")
        self.sysfs.write_checked(online_file(core), f"{int(on)}\n")

    def clusters(self) -> tuple[Cluster, ...]:
        """The clusters that show a clock now, that of core 0 first; one with all cores off may show none."""
        found: list[Cluster] = []
        for core in self.cores:
            folder = f"{CPU_FOLDER}/cpu{core}/cpufreq"
            if not any(core in cluster.cores for cluster in found) and self.sysfs.exists(f"{folder}/scaling_max_freq"):
                found.append(Cluster(self.sysfs, _related(self.sysfs, folder, core), folder))
        return tuple(found)

    def order(self) -> tuple[int, ...]:
        """The order in which cores are used: the cluster of core 0 first, then by number."""
        first = next((c.cores for c in self.clusters() if self.cores[0] in c.cores), self.cores[:1])
        return (*(core for core in self.cores if core in first), *(c for c in self.cores if c not in first))

    def running_mhz(self) -> float | None:
        """The clock of core 0's cluster now, or ``None`` where it is not told."""
        folder = f"{CPU_FOLDER}/cpu{self.cores[0]}/cpufreq"
        try:
            return self.sysfs.read_int(f"{folder}/scaling_cur_freq") / KHZ_PER_MHZ or None
        except DeviceError:
            return None


def find_cpu(sysfs: Sysfs) -> Cpu | None:
    """The cores of this board, on or off."""
    names = (path.rsplit("/cpu", 1)[1] for path in sysfs.glob(f"{CPU_FOLDER}/cpu[0-9]*"))
    cores = tuple(sorted(int(name) for name in names if name.isdecimal()))
    if not cores:
        return None
    return Cpu(sysfs, cores, frozenset(core for core in cores if core and sysfs.exists(online_file(core))))


def online_file(core: int) -> str:
    """The file that says, and sets, whether a core is on."""
    return f"{CPU_FOLDER}/cpu{core}/online"


def nearest_not_above(table: Iterable[int], value: int, cap: int | None = None) -> int:
    """The largest entry that is not above ``value`` nor ``cap``, or the smallest there is."""
    ordered = sorted(table)
    ceiling = value if cap is None else min(value, cap)
    return max((entry for entry in ordered if entry <= ceiling), default=ordered[0])


def cap_of(cluster: Cluster, caps_khz: Mapping[int, int]) -> int | None:
    """The lowest cap that names one of a cluster's cores."""
    return min((cap for core, cap in caps_khz.items() if core in cluster.cores), default=None)


def _related(sysfs: Sysfs, folder: str, core: int) -> tuple[int, ...]:
    try:
        cores = {int(word) for word in re.findall(r"\d{1,4}", sysfs.read(f"{folder}/related_cpus"))}
    except DeviceError:
        cores = set()
    return tuple(sorted(cores | {core}))
