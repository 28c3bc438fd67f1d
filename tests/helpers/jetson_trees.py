"""Small trees of kernel files, one for each Jetson generation, in our own words; and a kernel with its manners.

``plant`` writes a tree as plain files. ``KernelSysfs`` behaves on it as a kernel does: bounds that cross are refused,
clocks off the table are rounded, a core that goes off takes its cpufreq folder with it, and a memory clock that is
not locked belongs to the firmware.
"""

from __future__ import annotations

import errno
import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from underwatt.helper.sysfs import Sysfs

CPU = "sys/devices/system/cpu"
BPMP = "sys/kernel/debug/bpmp/debug/clk/emc"
OVERRIDE = "sys/kernel/debug/clk/override.emc"
NANO_GPU_HZ = tuple(round(76_800_000 * step) for step in range(1, 13))
ORIN_GPU_HZ = (*range(114_750_000, 1_300_000_000, 102_000_000), 1_300_500_000)
XAVIER_GPU_HZ = (114_750_000, 216_750_000, 318_750_000, 675_750_000, 1_032_750_000, 1_377_000_000)


@dataclass(frozen=True)
class Sensor:
    """One power chip: ``kind`` ina3221x (JetPack 4), ina3221 (5 and later) or ina238 (Thor)."""

    kind: str
    bus: str
    number: int
    rails: tuple[tuple[str, int, int], ...]  # name, mV, mA


@dataclass(frozen=True)
class Tree:
    model: str
    compatible: tuple[str, ...]
    sensors: tuple[Sensor, ...]
    clusters: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]  # cores, kHz
    gpu_hz: tuple[int, ...]
    gpu_name: str  # in the devfreq class
    gpu_of_node: tuple[str, str] | None  # name and compatible, or none at all
    emc: str  # the folder of the pinned clock, or "" for none
    emc_bounds: tuple[int, int]
    conf: str = ""
    status: str = ""
    release: str = "# R35 (release), REVISION: 4.1, GCID: 0, BOARD: any, EABI: aarch64"
    total_w: float = 0.0
    extra: dict[str, str] = field(default_factory=dict)

    @property
    def cores(self) -> tuple[int, ...]:
        return tuple(sorted(core for cores, _ in self.clusters for core in cores))

    @property
    def gpu(self) -> str:
        return f"sys/class/devfreq/{self.gpu_name}"

    @property
    def emc_files(self) -> tuple[str, str]:
        return emc_files(self.emc)


def emc_files(folder: str) -> tuple[str, str]:
    names = ("clk_update_rate", "clk_state") if folder == OVERRIDE else ("rate", "mrq_rate_locked")
    return f"{folder}/{names[0]}", f"{folder}/{names[1]}"


def conf(clusters: dict[str, int], modes: str, *, default: int = 0) -> str:
    """A configuration in nvpmodel's grammar: ``clusters`` maps a parameter to the first core of its cluster."""
    lines = ["# our own file, in nvpmodel's grammar", "< PARAM TYPE=FILE NAME=CPU_ONLINE >"]
    lines += [f"CORE_{core} /{CPU}/cpu{core}/online" for core in range(12)]
    for name, core in clusters.items():
        lines += [f"< PARAM TYPE=CLOCK NAME={name} >", f"MAX_FREQ /{CPU}/cpu{core}/cpufreq/scaling_max_freq"]
    lines += ["< PARAM TYPE=CLOCK NAME=GPU >", "MAX_FREQ /sys/devices/gpu/max_freq"]
    return "\n".join([*lines, modes.strip(), f"< PM_CONFIG DEFAULT={default} >", ""])


def _khz(first: int, step: int, count: int) -> tuple[int, ...]:
    return tuple(first + step * index for index in range(count))


