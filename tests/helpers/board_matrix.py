"""Every Jetson with every release that people run on it, as trees of kernel files: facts in our own words.

``CELLS`` maps (board, release) to a ``Cell``: the tree that ``plant`` writes and the manners of the release's kernel,
which ``kernel_model`` gives it. Imports nothing of Underwatt but the tree itself, so that an older driver can be
examined with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import jetson_trees as trees
from jetson_trees import BPMP, CPU, OVERRIDE, Sensor, Tree

NONE = 2**31 - 1  # how nvpmodel spells that nothing is capped


@dataclass(frozen=True)
class Manners:
    """How the files of a kernel behave; what its release is called is nobody's business but ours."""

    lag_s: tuple[float, float] | None  # a CPU limit is applied so much later; None: at once
    crossing_refused: bool  # a minimum above the maximum is an error; else it waits below the maximum
    nearest: bool  # limits are rounded to the nearest entry; else inwards
    sealed_names: bool  # only root reads the names of rails
    gpu_sleeps: bool  # the GPU's node is absent until it was first powered
    off_clusters_stay: bool  # files of a cluster without a core that is on can be read, not written
    emc_cap: str = "sys/kernel/nvpmodel_emc_cap/emc_iso_cap"


_LAG_S = (0.005, 0.060)
_NEW_CAP = "sys/kernel/nvpmodel_clk_cap/emc"
KERNELS = {
    "4": Manners(None, True, True, sealed_names=True, gpu_sleeps=False, off_clusters_stay=False),
    "5": Manners(_LAG_S, False, False, sealed_names=False, gpu_sleeps=True, off_clusters_stay=True),
    "6": Manners(_LAG_S, False, False, False, gpu_sleeps=True, off_clusters_stay=True, emc_cap=_NEW_CAP),
    "7": Manners(_LAG_S, False, False, False, gpu_sleeps=False, off_clusters_stay=True, emc_cap=_NEW_CAP),
}
L4T = {"4": ("32", "7.4"), "5": ("35", "4.1"), "6": ("36", "3.0"), "6.2": ("36", "4.3"), "7": ("39", "0.0")}


@dataclass(frozen=True)
class Mode:
    """One power mode of nvpmodel, with the numbers as its file spells them."""

    name: str
    cores: int  # how many are on
    cpu_khz: int = NONE
    gpu_hz: int = NONE
    emc_hz: int = 0


@dataclass(frozen=True)
class Cell:
    """A board with a release."""

    board: str
    release: str
    tree: Tree
    modes: tuple[Mode, ...]
    active: int

    @property
    def manners(self) -> Manners:
        return KERNELS[self.release[0]]

    @property
    def name(self) -> str:
        return f"{self.board}-jp{self.release}"

    @property
    def knobs(self) -> dict[str, tuple[float, ...]]:
        """What can be asked of each knob in the active mode, in MHz; of memory clocks, those that all boards have."""
        mode = self.modes[self.active]
        values: dict[str, tuple[float, ...]] = {"cpu_cores": tuple(range(1, mode.cores + 1))}
        for name, table, cap, unit in (
            ("cpu_mhz", self.tree.clusters[0][1], mode.cpu_khz, 1e3),
            ("gpu_mhz", self.tree.gpu_hz, mode.gpu_hz, 1e6),
        ):
            nearest = min(table, key=lambda entry: abs(entry - cap))
            top = nearest if self.manners.nearest else max(entry for entry in table if entry <= cap)
            values[name] = tuple(entry / unit for entry in table if entry <= top)
        if self.release != "7":  # its memory clock is left alone until someone has tried it
            values["mem_mhz"] = (204.0, 665.6, *(() if mode.emc_hz else (self.tree.emc_bounds[1] / 1e6,)))
        return values


def _mhz(*clocks: float) -> tuple[int, ...]:
    return tuple(round(1e6 * clock) for clock in clocks)


def _khz(first: float, step: float, count: int, *more: float) -> tuple[int, ...]:
    return (*(round(1e3 * (first + step * at)) for at in range(count)), *(round(1e3 * clock) for clock in more))


