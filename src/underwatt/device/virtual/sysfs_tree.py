"""A virtual board as a sysfs-shaped directory: write a clock file, load the board, see its power files move.

The files are plain and unlocked, so that a driver in this process or another one uses them like a kernel's. Unlike a
kernel, nobody is called when a file is written: knobs are read when simulated time moves, or at ``sync()``.
"""

from __future__ import annotations

import os
from bisect import bisect_left, bisect_right
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from underwatt.device.virtual.sysfs_layout import (
    CPU,
    EMC_CAP,
    GPU_COOLING,
    ZONES,
    emc_files,
    first_files,
    gpu_node,
    hz,
    khz,
    links,
    policy,
    sensor_files,
)
from underwatt.errors import InputError
from underwatt.records import PowerMode

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from underwatt.device.virtual.board import VirtualBoard
    from underwatt.records import WorkloadCost

SYNC_PERIOD_S = 0.02  # simulated; far below what a sensor shows, far above what syncing each step would cost


class SysfsBoard:
    """Keeps a directory and a virtual board in step: knob files go to the board, its readings to sensor files."""

    def __init__(self, board: VirtualBoard, directory: Path | str) -> None:
        self.board = board
        self.directory = Path(directory)
        self._root = str(self.directory)
        self._shown: dict[str, str] = {}
        self._understood: dict[str, int] = {}
        self._synced_s = board.clock.now_s()
        self.sync()
        board.clock.on_move(self._moved)

    @classmethod
    def create(cls, board: VirtualBoard, directory: Path | str, *, stock_mode: str | None = None) -> SysfsBoard:
        """Write the files of a board in one of its stock modes (its default one) and bring them to life."""
        root = Path(directory)
        if (root / "sys").exists():
            raise InputError(f"There is a board in {root} already.", hint="Name an empty directory.")
        stock = board.spec.stock_mode(stock_mode or board.spec.default_mode)
        for path, text in first_files(board.spec, stock).items():
            file = root / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(_as_file(text), encoding="ascii")
        for path, target in links(board.spec).items():
            link = root / path
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(target)
        return cls(board, root)

    def run_step(self, cost: WorkloadCost, batch_size: int) -> None:
        """Train one step with the knobs as the files have them."""
        self._read_knobs()
        self.board.run_step(cost, batch_size)

    def sync(self) -> None:
        """Read the knob files into the board and write what the board shows."""
        self._read_knobs()
        self._show()

    def _read_knobs(self) -> None:
        self.board.set_mode(self._asked_for())

    def _show(self) -> None:
        self._synced_s = self.board.clock.now_s()
        for path, text in self._showing().items():
            if self._shown.get(path) != text:
                self._write(path, text)
                self._shown[path] = text

    def _moved(self, _seconds: float) -> None:
        if self.board.clock.now_s() - self._synced_s >= SYNC_PERIOD_S:
            self.sync()

    # Knobs: what the files ask for, rounded as the kernel rounds

    def _asked_for(self) -> PowerMode:
        online = self._online()
        return PowerMode(
            cpu_cores=len(online),
            cpu_mhz=self._cpu_mhz(online),
            gpu_mhz=self._range_mhz(gpu_node(self.board.spec), "", self.board.spec.gpu_mhz, hz),
            mem_mhz=self._mem_mhz(),
        )

    def _online(self) -> frozenset[int]:
        cores = range(self.board.spec.cpu_cores)
        on = {core for core in cores if self._number(f"{CPU}/cpu{core}/online", 1) != 0}
        if 0 not in on:
            self._write(f"{CPU}/cpu0/online", "1")  # the kernel refuses to take core 0 offline
        return frozenset(on | {0})

    def _cpu_mhz(self, online: frozenset[int]) -> float:
        """One clock for the physics: that of the fastest cluster with a core on."""
        spec = self.board.spec
        awake = [cluster for cluster in spec.sysfs.clusters if online & set(cluster)]
        return max(self._range_mhz(policy(cluster), "scaling_", spec.cpu_mhz, khz) for cluster in awake)

    def _range_mhz(self, folder: str, prefix: str, mhz: Sequence[float], unit: Callable[[float], int]) -> float:
        """The clock a range allows under load; limits off the table are moved inwards to it, in the file too."""
        table = [unit(value) for value in mhz]
        high_file, low_file = f"{folder}/{prefix}max_freq", f"{folder}/{prefix}min_freq"
        high, low = self._number(high_file, table[-1]), self._number(low_file, table[0])
        at = max(0, bisect_right(table, high) - 1)
        low_at = min(len(table) - 1, bisect_left(table, low))
        if table[at] != high:
            self._write(high_file, str(table[at]))
        if table[low_at] != low:
            self._write(low_file, str(table[low_at]))
        return mhz[at]

    def _mem_mhz(self) -> float:
        """The locked rate, rounded up to the table, or the highest that the cap allows."""
        spec = self.board.spec
        table = [hz(value) for value in spec.mem_mhz]
        names = emc_files(spec)
        cap = (self._number(EMC_CAP, 0) if spec.sysfs.emc == "bpmp" else 0) or table[-1]
        highest_at = max(0, bisect_right(table, cap) - 1)
        locked = self._number(names.lock, 0) == 1
        rate = self._number(names.rate, table[-1])
        at = min(bisect_left(table, rate), highest_at) if locked else highest_at
        # Where one file both asks and tells, an unlocked rate shows what the firmware chose.
        if table[at] != rate and (locked or names.rate == names.running):
            self._write(names.rate, str(table[at]))
        return spec.mem_mhz[at]

    def _number(self, path: str, otherwise: int) -> int:
        with suppress(OSError, ValueError):  # half written, or nonsense: what was understood last still holds
            self._understood[path] = int(_read(f"{self._root}/{path}"))
        return self._understood.get(path, otherwise)

    # Readings: what the board shows

    def _showing(self) -> dict[str, str]:
        board, spec = self.board, self.board.spec
        knobs = board.running.knobs()
        names = emc_files(spec)
        files = sensor_files(spec, board.sensor.readings())
        files[f"{gpu_node(spec)}/cur_freq"] = str(hz(knobs["gpu_mhz"]))
        files |= {f"{policy(cluster)}/scaling_cur_freq": str(khz(knobs["cpu_mhz"])) for cluster in spec.sysfs.clusters}
        files[names.running] = str(hz(knobs["mem_mhz"]))
        files |= {f"{zone}/temp": _millidegrees(board.temperature_c) for zone in ZONES.values()}
        asked_at, runs_at = (spec.gpu_mhz.index(mhz) for mhz in (board.mode.knobs()["gpu_mhz"], knobs["gpu_mhz"]))
        files[f"{GPU_COOLING}/cur_state"] = str(asked_at - runs_at)
        return files

    def _write(self, path: str, text: str) -> None:
        """Overwrite a file in place; one that was taken away stays away, as no kernel file comes back by itself."""
        with suppress(FileNotFoundError):
            _overwrite(f"{self._root}/{path}", _as_file(text).encode("ascii"))


def _overwrite(path: str, content: bytes) -> None:
    """Change a file without a moment at which a reader sees it empty or mixed with what it held before."""
    handle = os.open(path, os.O_WRONLY)
    try:
        left_over = os.fstat(handle).st_size - len(content)
        os.pwrite(handle, content + b"\n" * left_over, 0)
        if left_over > 0:
            os.ftruncate(handle, len(content))
    finally:
        os.close(handle)


def _read(path: str) -> bytes:
    # A step reads some twenty files: the bare system calls take a quarter of the time of pathlib.
    handle = os.open(path, os.O_RDONLY)
    try:
        return os.read(handle, 64)
    finally:
        os.close(handle)


def _millidegrees(temperature_c: float) -> str:
    """A temperature as these boards give it: in steps of half a degree."""
    return str(500 * round(2 * temperature_c))


def _as_file(text: str) -> str:
    """Text as the kernel gives it: device-tree strings end in NUL, everything else in a newline."""
    return text if text.endswith("\0") else f"{text}\n"
