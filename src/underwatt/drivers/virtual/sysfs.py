"""A virtual board as a sysfs-shaped directory: write a clock file, load the board, see its power files move.

The files are plain and unlocked, so that a driver in this process or another one uses them like a kernel's. Unlike a
kernel, nobody is called when a file is written: knobs are read when simulated time moves, or at ``sync()``.

First the shape: which files a board of each generation has, and what they hold when it starts. Then ``SysfsBoard``,
which gives them life. Paths are written out again instead of taken from the Jetson driver: a wrong one there must not
agree with itself here.
"""

from __future__ import annotations

import os
from bisect import bisect_left, bisect_right
from contextlib import suppress
from pathlib import Path
from posixpath import basename, dirname, relpath
from typing import TYPE_CHECKING

from underwatt.errors import InputError
from underwatt.records import PowerMode

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from underwatt.drivers.virtual.board_specs import BoardSpec
    from underwatt.drivers.virtual.simulated_board import VirtualBoard
    from underwatt.records import WorkloadCost

CPU = "sys/devices/system/cpu"
DEBUG = "sys/kernel/debug"
EMC_CAP = "sys/kernel/nvpmodel_emc_cap/emc_iso_cap"
BPMP_EMC = f"{DEBUG}/bpmp/debug/clk/emc"
OVERRIDE_EMC = f"{DEBUG}/clk/override.emc"
BANDWIDTH = f"{DEBUG}/tegra_bwmgr"
# The memory clock: the rate asked for, the lock that holds it when 1 (else the firmware chooses), the rate that runs.
EMC_FILES = {
    "bpmp": (f"{BPMP_EMC}/rate", f"{BPMP_EMC}/mrq_rate_locked", f"{BPMP_EMC}/rate"),
    "override": (f"{OVERRIDE_EMC}/clk_update_rate", f"{OVERRIDE_EMC}/clk_state", f"{OVERRIDE_EMC}/clk_rate"),
}
NVPMODEL_STATUS = "var/lib/nvpmodel/status"
NVPMODEL_CONF = "etc/nvpmodel.conf"
GPU_COOLING = "sys/class/thermal/cooling_device0"
ZONES = {"CPU-therm": "sys/class/thermal/thermal_zone0", "GPU-therm": "sys/class/thermal/thermal_zone1"}
_FIRST_HWMON = 3  # other sensors of the board come before
SYNC_PERIOD_S = 0.02  # simulated; far below what a sensor shows, far above what syncing each step would cost


def hz(mhz: float) -> int:
    """MHz as the GPU and memory files spell them."""
    return round(mhz * 1e6)


def khz(mhz: float) -> int:
    """MHz as the CPU files spell them."""
    return round(mhz * 1e3)


def gpu_node(spec: BoardSpec) -> str:
    """The devfreq folder of the GPU."""
    return f"sys/devices/{spec.sysfs.gpu_path}/devfreq/{basename(spec.sysfs.gpu_path)}"


def policy(cluster: tuple[int, ...]) -> str:
    """The cpufreq folder that the cores of a cluster share."""
    return f"{CPU}/cpufreq/policy{cluster[0]}"


def sleep_switch(core: int) -> str:
    """Forbids a core its deepest sleep when 1: ``jetson_clocks`` writes it for every core."""
    return f"{CPU}/cpu{core}/cpuidle/state1/disable"


def online_cores(spec: BoardSpec, knobs: Mapping[str, float]) -> list[int]:
    """The cores that a mode has on: cluster by cluster, so many as it asks for."""
    return [core for cluster in spec.sysfs.clusters for core in cluster][: int(knobs["cpu_cores"])]