def _hz(first: float, step: float, count: int, *more: float) -> tuple[int, ...]:
    return (*_mhz(*(first + step * at for at in range(count))), *_mhz(*more))


@dataclass(frozen=True)
class _Part:
    """A board without its release."""

    model: str
    compatible: tuple[str, ...]
    rails: tuple[tuple[str, tuple[tuple[str, int, int], ...]], ...]  # address of a chip, and its rails
    clusters: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    gpu_hz: tuple[int, ...]
    emc_max_mhz: float
    modes: tuple[Mode, ...]
    active: int = 0
    total_w: float = 0.0


def _module_rails(bus: str, amps: int, *others: str) -> tuple[tuple[str, tuple[tuple[str, int, int], ...]], ...]:
    return ((bus, (("VDD_IN", 5000, amps), (others[0], 5000, amps // 3), (others[1], 5000, amps // 4))),)


_NANO = _Part(
    "NVIDIA Jetson Nano Developer Kit",
    ("nvidia,p3449-0000-b00+p3448-0000-b00", "nvidia,jetson-nano", "nvidia,tegra210"),
    (("6-0040", (("POM_5V_IN", 5000, 700), ("POM_5V_GPU", 5000, 90), ("POM_5V_CPU", 5000, 150))),),
    (
        (
            (0, 1, 2, 3),
            _khz(102, 102, 2, 307.2, 403.2, 518.4, 614.4, 710.4, 825.6, 921.6, 1036.8, 1132.8, 1224, 1326, 1428, 1479),
        ),
    ),
    trees.NANO_GPU_HZ,
    1600,
    (Mode("MAXN", 4), Mode("5W", 2, 918_000, 640_000_000)),
    active=1,
)
_TX2_CLUSTERS = (((0, 3, 4, 5), _khz(345.6, 153.6, 12)), ((1, 2), _khz(345.6, 153.6, 12)))
_TX2_GPU = _hz(114.75, 102, 7, 854.25, 930.75, 1032.75, 1134.75, 1236.75, 1300.5)
_TX2_MODES = (
    Mode("MAXN", 6),
    Mode("MAXQ", 4, 1_200_000, 850_000_000, 1_331_200_000),
    Mode("MAXP_CORE_ALL", 6, 1_400_000, 1_120_000_000, 1_600_000_000),
    Mode("MAXP_CORE_ARM", 4, 2_000_000, 1_120_000_000, 1_600_000_000),
)
_TX2 = _Part(
    "quill",
    ("nvidia,p2597-0000+p3310-1000", "nvidia,quill", "nvidia,tegra186"),
    (
        ("0-0040", (("VDD_SYS_GPU", 19000, 60), ("VDD_SYS_SOC", 19000, 50), ("VDD_4V0_WIFI", 4800, 4))),
        ("0-0041", (("VDD_IN", 19000, 250), ("VDD_SYS_CPU", 19000, 40), ("VDD_SYS_DDR", 19000, 60))),
    ),
    _TX2_CLUSTERS,
    _TX2_GPU,
    1866,
    _TX2_MODES,
    active=3,
)
_TX2_NX = _Part(
    "NVIDIA Jetson TX2 NX Developer Kit",
    ("nvidia,p3509-0000+p3636-0001", "nvidia,p3636-0001", "nvidia,tegra186"),
    _module_rails("0-0040", 900, "VDD_CPU_GPU", "VDD_SOC"),
    _TX2_CLUSTERS,
    _TX2_GPU,
    1600,
    _TX2_MODES,
    active=2,
)
_XAVIER_NX = _Part(
    "NVIDIA Jetson Xavier NX Developer Kit",
    ("nvidia,p3509-0000+p3668-0000", "nvidia,p3668-0000", "nvidia,tegra194"),
    _module_rails("7-0040", 900, "VDD_CPU_GPU_CV", "VDD_SOC"),
    tuple(((core, core + 1), _khz(115.2, 76.8, 24, 1907.2)) for core in (0, 2, 4)),
    _hz(114.75, 0, 1, 204, 306, 408, 510, 599.25, 701.25, 752.25, 803.25, 854.25, 905.25, 956.25, 1007.25, 1058.25)
    + _mhz(1109.25),
    1866,
    # Mode 0 has two cores at the highest clock: not the largest.
    (
        Mode("MODE_15W_2CORE", 2, 1_900_000, 1_100_000_000, 1_600_000_000),
        Mode("MODE_15W_4CORE", 4, 1_400_000, 1_100_000_000, 1_600_000_000),
        Mode("MODE_15W_6CORE", 6, 1_400_000, 1_100_000_000, 1_600_000_000),
        Mode("MODE_10W_2CORE", 2, 1_500_000, 800_000_000, 1_600_000_000),
    ),
    active=2,
)
_XAVIER = _Part(
    "Jetson-AGX",
    ("nvidia,p2972-0000", "nvidia,p2822-0000+p2888-0004", "nvidia,tegra194"),
    (
        ("1-0040", (("GPU", 19000, 60), ("CPU", 19000, 30), ("SOC", 19000, 70))),
        ("1-0041", (("CV", 19000, 0), ("VDDRQ", 19000, 30), ("SYS5V", 5000, 350))),
    ),
    tuple(((core, core + 1), _khz(115.2, 76.8, 29)) for core in (0, 2, 4, 6)),
    _hz(114.75, 102, 6, 675.75, 828.75, 905.25, 1032.75, 1198.5, 1236.75, 1338.75, 1377),
    2133,
    (
        Mode("MAXN", 8),
        Mode("MODE_10W", 2, 1_200_000, 520_000_000, 1_066_000_000),
        Mode("MODE_15W", 4, 1_200_000, 670_000_000, 1_333_000_000),
        Mode("MODE_30W_ALL", 8, 1_200_000, 900_000_000, 1_600_000_000),
    ),
    active=2,
)
_ORIN_NANO = _Part(
    "NVIDIA Jetson Orin Nano Developer Kit",
    ("nvidia,p3768-0000+p3767-0005", "nvidia,p3767-0005", "nvidia,tegra234"),
    _module_rails("1-0040", 900, "VDD_CPU_GPU_CV", "VDD_SOC"),
    tuple((cores, _khz(115.2, 76.8, 19, 1510.4)) for cores in ((0, 1, 2, 3), (4, 5))),
    _mhz(306, 408, 510, 612, 624.75),
    2133,
    (Mode("15W", 6, 1_510_400, 625_000_000), Mode("7W", 4, 960_000, 408_000_000)),
)
_ORIN_NANO_SUPER = _Part(
    "NVIDIA Jetson Orin Nano Engineering Reference Developer Kit Super",
    _ORIN_NANO.compatible,
    _ORIN_NANO.rails,
    tuple((cores, _khz(115.2, 76.8, 22)) for cores in ((0, 1, 2, 3), (4, 5))),
    _hz(306, 102, 8),
    3199,
    # Mode 0 is the smallest but one; the largest is the third.
    (
        Mode("15W", 6, 1_497_600, 612_000_000, 2_133_000_000),
        Mode("25W", 6, 1_344_000, 918_000_000, 3_199_000_000),
        Mode("MAXN_SUPER", 6),
        Mode("7W", 4, 960_000, 408_000_000, 2_133_000_000),
    ),
    active=1,
)
_ORIN_NX = _Part(
    "NVIDIA Jetson Orin NX Engineering Reference Developer Kit",
    ("nvidia,p3768-0000+p3767-0000", "nvidia,p3767-0000", "nvidia,tegra234"),
    _ORIN_NANO.rails,
    tuple((cores, _khz(115.2, 76.8, 25, 1984)) for cores in ((0, 1, 2, 3), (4, 5, 6, 7))),
    _hz(306, 102, 7),
    3199,
    (Mode("MAXN", 8), Mode("10W", 4, 1_190_400, 612_000_000, 2_133_000_000), Mode("25W", 8, 1_497_600, 408_000_000)),
)
_ORIN = _Part(
    "NVIDIA Jetson AGX Orin Developer Kit",
    ("nvidia,p3737-0000+p3701-0000", "nvidia,p3701-0000", "nvidia,tegra234"),
    (
        ("1-0040", (("VDD_GPU_SOC", 20000, 150), ("VDD_CPU_CV", 20000, 50), ("VIN_SYS_5V0", 5000, 800))),
        ("1-0041", (("NC", 0, 0), ("VDDQ_VDD2_1V8AO", 20000, 30), ("NC", 0, 0))),
    ),
    tuple((tuple(range(core, core + 4)), _khz(115.2, 76.8, 28, 2201.6)) for core in (0, 4, 8)),
    trees.ORIN_GPU_HZ,
    3199,
    (
        Mode("MAXN", 12),
        Mode("MODE_15W", 4, 1_113_600, 420_750_000, 2_133_000_000),
        Mode("MODE_30W", 8, 1_728_000, 624_750_000),
        Mode("MODE_50W", 12, 1_497_600, 828_750_000),
    ),
    active=2,
)
_ORIN_6 = _Part(
    **{
        **{name: getattr(_ORIN, name) for name in _Part.__dataclass_fields__},
        "gpu_hz": _hz(306, 102, 10, 1300.5),
        "modes": (
            Mode("MAXN", 12),
            Mode("MODE_15W", 4, 1_113_600, 408_000_000, 2_133_000_000),
            Mode("MODE_30W", 8, 1_728_000, 612_000_000),
            Mode("MODE_50W", 12, 1_497_600, 816_000_000),
        ),
    }
)
# Name and compatible text of the GPU, and its device folder, by generation of board and release.
_GPUS = {
    "nano": ("57000000.gpu", ("gpu", "nvidia,tegra210-gm20b"), "sys/devices/57000000.gpu"),
    "tx2": ("17000000.gp10b", ("gp10b", "nvidia,tegra186-gp10b\0nvidia,gp10b"), "sys/devices/17000000.gp10b"),
    "xavier": ("17000000.gv11b", ("gv11b", "nvidia,gv11b"), "sys/devices/17000000.gv11b"),
    "orin-5": ("17000000.ga10b", ("ga10b", "nvidia,ga10b"), "sys/devices/platform/17000000.ga10b"),
    "orin-6": ("17000000.gpu", ("gpu", "nvidia,ga10b"), "sys/devices/platform/bus@0/17000000.gpu"),
}


def _conf(part: _Part) -> str:
    order = [core for cores, _ in part.clusters for core in cores]
    lines = []
    for number, mode in enumerate(part.modes):
        lines.append(f"< POWER_MODEL ID={number} NAME={mode.name} >")
        lines += [f"CPU_ONLINE CORE_{core} {int(core in order[: mode.cores])}" for core in sorted(order)]
        lines += [f"CPU_{at} MAX_FREQ {mode.cpu_khz}" for at in range(len(part.clusters))]
        lines += [f"GPU MAX_FREQ {mode.gpu_hz}", f"EMC MAX_FREQ {mode.emc_hz}"]
    clusters = {f"CPU_{at}": cores[0] for at, (cores, _) in enumerate(part.clusters)}
    return trees.conf(clusters, "\n".join(lines), default=part.active)


def _cell(board: str, release: str, part: _Part, gpu: str) -> Cell:
    new = release != "4"
    node, of_node, device = _GPUS[gpu]
    kind = "ina3221" if new else "ina3221x"
    extra = {f"{device}/railgate_enable": "1"}
    for number, (chip, rails) in enumerate(part.rails):
        if new:  # the mean of so many conversions of 1.1 ms, two for each of three channels
            folder = f"sys/bus/i2c/drivers/ina3221/{chip}/hwmon/hwmon{number + 2}"
            samples = 512 if release == "6.2" else 1
            extra |= {f"{folder}/samples": f"{samples}", f"{folder}/update_interval": f"{round(6.6 * samples)}"}
        else:
            for at, (name, _, _) in enumerate(rails):
                extra[f"sys/bus/i2c/drivers/ina3221x/{chip}/of_node/channel@{at}/ti,rail-name"] = f"{name}\0"
    for at, (cores, _) in enumerate(part.clusters):
        cooler = f"sys/class/thermal/cooling_device{at + 2}"
        extra[f"{cooler}/type"] = f"cpufreq-cpu{cores[0]}" if release[0] in "67" else f"thermal-cpufreq-{at}"
        extra[f"{cooler}/cur_state"] = "0"
    extra["sys/class/thermal/cooling_device9/type"] = f"devfreq-{node}" if release[0] in "67" else "thermal-devfreq-0"
    extra["sys/class/thermal/cooling_device9/cur_state"] = "0"
    if gpu.startswith("orin"):
        extra |= {f"sys/class/hwmon/hwmon9/oc{n}_event_cnt": "0" for n in (2, 3)}
    major, revision = L4T[release]
    tree = Tree(
        model=part.model,
        compatible=part.compatible,
        sensors=tuple(Sensor(kind, chip, at + 2, rails) for at, (chip, rails) in enumerate(part.rails)),
        clusters=part.clusters,
        gpu_hz=part.gpu_hz,
        gpu_name=node,
        gpu_of_node=of_node,
        emc=OVERRIDE if gpu == "nano" else BPMP,
        emc_bounds=(204_000_000, round(1e6 * part.emc_max_mhz)),
        conf=_conf(part),
        status=f"pmode:{part.active:04d}\n",
        release=f"# R{major} (release), REVISION: {revision}, GCID: 0, BOARD: generic, EABI: aarch64",
        extra=extra,
    )
    return Cell(board, release, tree, part.modes, part.active)


_LINES = (
    ("nano", _NANO, "nano", ("4",)),
    ("tx2", _TX2, "tx2", ("4",)),
    ("tx2-nx", _TX2_NX, "tx2", ("4",)),
    ("xavier-nx", _XAVIER_NX, "xavier", ("4", "5")),
    ("agx-xavier", _XAVIER, "xavier", ("4", "5")),
    ("orin-nano", _ORIN_NANO, "orin", ("5", "6", "6.2", "7")),
    ("orin-nano-super", _ORIN_NANO_SUPER, "orin", ("6.2", "7")),
    ("orin-nx", _ORIN_NX, "orin", ("5", "6", "6.2", "7")),
    ("agx-orin", _ORIN, "orin", ("5",)),
    ("agx-orin", _ORIN_6, "orin", ("6", "6.2", "7")),
)
CELLS: dict[tuple[str, str], Cell] = {
    (board, release): _cell(board, release, part, gpu if gpu != "orin" else ("orin-5" if release == "5" else "orin-6"))
    for board, part, gpu, releases in _LINES
    for release in releases
}
CELLS["thor", "7"] = Cell("thor", "7", trees.THOR, (), 0)
SETTABLE = {key: cell for key, cell in CELLS.items() if cell.board != "thor"}


def plant(root: Path, cell: Cell) -> Path:
    """Write the tree of a cell as its board stands after a boot into its active mode."""
    tree = cell.tree
    trees.plant(root, tree)
    old_cap = root / KERNELS["4"].emc_cap
    if cell.manners.emc_cap != KERNELS["4"].emc_cap and old_cap.exists():
        old_cap.unlink()
        trees.put(root, cell.manners.emc_cap, 0)
    if tree.emc == OVERRIDE:
        trees.put(root, f"{OVERRIDE}/clk_update_rate", 0)
        trees.put(root, f"{OVERRIDE}/clk_rate", tree.emc_bounds[1])
        old_cap.unlink()
    return root


def cooler_of(cell: Cell, part: str) -> str:
    """The cooling device that slows ``cpu`` (its first cluster) or ``gpu``."""
    return f"sys/class/thermal/cooling_device{2 if part == 'cpu' else 9}"


__all__ = ["BPMP", "CELLS", "CPU", "KERNELS", "OVERRIDE", "SETTABLE", "Cell", "Manners", "Mode", "cooler_of", "plant"]