NANO = Tree(
    model="NVIDIA Jetson Nano Developer Kit",
    compatible=("nvidia,p3450-0000", "nvidia,jetson-nano", "nvidia,tegra210"),
    sensors=(
        Sensor(
            "ina3221x", "6-0040", 0, (("POM_5V_IN", 5000, 700), ("POM_5V_GPU", 5000, 90), ("POM_5V_CPU", 5000, 150))
        ),
    ),
    clusters=(((0, 1, 2, 3), (102_000, 403_200, 710_400, 1_036_800, 1_479_000)),),
    gpu_hz=NANO_GPU_HZ,
    gpu_name="57000000.gpu",
    gpu_of_node=("gpu", "nvidia,tegra210-gm20b"),
    emc=OVERRIDE,
    emc_bounds=(204_000_000, 1_600_000_000),
    conf=conf(
        {"CPU_A57": 0},
        """
< POWER_MODEL ID=0 NAME=MAXN >
CPU_ONLINE CORE_3 1
CPU_A57 MAX_FREQ -1
GPU MAX_FREQ -1
< POWER_MODEL ID=1 NAME=5W >
CPU_ONLINE CORE_2 0
CPU_ONLINE CORE_3 0
CPU_A57 MAX_FREQ 918000
GPU MAX_FREQ 640000000
""",
    ),
    status="pmode:0000\n",
    release="# R32 (release), REVISION: 7.1, GCID: 0, BOARD: t210ref, EABI: aarch64",
    total_w=3.5,
)
NANO_2GB = Tree(
    model="NVIDIA Jetson Nano 2GB Developer Kit",
    compatible=("nvidia,p3541-0000", "nvidia,jetson-nano-2gb", "nvidia,tegra210"),
    sensors=(),
    clusters=NANO.clusters,
    gpu_hz=NANO_GPU_HZ,
    gpu_name="57000000.gpu",
    gpu_of_node=None,
    emc=OVERRIDE,
    emc_bounds=(204_000_000, 1_600_000_000),
    conf=NANO.conf,
    status="pmode:0001\n",
)
TX2_NX = Tree(
    model="NVIDIA Jetson TX2 NX Developer Kit",
    compatible=("nvidia,p3509-0000+p3636-0001", "nvidia,tegra186"),
    sensors=(
        Sensor("ina3221x", "0-0040", 0, (("VDD_IN", 5000, 1000), ("VDD_CPU_GPU", 5000, 260), ("VDD_SOC", 5000, 380))),
    ),
    clusters=(((0, 3, 4, 5), _khz(345_600, 153_600, 12)), ((1, 2), (345_600, 960_000, 1_574_400, 1_958_400))),
    gpu_hz=tuple(round(114_750_000 + index * 98_812_500) for index in range(13)),
    gpu_name="17000000.gp10b",
    gpu_of_node=("gp10b", "nvidia,tegra186-gp10b\0nvidia,gp10b"),
    emc=BPMP,
    emc_bounds=(40_800_000, 1_600_000_000),
    conf=conf(
        {"CPU_A57": 0, "CPU_DENVER_0": 1},
        """
< POWER_MODEL ID=0 NAME=MAXN >
CPU_A57 MAX_FREQ 2147483647
CPU_DENVER_0 MAX_FREQ 2147483647
GPU MAX_FREQ 2147483647
EMC MAX_FREQ 0
< POWER_MODEL ID=1 NAME=MAXQ >
CPU_ONLINE CORE_1 0
CPU_ONLINE CORE_2 0
CPU_A57 MAX_FREQ 1200000
GPU MAX_FREQ 850000000
EMC MAX_FREQ 1331200000
""",
    ),
    status="pmode:0000\n",
    release="# R32 (release), REVISION: 7.4, GCID: 0, BOARD: t186ref, EABI: aarch64",
    total_w=5.0,
)
XAVIER_NX = Tree(
    model="NVIDIA Jetson Xavier NX Developer Kit",
    compatible=("nvidia,p3509-0000+p3668-0000", "nvidia,tegra194"),
    sensors=(
        Sensor("ina3221", "7-0040", 3, (("VDD_IN", 5000, 900), ("VDD_CPU_GPU_CV", 5000, 300), ("VDD_SOC", 5000, 250))),
    ),
    clusters=tuple(((core, core + 1), _khz(115_200, 76_800, 25)) for core in (0, 2, 4)),
    gpu_hz=XAVIER_GPU_HZ[:-1],
    gpu_name="17000000.gv11b",
    gpu_of_node=("gv11b", "nvidia,gv11b"),
    emc=BPMP,
    emc_bounds=(204_000_000, 1_866_000_000),
    total_w=4.5,
)
XAVIER_AGX = Tree(
    model="Jetson-AGX",
    compatible=("nvidia,p2972-0000", "nvidia,tegra194"),
    sensors=(
        Sensor("ina3221", "1-0040", 3, (("GPU", 12000, 100), ("CPU", 12000, 50), ("SOC", 12000, 100))),
        Sensor("ina3221", "1-0041", 4, (("CV", 12000, 0), ("VDDRQ", 12000, 50), ("SYS5V", 12000, 200))),
    ),
    clusters=tuple(((core, core + 1), _khz(115_200, 76_800, 29)) for core in (0, 2, 4, 6)),
    gpu_hz=XAVIER_GPU_HZ,
    gpu_name="17000000.gv11b",
    gpu_of_node=("gv11b", "nvidia,gv11b"),
    emc=BPMP,
    emc_bounds=(204_000_000, 2_133_000_000),
    total_w=6.0,
)
ORIN_NANO = Tree(
    model="NVIDIA Jetson Orin Nano Developer Kit",
    compatible=("nvidia,p3768-0000+p3767-0005", "nvidia,p3767-0005", "nvidia,tegra234"),
    sensors=(
        Sensor("ina3221", "1-0040", 1, (("VDD_IN", 5000, 1100), ("VDD_CPU_GPU_CV", 5000, 300), ("VDD_SOC", 5000, 300))),
    ),
    clusters=(((0, 1, 2, 3), _khz(115_200, 73_385, 20)), ((4, 5), _khz(115_200, 73_385, 20))),
    gpu_hz=(306_000_000, 408_000_000, 510_000_000, 612_000_000, 624_750_000),
    gpu_name="17000000.gpu",
    gpu_of_node=("gpu", "nvidia,ga10b"),
    emc=BPMP,
    emc_bounds=(204_000_000, 2_133_000_000),
    conf=conf(
        {"CPU_A78_0": 0, "CPU_A78_1": 4},
        """
< POWER_MODEL ID=0 NAME=15W >
TPC_POWER_GATING TPC_PG_MASK 0xf0
CPU_A78_0 MAX_FREQ 1510400
GPU MAX_FREQ 625000000
< POWER_MODEL ID=1 NAME=7W >
TPC_POWER_GATING TPC_PG_MASK 0xfc
CPU_ONLINE CORE_4 0
CPU_ONLINE CORE_5 0
CPU_A78_0 MAX_FREQ 960000
GPU MAX_FREQ 408000000
< POWER_MODEL ID=2 NAME=MAXN >
TPC_POWER_GATING TPC_PG_MASK 240
""",
    ),
    status="pmode:0000 fmode:quiet\n",
    release="# R36 (release), REVISION: 3.0, GCID: 0, BOARD: generic, EABI: aarch64",
    total_w=5.5,
)
ORIN_AGX_JP5 = Tree(
    model="NVIDIA Jetson AGX Orin Developer Kit",
    compatible=("nvidia,p3737-0000+p3701-0000", "nvidia,tegra234"),
    sensors=(
        Sensor(
            "ina3221", "1-0040", 3, (("VDD_GPU_SOC", 20000, 150), ("VDD_CPU_CV", 20000, 50), ("VIN_SYS_5V0", 5000, 800))
        ),
        Sensor("ina3221", "1-0041", 4, (("NC", 0, 0), ("VDDQ_VDD2_1V8AO", 20000, 30), ("NC", 0, 0))),
    ),
    clusters=tuple((tuple(range(core, core + 4)), (*_khz(115_200, 76_800, 28), 2_201_600)) for core in (0, 4, 8)),
    gpu_hz=ORIN_GPU_HZ,
    gpu_name="17000000.ga10b",
    gpu_of_node=("ga10b", "nvidia,ga10b"),
    emc=BPMP,
    emc_bounds=(204_000_000, 3_199_000_000),
    conf=conf(
        {"CPU_A78_0": 0, "CPU_A78_1": 4, "CPU_A78_2": 8},
        """
< POWER_MODEL ID=0 NAME=MAXN >
TPC_POWER_GATING TPC_PG_MASK 0
< POWER_MODEL ID=2 NAME=30W >
TPC_POWER_GATING TPC_PG_MASK 0
CPU_ONLINE CORE_8 0
CPU_ONLINE CORE_9 0
CPU_ONLINE CORE_10 0
CPU_ONLINE CORE_11 0
CPU_A78_0 MAX_FREQ 1728000
CPU_A78_1 MAX_FREQ 1267200
GPU MAX_FREQ 624750000
EMC MAX_FREQ 2133000000
""",
    ),
    status="pmode:0000\n",
    total_w=8.0,
)
ORIN_AGX_JP6 = Tree(
    **{
        **{name: getattr(ORIN_AGX_JP5, name) for name in Tree.__dataclass_fields__},
        "gpu_name": "17000000.gpu",
        "gpu_of_node": ("gpu", "nvidia,ga10b"),
        "release": "# R36 (release), REVISION: 4.0, GCID: 0, BOARD: generic, EABI: aarch64",
    }
)
THOR = Tree(
    model="NVIDIA Jetson AGX Thor Developer Kit",
    compatible=("nvidia,p3971-0080+p3834-0008", "nvidia,tegra264"),
    sensors=(Sensor("ina238", "2-0044", 5, (("VIN", 20000, 1500),)),),
    clusters=((tuple(range(14)), (648_000, 2_601_000)),),
    gpu_hz=(315_000_000, 1_575_000_000),
    gpu_name="gpu-gpc-0",
    gpu_of_node=None,
    emc="",
    emc_bounds=(0, 0),
    release="# R38 (release), REVISION: 2.0, GCID: 0, BOARD: generic, EABI: aarch64",
    total_w=30.0,
)

