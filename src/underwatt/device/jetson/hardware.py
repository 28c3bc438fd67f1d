"""The knobs that a Jetson has, and the space of power modes that they and the caps span."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from underwatt.device.jetson.cpu import KHZ_PER_MHZ, Cpu, cap_of, find_cpu, nearest_not_above
from underwatt.device.jetson.emc import Emc, find_emc
from underwatt.device.jetson.gpu import HZ_PER_MHZ, Gpu, find_gpu
from underwatt.device.space import Knob, ModeSpace
from underwatt.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Callable

    from underwatt.device.jetson.boards import Board
    from underwatt.device.jetson.nvpmodel import Caps
    from underwatt.device.jetson.sysfs import Sysfs
    from underwatt.records import PowerMode


@dataclass(frozen=True, slots=True)
class Tables:
    """The values that the hardware lists for each knob; an empty one is a knob that is not there."""

    core_order: tuple[int, ...] = ()
    fixed_cores: int = 0  # cores that cannot be switched off
    first_cluster: tuple[int, ...] = ()
    cpu_khz: tuple[int, ...] = ()
    gpu_hz: tuple[int, ...] = ()
    emc_hz: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Hardware:
    """What can be set on this board, found by reading only."""

    gpu: Gpu | None
    cpu: Cpu | None
    emc: Emc | None

    @classmethod
    def find(cls, sysfs: Sysfs, board: Board) -> Hardware:
        """Look for each knob; a read-only board has none."""
        if board.read_only:
            return cls(None, None, None)
        return cls(find_gpu(sysfs), find_cpu(sysfs), find_emc(sysfs, board))

    def tables(self, *, capped: bool = True) -> Tables:
        """Read the tables of all knobs; ``capped``: without the memory clocks that the active mode forbids."""
        clusters = self.cpu.clusters() if self.cpu else ()
        return Tables(
            core_order=self.cpu.order() if self.cpu and self.cpu.switchable else (),
            fixed_cores=len(self.cpu.cores) - len(self.cpu.switchable) if self.cpu else 0,
            first_cluster=clusters[0].cores if clusters else (),
            cpu_khz=_or_empty(clusters[0].table_khz) if clusters else (),
            gpu_hz=_or_empty(self.gpu.table_hz) if self.gpu else (),
            emc_hz=_or_empty(partial(self.emc.table_hz, capped=capped)) if self.emc else (),
        )

    def files(self) -> tuple[str, ...]:
        """Every file that setting a mode could change, as far as it shows now."""
        cpu = (*self.cpu.online_files, *self.clock_files()) if self.cpu else ()
        return (*cpu, *(self.gpu.files if self.gpu else ()), *(self.emc.files if self.emc else ()))

    def clock_files(self) -> tuple[str, ...]:
        """The files that set the CPU clocks, of the clusters that show now."""
        return tuple(file for cluster in self.cpu.clusters() for file in cluster.files) if self.cpu else ()

    def files_for(self, knob: str) -> tuple[str, ...]:
        """The files that one knob writes."""
        if knob == "cpu_cores" and self.cpu:
            return self.cpu.online_files
        if knob == "cpu_mhz":
            return self.clock_files()
        part = {"gpu_mhz": self.gpu, "mem_mhz": self.emc}.get(knob)
        return part.files if part else ()

    def write(self, mode: PowerMode, caps: Caps) -> None:
        """Write a mode that has been checked: cores on, clocks, cores off, so that no clock file is away."""
        tables = self.tables()
        if mode.cpu_cores is not None and self.cpu:
            for core in sorted(set(chosen_cores(tables, caps)[: mode.cpu_cores]) - self.cpu.online()):
                self.cpu.switch(core, on=True)
        if mode.cpu_mhz is not None and self.cpu:
            khz = _entry(tables.cpu_khz, mode.cpu_mhz * KHZ_PER_MHZ)
            for cluster in self.cpu.clusters():
                cap = _lower(cap_of(cluster, caps.cpu_khz), caps.all_cpu_khz)
                cluster.pin(nearest_not_above(cluster.table_khz(), khz, cap))
        if mode.gpu_mhz is not None and self.gpu:
            self.gpu.pin(_entry(tables.gpu_hz, mode.gpu_mhz * HZ_PER_MHZ))
        if mode.mem_mhz is not None and self.emc:
            self.emc.pin(_entry(tables.emc_hz, mode.mem_mhz * HZ_PER_MHZ))
        if mode.cpu_cores is not None and self.cpu:
            for core in sorted(self.cpu.online() - set(chosen_cores(tables, caps)[: mode.cpu_cores])):
                self.cpu.switch(core, on=False)


def build_space(tables: Tables, caps: Caps) -> ModeSpace:
    """The modes that the tables offer and the caps allow."""
    knobs: list[Knob] = []
    if tables.core_order:
        most = len(chosen_cores(tables, caps))
        knobs.append(Knob("cpu_cores", tuple(range(min(tables.fixed_cores, most) or 1, most + 1))))
    if tables.cpu_khz:
        named = (cap for core, cap in caps.cpu_khz.items() if core in tables.first_cluster)
        cap = _lower(min(named, default=None), caps.all_cpu_khz)
        knobs.append(_clock_knob("cpu_mhz", tables.cpu_khz, KHZ_PER_MHZ, cap))
    if tables.gpu_hz:
        knobs.append(_clock_knob("gpu_mhz", tables.gpu_hz, HZ_PER_MHZ, caps.gpu_hz))
    if tables.emc_hz:
        knobs.append(_clock_knob("mem_mhz", tables.emc_hz, HZ_PER_MHZ, caps.emc_hz))
    return ModeSpace(knobs)


def chosen_cores(tables: Tables, caps: Caps) -> tuple[int, ...]:
    """The cores that may be on, in the order in which they are used."""
    return tuple(core for core in tables.core_order if core not in caps.cores_off)


def _clock_knob(name: str, table: tuple[int, ...], per_mhz: int, cap: int | None) -> Knob:
    allowed = [value for value in table if cap is None or value <= cap] or table[:1]
    return Knob(name, tuple(value / per_mhz for value in allowed))


def _entry(table: tuple[int, ...], value: float) -> int:
    return min(table, key=lambda entry: abs(entry - value))


def _lower(one: int | None, other: int | None) -> int | None:
    return min((cap for cap in (one, other) if cap is not None), default=None)


def _or_empty(read: Callable[[], tuple[int, ...]]) -> tuple[int, ...]:
    """A table, or nothing where it cannot be read: the knob is then listed as missing, not guessed."""
    try:
        return tuple(value for value in read() if value > 0)
    except DeviceError:
        return ()