def sensor_files(spec: BoardSpec, readings: dict[str, tuple[int, int]]) -> dict[str, str]:
    """The power sensor's files for millivolts and milliamperes of each rail."""
    files: dict[str, str] = {}
    rails = {(rail.chip, rail.channel): rail.name for rail in spec.rails}
    for number, chip in enumerate(dict.fromkeys(rail.chip for rail in spec.rails)):
        for channel in range(3):
            rail = rails.get((chip, channel), "NC")
            mv, ma = readings.get(rail, (0, 0))
            if spec.sysfs.generation == "jetpack4":
                folder = f"sys/bus/i2c/drivers/ina3221x/{chip}/iio:device{number}"
                files[f"{folder}/rail_name_{channel}"] = rail
                files[f"{folder}/in_voltage{channel}_input"] = str(mv)
                files[f"{folder}/in_current{channel}_input"] = str(ma)
                files[f"{folder}/in_power{channel}_input"] = str(round(mv * ma / 1e3))
            else:
                folder = f"sys/bus/i2c/drivers/ina3221/{chip}/hwmon/hwmon{_FIRST_HWMON + number}"
                files[f"{folder}/name"] = "ina3221"
                files[f"{folder}/update_interval"] = str(round(1e3 * spec.sensor.window_s))
                files[f"{folder}/in{channel + 1}_label"] = rail
                files[f"{folder}/in{channel + 1}_input"] = str(mv)
                files[f"{folder}/curr{channel + 1}_input"] = str(ma)
                # The driver's sum of shunt voltages: real boards list it, and a reader has to leave it out.
                files[f"{folder}/in7_label"] = "sum of shunt voltages"
                files[f"{folder}/in7_input"] = "0"
    return files


def readings(board: VirtualBoard) -> dict[str, str]:
    """What the board shows now, by path."""
    spec, knobs = board.spec, board.running.knobs()
    asked_at, runs_at = (spec.gpu_mhz.index(mhz) for mhz in (board.mode.knobs()["gpu_mhz"], knobs["gpu_mhz"]))
    millidegrees = str(500 * round(2 * board.temperature_c))  # in steps of half a degree, as these boards give it
    return {
        **sensor_files(spec, board.sensor.readings()),
        f"{gpu_node(spec)}/cur_freq": str(hz(knobs["gpu_mhz"])),
        **{f"{policy(cluster)}/scaling_cur_freq": str(khz(knobs["cpu_mhz"])) for cluster in spec.sysfs.clusters},
        EMC_FILES[spec.sysfs.emc][2]: str(hz(knobs["mem_mhz"])),
        **{f"{zone}/temp": millidegrees for zone in ZONES.values()},
        f"{GPU_COOLING}/cur_state": str(asked_at - runs_at),
    }


def first_files(spec: BoardSpec, stock_mode: str, *, cpuidle: bool = True) -> dict[str, str]:
    """The files of the board in a stock mode, by path, that are no readings."""
    knobs = spec.stock_mode(stock_mode).knobs()
    device, node = f"sys/devices/{spec.sysfs.gpu_path}", gpu_node(spec)
    files = {
        "proc/device-tree/model": f"{spec.sysfs.model}\0",
        "proc/device-tree/compatible": "".join(f"{name}\0" for name in (*spec.sysfs.compatible, "underwatt,virtual")),
        f"{device}/of_node/name": f"{spec.sysfs.gpu_path.rsplit('.', 1)[1]}\0",
        f"{device}/of_node/compatible": f"{spec.sysfs.gpu_compatible}\0",
        f"{device}/railgate_enable": "0",
        f"{node}/available_frequencies": " ".join(str(hz(mhz)) for mhz in spec.gpu_mhz),
        f"{node}/min_freq": str(hz(spec.gpu_mhz[0])),
        f"{node}/max_freq": str(hz(knobs["gpu_mhz"])),
        f"{GPU_COOLING}/type": "gpu-balanced",
        f"{GPU_COOLING}/max_state": str(len(spec.gpu_mhz) - 1),
        NVPMODEL_STATUS: f"pmode:{list(spec.stock_modes).index(stock_mode):04d}",
        NVPMODEL_CONF: nvpmodel_conf(spec),
        **_cpu_files(spec, knobs),
        **{sleep_switch(core): str(int(not cpuidle)) for core in range(spec.cpu_cores)},
        **_emc_files(spec, knobs),
    }
    for name, zone in ZONES.items():
        trip = str(round(1e3 * spec.thermal.throttle_c))
        files |= {f"{zone}/type": name, f"{zone}/trip_point_0_temp": trip, f"{zone}/trip_point_0_type": "passive"}
    return files