ALL = {
    "nano": NANO,
    "nano-2gb": NANO_2GB,
    "tx2-nx": TX2_NX,
    "xavier-nx": XAVIER_NX,
    "xavier-agx": XAVIER_AGX,
    "orin-nano": ORIN_NANO,
    "orin-agx-jp5": ORIN_AGX_JP5,
    "orin-agx-jp6": ORIN_AGX_JP6,
    "thor": THOR,
}
SETTABLE = {name: tree for name, tree in ALL.items() if name != "thor"}
METERED = {name: tree for name, tree in ALL.items() if tree.sensors}


def put(root: Path, path: str, text: str | int) -> None:
    """Write one file of a tree, with the newline that kernel files end in."""
    target = root / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text if isinstance(text, str) and text.endswith(("\n", "\0")) else f"{text}\n")


def plant(root: Path, tree: Tree) -> Path:
    """Write a board's files under ``root``."""
    put(root, "proc/device-tree/model", f"{tree.model}\0")
    put(root, "proc/device-tree/compatible", "".join(f"{word}\0" for word in tree.compatible))
    put(root, "proc/device-tree/serial-number", "1420921055555\0")
    put(root, "etc/nv_tegra_release", tree.release)
    for sensor in tree.sensors:
        _plant_sensor(root, sensor)
    _plant_gpu(root, tree)
    for cores, table in tree.clusters:
        _plant_cluster(root, cores, table)
    if tree.emc:
        rate, lock = tree.emc_files
        low, high = tree.emc_bounds
        put(root, rate, high)
        put(root, lock, 0)
        bounds = ("sys/kernel/debug/tegra_bwmgr/emc_min_rate", "sys/kernel/debug/tegra_bwmgr/emc_max_rate")
        names = bounds if tree.emc == OVERRIDE else (f"{BPMP}/min_rate", f"{BPMP}/max_rate")
        put(root, names[0], low)
        put(root, names[1], high)
        put(root, "sys/kernel/nvpmodel_emc_cap/emc_iso_cap", 0)
    if tree.conf:
        put(root, "etc/nvpmodel.conf", tree.conf)
    if tree.status:
        put(root, "var/lib/nvpmodel/status", tree.status)
    zone = "sys/class/thermal/thermal_zone"
    for number, (name, milli_c) in enumerate((("CPU-therm", 41500), ("gpu-thermal", 39000), ("PMIC-Die", 100000))):
        put(root, f"{zone}{number}/type", name)
        put(root, f"{zone}{number}/temp", milli_c)
    put(root, "sys/class/thermal/cooling_device0/type", "pwm-fan")
    put(root, "sys/class/thermal/cooling_device0/cur_state", 3)
    put(root, "sys/class/thermal/cooling_device1/type", "cpu-throttle-alert")
    put(root, "sys/class/thermal/cooling_device1/cur_state", 0)
    put(root, "sys/class/hwmon/hwmon9/name", "soctherm_oc")
    put(root, "sys/class/hwmon/hwmon9/oc1_event_cnt", 7)
    for path, text in tree.extra.items():
        put(root, path, text)
    return root


def _plant_sensor(root: Path, sensor: Sensor) -> None:
    if sensor.kind == "ina238":
        folder = f"sys/class/hwmon/hwmon{sensor.number}"
        name, mv, ma = sensor.rails[0]
        put(root, f"{folder}/name", "ina238")
        put(root, f"{folder}/in1_label", name)
        put(root, f"{folder}/power1_input", mv * ma)
        return
    base = f"sys/bus/i2c/drivers/{sensor.kind}/{sensor.bus}"
    for index, (name, mv, ma) in enumerate(sensor.rails):
        if sensor.kind == "ina3221x":
            folder = f"{base}/iio:device{sensor.number}"
            put(root, f"{folder}/rail_name_{index}", name)
            put(root, f"{folder}/in_power{index}_input", mv * ma // 1000)
            put(root, f"{folder}/in_voltage{index}_input", mv)
            put(root, f"{folder}/in_current{index}_input", ma)
        else:
            folder = f"{base}/hwmon/hwmon{sensor.number}"
            put(root, f"{folder}/in{index + 1}_label", name)
            put(root, f"{folder}/in{index + 1}_input", mv)
            put(root, f"{folder}/curr{index + 1}_input", ma)
    if sensor.kind == "ina3221":
        put(root, f"{base}/hwmon/hwmon{sensor.number}/in7_label", "sum of shunt voltages")
        put(root, f"{base}/hwmon/hwmon{sensor.number}/in7_input", 12345)


def _plant_gpu(root: Path, tree: Tree) -> None:
    # Another devfreq node stands beside it, as on boards with a video engine.
    put(root, "sys/class/devfreq/15340000.vic/device/of_node/name", "vic\0")
    put(root, "sys/class/devfreq/15340000.vic/available_frequencies", "115200000 601600000")
    if tree.gpu_of_node:
        put(root, f"{tree.gpu}/device/of_node/name", f"{tree.gpu_of_node[0]}\0")
        put(root, f"{tree.gpu}/device/of_node/compatible", f"{tree.gpu_of_node[1]}\0")
    put(root, f"{tree.gpu}/available_frequencies", " ".join(map(str, tree.gpu_hz)))
    put(root, f"{tree.gpu}/min_freq", tree.gpu_hz[0])
    put(root, f"{tree.gpu}/max_freq", tree.gpu_hz[-1])
    put(root, f"{tree.gpu}/cur_freq", tree.gpu_hz[1])


def _plant_cluster(root: Path, cores: tuple[int, ...], table: tuple[int, ...]) -> None:
    policy = f"{CPU}/cpufreq/policy{cores[0]}"
    put(root, f"{policy}/related_cpus", " ".join(map(str, cores)))
    put(root, f"{policy}/scaling_available_frequencies", " ".join(map(str, table)))
    put(root, f"{policy}/scaling_cur_freq", table[1])
    for name, value in (("min", table[0]), ("max", table[-1])):
        put(root, f"{policy}/cpuinfo_{name}_freq", value)
        put(root, f"{policy}/scaling_{name}_freq", value)
    for core in cores:
        folder = root / CPU / f"cpu{core}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "cpufreq").symlink_to(f"../cpufreq/policy{cores[0]}")
        put(root, f"{CPU}/cpu{core}/online", 1)


def dump(root: Path) -> dict[str, bytes]:
    """Every file that shows, byte for byte; a cluster that is off shows no clocks."""
    shown = [path for path in root.rglob("*") if path.is_file() and "policy" not in path.parent.name]
    shown += root.glob(f"{CPU}/cpu*/cpufreq/*")
    return {str(path.relative_to(root)): path.read_bytes() for path in shown}


class KernelSysfs(Sysfs):
    """Plain files with a kernel's manners, and faults on demand.

    ``refuse`` maps a path to the errno that a write to it fails with; ``round_to`` to the value that it takes
    instead; ``power_cut_at`` ends everything at that write, leaving the file torn. ``manners`` off leaves the faults
    alone.
    """

    def __init__(self, root: Path, *, manners: bool = True) -> None:
        super().__init__(root)
        self.manners = manners
        self.writes: list[tuple[str, str]] = []
        self.refuse: dict[str, int] = {}
        self.round_to: dict[str, int] = {}
        self.read_only: set[str] = set()
        self.power_cut_at: int | None = None
        self._free_rate = {
            rate: Path(self.full(rate)).read_bytes() for rate in _rates() if Path(self.full(rate)).exists()
        }

    def settable(self, path: str) -> bool:
        return path not in self.read_only and super().settable(path)

    def _push(self, path: str, data: bytes) -> None:
        if len(self.writes) == self.power_cut_at:
            super()._push(path, b"")
            raise PowerCutError
        if path in self.refuse:
            raise OSError(self.refuse[path], os.strerror(self.refuse[path]))
        self.writes.append((path, data.decode().strip()))
        if path in self.round_to:
            data = f"{self.round_to[path]}\n".encode()
        if self.manners:
            self._refuse_crossing(path, data)
        super()._push(path, data)
        if self.manners:
            self._react(path, data)

    def _refuse_crossing(self, path: str, data: bytes) -> None:
        if path.endswith(("min_freq", "max_freq")):
            is_min = path.endswith("min_freq")
            other = path[: -len("min_freq")] + ("max_freq" if is_min else "min_freq")
            bound = Path(self.full(other)).read_text().strip()
            value = int(data)
            if bound and (value > int(bound) if is_min else value < int(bound)):
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    def _react(self, path: str, data: bytes) -> None:
        core = re.fullmatch(rf"{CPU}/cpu(\d+)/online", path)
        if core:
            self.show_clocks(int(core[1]), on=data.strip() == b"1")
        for rate in _rates():
            lock = emc_files(rate.rsplit("/", 1)[0])[1]
            if path == lock and data.strip() == b"0":
                super()._push(rate, self._free_rate[rate])

    def show_clocks(self, core: int, *, on: bool) -> None:
        """Let the clock folder of a core come and go."""
        link = Path(self.full(f"{CPU}/cpu{core}/cpufreq"))
        if on and not link.is_symlink():
            policies = Path(self.full(f"{CPU}/cpufreq")).glob("policy*/related_cpus")
            policy = next(p.parent.name for p in policies if str(core) in p.read_text().split())
            link.symlink_to(f"../cpufreq/{policy}")
        elif not on and link.is_symlink():
            link.unlink()


def _rates() -> tuple[str, str]:
    return emc_files(BPMP)[0], emc_files(OVERRIDE)[0]


class PowerCutError(BaseException):
    """The end of everything, as far as the process can tell."""