def links(spec: BoardSpec) -> dict[str, str]:
    """The links of the board: where they lie, and where they point to from there."""
    node = gpu_node(spec)
    wanted = {f"sys/class/devfreq/{basename(node)}": node, f"{node}/device": dirname(dirname(node))}
    for cluster in spec.sysfs.clusters:
        wanted |= {f"{CPU}/cpu{core}/cpufreq": policy(cluster) for core in cluster}
    return {path: relpath(target, dirname(path)) for path, target in wanted.items()}


def nvpmodel_conf(spec: BoardSpec) -> str:
    """A configuration of stock modes in nvpmodel's format, in our own words."""
    online = [f"CORE_{core} /{CPU}/cpu{core}/online" for core in range(spec.cpu_cores)]
    lines = ["# Written for a virtual board by Underwatt.", "< PARAM TYPE=FILE NAME=CPU_ONLINE >", *online]
    clusters = spec.sysfs.clusters
    for number, cluster in enumerate(clusters):
        folder = f"/{CPU}/cpu{cluster[0]}/cpufreq"
        lines += [f"< PARAM TYPE=CLOCK NAME=CPU_CLUSTER_{number} >", f"MAX_FREQ {folder}/scaling_max_freq"]
    lines += ["< PARAM TYPE=CLOCK NAME=GPU >", f"MAX_FREQ /{gpu_node(spec)}/max_freq"]
    lines += ["< PARAM TYPE=CLOCK NAME=EMC >", f"MAX_FREQ /{EMC_CAP}"]
    for number, (name, mode) in enumerate(spec.stock_modes.items()):
        knobs, on = mode.knobs(), online_cores(spec, mode.knobs())
        lines += [f"< POWER_MODEL ID={number} NAME={name} >"]
        lines += [f"CPU_ONLINE CORE_{core} {int(core in on)}" for core in range(spec.cpu_cores)]
        lines += [f"CPU_CLUSTER_{at} MAX_FREQ {khz(knobs['cpu_mhz'])}" for at in range(len(clusters))]
        lines += [f"GPU MAX_FREQ {hz(knobs['gpu_mhz'])}", f"EMC MAX_FREQ {_cap(spec, knobs['mem_mhz'])}"]
    return "\n".join([*lines, f"< PM_CONFIG DEFAULT={list(spec.stock_modes).index(spec.default_mode)} >"])


def _cap(spec: BoardSpec, mem_mhz: float) -> int:
    return 0 if mem_mhz >= spec.mem_mhz[-1] else hz(mem_mhz)


def _cpu_files(spec: BoardSpec, knobs: Mapping[str, float]) -> dict[str, str]:
    low, high = (str(khz(mhz)) for mhz in (spec.cpu_mhz[0], spec.cpu_mhz[-1]))
    online = online_cores(spec, knobs)
    files = {f"{CPU}/cpu{core}/online": str(int(core in online)) for core in range(spec.cpu_cores)}
    files |= {f"{CPU}/{name}": f"0-{spec.cpu_cores - 1}" for name in ("present", "possible")}
    for cluster in spec.sysfs.clusters:
        folder = policy(cluster)
        files |= {
            f"{folder}/scaling_available_frequencies": " ".join(str(khz(mhz)) for mhz in spec.cpu_mhz),
            f"{folder}/scaling_min_freq": low,
            f"{folder}/scaling_max_freq": str(khz(knobs["cpu_mhz"])),
            f"{folder}/cpuinfo_min_freq": low,
            f"{folder}/cpuinfo_max_freq": high,
            f"{folder}/scaling_governor": "schedutil",
            f"{folder}/related_cpus": " ".join(str(core) for core in cluster),
            f"{folder}/affected_cpus": " ".join(str(core) for core in cluster if core in online),
        }
    return files


def _emc_files(spec: BoardSpec, knobs: Mapping[str, float]) -> dict[str, str]:
    low, high = (str(hz(mhz)) for mhz in (spec.mem_mhz[0], spec.mem_mhz[-1]))
    rate, lock, _ = EMC_FILES[spec.sysfs.emc]
    files = {rate: str(hz(knobs["mem_mhz"])), lock: "0"}
    if spec.sysfs.emc == "override":
        return files | {f"{BANDWIDTH}/emc_min_rate": low, f"{BANDWIDTH}/emc_max_rate": high}
    cap = str(_cap(spec, knobs["mem_mhz"]))
    return files | {f"{BPMP_EMC}/min_rate": low, f"{BPMP_EMC}/max_rate": high, EMC_CAP: cap}


class SysfsBoard:
    """Keeps a directory and a virtual board in step: knob files go to the board, its readings to sensor files."""

    def __init__(self, board: VirtualBoard, directory: Path | str) -> None:
        self.board = board
        self.directory = Path(directory)
        self._root = str(directory)
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
        files = readings(board) | first_files(board.spec, stock_mode or board.spec.default_mode, cpuidle=board.cpuidle)
        for path, text in files.items():
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
        self._obey()
        self.board.run_step(cost, batch_size)

    def sync(self) -> None:
        """Read the knob files into the board and write what the board shows."""
        self._obey()
        self._synced_s = self.board.clock.now_s()
        for path, text in readings(self.board).items():
            if self._shown.get(path) != text:
                self._write(path, text)
                self._shown[path] = text

    def _moved(self, _seconds: float) -> None:
        if self.board.clock.now_s() - self._synced_s >= SYNC_PERIOD_S:
            self.sync()

    def _obey(self) -> None:
        """Set the board as its files ask; all cores' switches are written alike, so one is looked at."""
        self.board.set_mode(self._asked_for())
        self.board.cpuidle = self._number(sleep_switch(0), 0) == 0

    def _asked_for(self) -> PowerMode:
        """What the knob files ask for, rounded as the kernel rounds."""
        spec, online = self.board.spec, self._online()
        awake = [cluster for cluster in spec.sysfs.clusters if online & set(cluster)]
        # The physics know one CPU clock: that of the fastest cluster with a core on.
        cpu_mhz = max(self._range_mhz(policy(cluster), "scaling_", spec.cpu_mhz, khz) for cluster in awake)
        gpu_mhz = self._range_mhz(gpu_node(spec), "", spec.gpu_mhz, hz)
        return PowerMode(len(online), cpu_mhz, gpu_mhz, self._mem_mhz())

    def _online(self) -> frozenset[int]:
        on = {core for core in range(self.board.spec.cpu_cores) if self._number(f"{CPU}/cpu{core}/online", 1) != 0}
        if 0 not in on:
            self._write(f"{CPU}/cpu0/online", "1")  # the kernel refuses to take core 0 offline
        return frozenset(on | {0})

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
        rate_file, lock_file, running_file = EMC_FILES[spec.sysfs.emc]
        cap = (self._number(EMC_CAP, 0) if spec.sysfs.emc == "bpmp" else 0) or table[-1]
        highest_at = max(0, bisect_right(table, cap) - 1)
        locked = self._number(lock_file, 0) == 1
        rate = self._number(rate_file, table[-1])
        at = min(bisect_left(table, rate), highest_at) if locked else highest_at
        # Where one file both asks and tells, an unlocked rate shows what the firmware chose.
        if table[at] != rate and (locked or rate_file == running_file):
            self._write(rate_file, str(table[at]))
        return spec.mem_mhz[at]

    def _number(self, path: str, otherwise: int) -> int:
        with suppress(OSError, ValueError):  # half written, or nonsense: what was understood last still holds
            self._understood[path] = int(_read(f"{self._root}/{path}"))
        return self._understood.get(path, otherwise)

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


def _as_file(text: str) -> str:
    """Text as the kernel gives it: device-tree strings end in NUL, everything else in a newline."""
    return text if text.endswith("\0") else f"{text}\n"
