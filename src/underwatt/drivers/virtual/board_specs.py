"""The boards that can be simulated: one table of constants each, with where each constant comes from.

Knobs: the clock tables that the boards' kernels list. Time: ``orin-agx`` and ``orin-nano`` hold what
``benchmarks/physics.py`` fits to the public PowerTrain tables, divided by what ``underwatt.jobs.cost`` counts for
the networks behind them. The other boards scale from there by public data: GPU lanes × 2 FLOPs a cycle, memory bus
width × 2 transfers, rough relative speed of the CPU cores.

Power at work: ``orin-agx`` as fitted, the smaller Orins as the same silicon with fewer lanes and a narrower bus, TX2
from figures of chips with the same cores and lanes, the others estimated: the envelope of the module's data sheet,
split over the parts as on the fitted board. Power at rest: what owners of each board have published, which
``benchmarks/physics.py`` sets beside what is drawn here. They are plausible boards, not measured ones. Stock modes:
NVIDIA's developer guides (tables of supported modes), clocks rounded to the boards' tables; masks of GPU units, which
need a reboot, are left out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from underwatt.device.space import ModeSpace
from underwatt.drivers.virtual.physics import BoardConstants, ClockedPart, PowerConstants
from underwatt.errors import InputError
from underwatt.records import PowerMode

if TYPE_CHECKING:
    from collections.abc import Mapping

GIB = 2.0**30
REFERENCE_C = 45.0  # the temperature at which static_w is meant


@dataclass(frozen=True, slots=True)
class SensorRail:
    """One channel of a power sensor: which share of each part's power flows through it.

    A rail outside the total is fed by another one, so that adding it would count its power twice.
    """

    chip: str  # its i2c address
    channel: int  # from 0; channels without a rail are not connected
    name: str
    static: float
    gpu: float
    cpu: float
    mem: float
    in_total: bool
    volts: float


@dataclass(frozen=True, slots=True)
class SensorSpec:
    """An INA3221-like sensor: it averages over a window, follows slowly, and knows only whole steps of current."""

    window_s: float
    lag_s: float
    step_ma: float
    noise: float  # relative, of each published value


# Data sheet of the INA3221: 40 µV a step across the shunt; published averages follow a load change in about 2 s.
_SHUNT_5_MOHM = SensorSpec(window_s=0.1, lag_s=0.6, step_ma=8.0, noise=0.01)
_SHUNT_2_MOHM = SensorSpec(window_s=0.1, lag_s=0.6, step_ma=20.0, noise=0.01)


@dataclass(frozen=True, slots=True)
class ThermalSpec:
    """One body with one way out for its heat, and the temperature at which its GPU is slowed."""

    resistance_c_per_w: float
    capacity_j_per_c: float
    throttle_c: float
    leakage_per_c: float  # growth of static power for each degree above REFERENCE_C


@dataclass(frozen=True, slots=True)
class SysfsNames:
    """Where this board's files are, and who it says it is."""

    model: str
    compatible: tuple[str, ...]
    generation: Literal["jetpack4", "jetpack5", "jetpack6"]
    gpu_path: str  # below sys/devices; the device tree's name of the GPU is what follows the last dot
    gpu_compatible: str
    clusters: tuple[tuple[int, ...], ...]  # cores that share a clock
    emc: Literal["bpmp", "override"] = "bpmp"  # through the boot processor, or as on Nano


@dataclass(frozen=True, slots=True)
class BoardSpec:
    """A board: its knobs, its memory, its physics, its sensors, its heat."""

    name: str
    title: str
    cpu_cores: int
    cpu_mhz: tuple[float, ...]
    gpu_mhz: tuple[float, ...]
    mem_mhz: tuple[float, ...]
    memory_bytes: float
    reserved_bytes: float  # system, CUDA context and framework, before a job allocates anything
    physics: BoardConstants
    rails: tuple[SensorRail, ...]
    thermal: ThermalSpec
    # Of the vendor's nvpmodel, in its order: the baseline of a user without Underwatt. Watts in a name are no promise.
    stock_modes: Mapping[str, PowerMode]
    default_mode: str  # the stock mode it starts in
    sysfs: SysfsNames
    sensor: SensorSpec = _SHUNT_5_MOHM

    @property
    def space(self) -> ModeSpace:
        """Every mode of the board."""
        cores = [float(count) for count in range(1, self.cpu_cores + 1)]
        values = {"cpu_cores": cores, "cpu_mhz": self.cpu_mhz, "gpu_mhz": self.gpu_mhz, "mem_mhz": self.mem_mhz}
        return ModeSpace.of_values(values)

    def stock_mode(self, name: str) -> PowerMode:
        """The stock mode of that name."""
        if name not in self.stock_modes:
            names = ", ".join(self.stock_modes)
            raise InputError(f"{self.title} has no stock mode {name!r}.", hint=f"It has: {names}.")
        return self.stock_modes[name]


# Share of the peak bus rate that training reaches: counted bytes of ResNet-18 over fitted memory cycles: 0.41 on AGX
# Orin and 0.40 on Orin Nano.
_BUS_SHARE = 0.4
# Counted FLOPs of ResNet-18 over fitted GPU cycles are 0.81 × the FP32 peak on both Orins (TF32 helps them); GPUs
# without tensor cores for FP32 are taken at the usual 0.65 of dense convolutions.
_AMPERE_SHARE, _OLDER_SHARE = 0.81, 0.65
# Fitted launch cycles over counted operations are about 200,000 on Cortex-A78AE (MobileNetV3 training, inference of
# both networks): an operation is Python, autograd and one or more launches. Other cores by work per cycle.
_LAUNCH_CYCLES = 200e3


def _steps(first_mhz: float, step_mhz: float, count: int, *more_mhz: float) -> tuple[float, ...]:
    return (*(round(first_mhz + step_mhz * i, 2) for i in range(count)), *more_mhz)


def _logic(watts: float, top_mhz: float) -> ClockedPart:
    """A part that draws so many watts when busy at its top clock, at about 0.5 V to 1.0 V."""
    return ClockedPart(1e3 * watts / top_mhz, top_mhz, low_v=0.5, high_v=1.0, idle_share=0.2)


def _memory(watts: float, top_mhz: float, idle_share: float) -> ClockedPart:
    return ClockedPart(1e3 * watts / top_mhz, top_mhz, low_v=1.0, high_v=1.0, idle_share=idle_share)


# The fitted board, mean of its two workloads: watts of parts that are always busy, 2,048 lanes and 256 bits.
_ORIN_GPU_W, _ORIN_CORE, _ORIN_MEM_W, _ORIN_MEM_IDLE = 18.9, _logic(0.87, 2201.6), 22.6, 0.085
_ORIN_GPU_MHZ, _ORIN_MEM_MHZ = 1300.5, 3199.0


NANO = BoardSpec(
    name="nano",
    title="Virtual Jetson Nano 4 GB",
    cpu_cores=4,
    cpu_mhz=(
        *(102.0, 204.0, 307.2, 403.2, 518.4, 614.4, 710.4, 825.6),
        *(921.6, 1036.8, 1132.8, 1224.0, 1326.0, 1428.0, 1479.0),
    ),
    gpu_mhz=_steps(76.8, 76.8, 12),
    mem_mhz=(204.0, 408.0, 665.6, 800.0, 1065.6, 1331.2, 1600.0),
    memory_bytes=4 * GIB,
    reserved_bytes=1.9 * GIB,  # estimated: headless system 0.4, CUDA and cuDNN 1.0, PyTorch 0.5
    physics=BoardConstants(
        flops_per_gpu_cycle=_OLDER_SHARE * 128 * 2,  # data sheet: 128 Maxwell lanes
        bytes_per_mem_cycle=_BUS_SHARE * 16,  # data sheet: 64-bit LPDDR4, 25.6 GB/s at 1600 MHz
        launch_cycles_per_kernel=2.0 * _LAUNCH_CYCLES,  # Cortex-A57 does about half the work of an A78 in a cycle
        load_cycles_per_byte=2.0 * 50,
        load_core_exponent=1.1,
        # Estimated within the 5 to 10 W of the data sheet; what is drawn at rest is published
        power=PowerConstants(1.0, _logic(4.2, 921.6), _logic(0.55, 1479.0), _memory(2.4, 1600.0, 0.15), working_w=0.7),
    ),
    rails=(
        SensorRail("6-0040", 0, "POM_5V_IN", 1.0, 1.0, 1.0, 1.0, in_total=True, volts=5.0),
        SensorRail("6-0040", 1, "POM_5V_GPU", 0.05, 1.0, 0.0, 0.0, in_total=False, volts=5.0),
        SensorRail("6-0040", 2, "POM_5V_CPU", 0.10, 0.0, 1.0, 0.0, in_total=False, volts=5.0),
    ),
    sensor=_SHUNT_5_MOHM,  # developer kit schematic: 5 mΩ
    # Passive heat sink: estimated from about 40 °C above the room at 9 W after some minutes. Trip: thermal guide.
    thermal=ThermalSpec(4.5, 60.0, throttle_c=97.0, leakage_per_c=0.004),
    stock_modes={"MAXN": PowerMode(4, 1479.0, 921.6, 1600.0), "5W": PowerMode(2, 921.6, 614.4, 1600.0)},
    default_mode="MAXN",
    sysfs=SysfsNames(
        model="NVIDIA Jetson Nano Developer Kit",
        compatible=("nvidia,p3449-0000-b00+p3448-0000-b00", "nvidia,jetson-nano", "nvidia,tegra210"),
        generation="jetpack4",
        gpu_path="57000000.gpu",
        gpu_compatible="nvidia,tegra210-gm20b",
        clusters=((0, 1, 2, 3),),
        emc="override",
    ),
)

# One A57 core of a 14 nm phone chip at 2.1 GHz draws 1.37 W (AnandTech on the Exynos 7420: 5.49 W for four); a Denver 2
# is taken at the half more that its width suggests: 1.5 W over all six. Pascal: 50 W of a Tesla P4 (data sheet) less a
# fifth for its memory, for 2,560 lanes at about 1 GHz; at 1.3 GHz and its voltage, 256 lanes draw 6.5 W. Memory: as on
# Orin Nano, by bus width and clock. Work keeps as much switched on, beside what is drawn at rest, as on AGX Xavier.
_TX2_GPU, _TX2_CORE = _logic(6.5, 1300.5), _logic(1.5, 2035.2)

TX2 = BoardSpec(
    name="tx2",
    title="Virtual Jetson TX2",
    cpu_cores=6,
    cpu_mhz=_steps(345.6, 153.6, 12),
    gpu_mhz=_steps(114.75, 102.0, 7, 854.25, 930.75, 1032.75, 1122.0, 1236.75, 1300.5),
    mem_mhz=(204.0, 408.0, 665.6, 800.0, 1062.4, 1331.2, 1600.0, 1866.0),
    memory_bytes=8 * GIB,
    reserved_bytes=1.9 * GIB,  # estimated as for Nano
    physics=BoardConstants(
        flops_per_gpu_cycle=_OLDER_SHARE * 256 * 2,  # data sheet: 256 Pascal lanes
        bytes_per_mem_cycle=_BUS_SHARE * 32,  # data sheet: 128-bit LPDDR4, 59.7 GB/s at 1866 MHz
        launch_cycles_per_kernel=1.8 * _LAUNCH_CYCLES,  # A57 and the faster Denver 2
        load_cycles_per_byte=1.8 * 50,
        load_core_exponent=1.1,
        power=PowerConstants(2.1, _TX2_GPU, _TX2_CORE, _memory(4.9, 1866.0, _ORIN_MEM_IDLE), working_w=2.9),
    ),
    rails=(
        SensorRail("0-0040", 0, "VDD_SYS_GPU", 0.05, 1.0, 0.0, 0.0, in_total=False, volts=19.0),
        SensorRail("0-0040", 1, "VDD_SYS_SOC", 0.35, 0.0, 0.0, 0.4, in_total=False, volts=19.0),
        SensorRail("0-0040", 2, "VDD_4V0_WIFI", 0.02, 0.0, 0.0, 0.0, in_total=False, volts=4.0),
        SensorRail("0-0041", 0, "VDD_IN", 1.0, 1.0, 1.0, 1.0, in_total=True, volts=19.0),
        SensorRail("0-0041", 1, "VDD_SYS_CPU", 0.10, 0.0, 1.0, 0.0, in_total=False, volts=19.0),
        SensorRail("0-0041", 2, "VDD_SYS_DDR", 0.10, 0.0, 0.0, 0.6, in_total=False, volts=19.0),
    ),
    thermal=ThermalSpec(2.0, 120.0, throttle_c=95.5, leakage_per_c=0.004),  # fan of the kit; trip: thermal guide
    stock_modes={
        "MAXN": PowerMode(6, 2035.2, 1300.5, 1866.0),
        "MAXQ": PowerMode(4, 1267.2, 854.25, 1331.2),
        "MAXP_CORE_ALL": PowerMode(6, 1420.8, 1122.0, 1600.0),
        "MAXP_CORE_ARM": PowerMode(4, 2035.2, 1122.0, 1600.0),
    },
    default_mode="MAXP_CORE_ARM",
    sysfs=SysfsNames(
        model="quill",
        compatible=("nvidia,p2597-0000+p3310-1000-c03", "nvidia,quill", "nvidia,tegra186"),
        generation="jetpack4",
        gpu_path="17000000.gp10b",
        gpu_compatible="nvidia,tegra186-gp10b",
        clusters=((0, 3, 4, 5), (1, 2)),
    ),
)

# The same chip on a smaller module: half the memory, at 1600 MHz, and one sensor.
TX2_NX = replace(
    TX2,
    name="tx2-nx",
    title="Virtual Jetson TX2 NX",
    mem_mhz=TX2.mem_mhz[:-1],
    memory_bytes=4 * GIB,
    reserved_bytes=1.7 * GIB,  # estimated as for Nano, with less for the display
    physics=replace(
        TX2.physics,
        # At rest estimated, a little below the larger module; the rest by the same rules
        power=PowerConstants(1.8, _TX2_GPU, _TX2_CORE, _memory(4.2, 1600.0, _ORIN_MEM_IDLE), working_w=2.5),
    ),
    rails=(
        SensorRail("7-0040", 0, "VDD_IN", 1.0, 1.0, 1.0, 1.0, in_total=True, volts=5.0),
        SensorRail("7-0040", 1, "VDD_CPU_GPU", 0.15, 1.0, 1.0, 0.0, in_total=False, volts=5.0),
        SensorRail("7-0040", 2, "VDD_SOC", 0.35, 0.0, 0.0, 0.4, in_total=False, volts=5.0),
    ),
    thermal=ThermalSpec(3.0, 70.0, throttle_c=95.5, leakage_per_c=0.004),  # small fan; trip: thermal guide
    stock_modes={**TX2.stock_modes, "MAXN": PowerMode(6, 2035.2, 1300.5, 1600.0)},
    default_mode="MAXP_CORE_ALL",
    sysfs=replace(
        TX2.sysfs,
        model="NVIDIA Jetson TX2 NX Developer Kit",
        compatible=("nvidia,p3509-0000+p3636-0001", "nvidia,p3636-0001", "nvidia,tegra186"),
    ),
)

XAVIER_AGX = BoardSpec(
    name="xavier-agx",
    title="Virtual Jetson AGX Xavier 32 GB",
    cpu_cores=8,
    cpu_mhz=_steps(115.2, 76.8, 29),
    gpu_mhz=_steps(114.75, 102.0, 6, 675.75, 828.75, 905.25, 1032.75, 1198.5, 1236.75, 1338.75, 1377.0),
    mem_mhz=(204.0, 408.0, 665.6, 800.0, 1065.6, 1331.2, 1600.0, 1866.0, 2133.0),
    memory_bytes=32 * GIB,
    reserved_bytes=3.0 * GIB,
    physics=BoardConstants(
        flops_per_gpu_cycle=_OLDER_SHARE * 512 * 2,  # data sheet: 512 Volta lanes; its tensor cores take no FP32
        bytes_per_mem_cycle=_BUS_SHARE * 64,  # data sheet: 256-bit LPDDR4x, 136.5 GB/s at 2133 MHz
        launch_cycles_per_kernel=1.4 * _LAUNCH_CYCLES,  # Carmel
        load_cycles_per_byte=1.4 * 50,
        load_core_exponent=1.2,
        # Estimated from the 10, 15 and 30 W modes of the data sheet; what is drawn at rest is published
        power=PowerConstants(2.7, _logic(15.0, 1377.0), _logic(1.3, 2265.6), _memory(9.0, 2133.0, 0.1), working_w=3.8),
    ),
    rails=(
        SensorRail("1-0040", 0, "GPU", 0.05, 1.0, 0.0, 0.0, in_total=True, volts=19.0),
        SensorRail("1-0040", 1, "CPU", 0.10, 0.0, 1.0, 0.0, in_total=True, volts=19.0),
        SensorRail("1-0040", 2, "SOC", 0.35, 0.0, 0.0, 0.3, in_total=True, volts=19.0),
        SensorRail("1-0041", 0, "CV", 0.02, 0.0, 0.0, 0.0, in_total=True, volts=19.0),
        SensorRail("1-0041", 1, "VDDRQ", 0.08, 0.0, 0.0, 0.4, in_total=True, volts=19.0),
        SensorRail("1-0041", 2, "SYS5V", 0.40, 0.0, 0.0, 0.3, in_total=True, volts=5.0),
    ),
    thermal=ThermalSpec(1.2, 200.0, throttle_c=95.5, leakage_per_c=0.004),  # fan at full; thermal guide
    stock_modes={
        "MAXN": PowerMode(8, 2265.6, 1377.0, 2133.0),
        "MODE_10W": PowerMode(2, 1190.4, 522.75, 1065.6),
        "MODE_15W": PowerMode(4, 1190.4, 675.75, 1331.2),
        "MODE_30W_ALL": PowerMode(8, 1190.4, 905.25, 1600.0),
        "MODE_30W_6CORE": PowerMode(6, 1420.8, 905.25, 1600.0),
        "MODE_30W_4CORE": PowerMode(4, 1804.8, 905.25, 1600.0),
        "MODE_30W_2CORE": PowerMode(2, 2112.0, 905.25, 1600.0),
    },
    default_mode="MODE_15W",
    sysfs=SysfsNames(
        model="Jetson-AGX",
        compatible=("nvidia,p2972-0000", "nvidia,p2822-0000+p2888-0004", "nvidia,tegra194"),
        generation="jetpack5",
        gpu_path="17000000.gv11b",
        gpu_compatible="nvidia,gv11b",
        clusters=((0, 1), (2, 3), (4, 5), (6, 7)),
    ),
)

ORIN_NANO = BoardSpec(
    name="orin-nano",
    title="Virtual Jetson Orin Nano 8 GB",
    cpu_cores=6,
    cpu_mhz=_steps(115.2, 76.8, 19, 1510.4),
    gpu_mhz=(306.0, 408.0, 510.0, 612.0, 624.75),
    mem_mhz=(204.0, 665.6, 2133.0),
    memory_bytes=8 * GIB,
    reserved_bytes=2.4 * GIB,
    physics=BoardConstants(
        flops_per_gpu_cycle=_AMPERE_SHARE * 1024 * 2,  # data sheet: 1,024 Ampere lanes; share as fitted
        bytes_per_mem_cycle=_BUS_SHARE * 32,  # data sheet: 128-bit LPDDR5, 68 GB/s at 2133 MHz; share as fitted
        launch_cycles_per_kernel=_LAUNCH_CYCLES,
        load_cycles_per_byte=49,  # fitted: 30 Mcycles a sample of 3 × 224 × 224 floats
        load_workers=6.0,
        load_core_exponent=0.95,  # fitted
        exposed_memory=0.1,  # fitted 0.08
        # The AGX Orin's silicon: half its lanes, half its bus (with fewer chips on it: 0.75 of the watts for each bit,
        # so that nothing exceeds the 21.7 W seen under MAXN_SUPER). The measured table of this board reads 1.65 times
        # as much, and up to 20.4 W where others saw 11.8: it fits the sum of all three rails, two of which VDD_IN
        # holds already (4% off; tests/drivers/virtual/test_board_specs.py).
        power=PowerConstants(
            static_w=3.6,  # published idle, less memory and cores
            gpu=_logic(_ORIN_GPU_W * 1024 / 2048, _ORIN_GPU_MHZ),
            cpu_core=_ORIN_CORE,
            mem=_memory(0.75 * _ORIN_MEM_W * 128 / 256, _ORIN_MEM_MHZ, _ORIN_MEM_IDLE),
            working_w=0.4,  # what is left of the table's constant
        ),
    ),
    rails=(
        SensorRail("1-0040", 0, "VDD_IN", 1.0, 1.0, 1.0, 1.0, in_total=True, volts=5.0),
        SensorRail("1-0040", 1, "VDD_CPU_GPU_CV", 0.15, 1.0, 1.0, 0.0, in_total=False, volts=5.0),
        SensorRail("1-0040", 2, "VDD_SOC", 0.35, 0.0, 0.0, 0.8, in_total=False, volts=5.0),
    ),
    thermal=ThermalSpec(2.0, 90.0, throttle_c=99.0, leakage_per_c=0.003),  # fan at full; thermal guide
    stock_modes={"15W": PowerMode(6, 1510.4, 624.75, 2133.0), "7W": PowerMode(4, 960.0, 408.0, 2133.0)},
    default_mode="15W",
    sysfs=SysfsNames(
        model="NVIDIA Jetson Orin Nano Developer Kit",
        compatible=("nvidia,p3768-0000+p3767-0003", "nvidia,p3767-0003", "nvidia,tegra234"),
        generation="jetpack6",
        gpu_path="platform/bus@0/17000000.gpu",
        gpu_compatible="nvidia,ga10b",
        clusters=((0, 1, 2, 3), (4, 5)),
    ),
)

# What JetPack 6.2 makes of the same board.
ORIN_NANO_SUPER = replace(
    ORIN_NANO,
    name="orin-nano-super",
    title="Virtual Jetson Orin Nano Super 8 GB",
    cpu_mhz=_steps(115.2, 76.8, 22),
    gpu_mhz=_steps(306.0, 102.0, 8),
    mem_mhz=(204.0, 665.6, 2133.0, 3199.0),
    stock_modes={
        "15W": PowerMode(6, 1497.6, 612.0, 2133.0),
        "25W": PowerMode(6, 1344.0, 918.0, 3199.0),
        "MAXN_SUPER": PowerMode(6, 1728.0, 1020.0, 3199.0),
        "7W": PowerMode(4, 960.0, 408.0, 2133.0),
    },
    default_mode="25W",
    sysfs=replace(
        ORIN_NANO.sysfs,
        model="NVIDIA Jetson Orin Nano Engineering Reference Developer Kit Super",
        compatible=("nvidia,p3768-0000+p3767-0005-super", "nvidia,p3767-0005", "nvidia,tegra234"),
    ),
)

ORIN_AGX = BoardSpec(
    name="orin-agx",
    title="Virtual Jetson AGX Orin 32 GB",
    cpu_cores=12,
    cpu_mhz=_steps(115.2, 76.8, 28, 2201.6),
    gpu_mhz=_steps(114.75, 102.0, 12, 1300.5),
    mem_mhz=(204.0, 665.6, 2133.0, 3199.0),
    memory_bytes=32 * GIB,
    reserved_bytes=3.0 * GIB,
    physics=BoardConstants(
        flops_per_gpu_cycle=_AMPERE_SHARE * 2048 * 2,  # data sheet: 2,048 Ampere lanes; share as fitted
        bytes_per_mem_cycle=_BUS_SHARE * 64,  # data sheet: 256-bit LPDDR5, 204.8 GB/s at 3199 MHz; share as fitted
        launch_cycles_per_kernel=_LAUNCH_CYCLES,
        load_cycles_per_byte=81,  # fitted: 49 Mcycles a sample of 3 × 224 × 224 floats
        load_workers=6.0,  # fitted 5.3 and 6.6
        load_core_exponent=1.5,  # fitted 1.5 and 1.6
        exposed_memory=0.3,  # fitted 0.28 and 0.38
        power=PowerConstants(
            static_w=5.4,  # published: idle 6.8 W with cpuidle, 10.4 W without; memory and cores are the difference
            gpu=_logic(_ORIN_GPU_W, _ORIN_GPU_MHZ),
            cpu_core=_ORIN_CORE,
            mem=_memory(_ORIN_MEM_W, _ORIN_MEM_MHZ, _ORIN_MEM_IDLE),
            working_w=6.3,  # fitted: 11.7 W while training, whatever the clocks
        ),
    ),
    rails=(
        SensorRail("1-0040", 0, "VDD_GPU_SOC", 0.35, 1.0, 0.0, 0.3, in_total=True, volts=20.0),
        SensorRail("1-0040", 1, "VDD_CPU_CV", 0.10, 0.0, 1.0, 0.0, in_total=True, volts=20.0),
        SensorRail("1-0040", 2, "VIN_SYS_5V0", 0.55, 0.0, 0.0, 0.7, in_total=True, volts=5.0),
        SensorRail("1-0041", 1, "VDDQ_VDD2_1V8AO", 0.10, 0.0, 0.0, 0.5, in_total=False, volts=5.0),
    ),
    sensor=_SHUNT_2_MOHM,  # estimated from the 0.4 W steps that its 20 V rails are seen to read in
    thermal=ThermalSpec(0.9, 300.0, throttle_c=99.0, leakage_per_c=0.003),  # fan at full; thermal guide
    stock_modes={
        "MAXN": PowerMode(12, 2201.6, 1300.5, 3199.0),
        "MODE_15W": PowerMode(4, 1113.6, 420.75, 2133.0),
        "MODE_30W": PowerMode(8, 1728.0, 624.75, 3199.0),
        "MODE_50W": PowerMode(12, 1497.6, 828.75, 3199.0),
    },
    default_mode="MODE_30W",
    sysfs=SysfsNames(
        model="Jetson AGX Orin",
        compatible=("nvidia,p3737-0000+p3701-0000", "nvidia,p3701-0000", "nvidia,tegra234"),
        generation="jetpack5",
        gpu_path="17000000.ga10b",
        gpu_compatible="nvidia,ga10b",
        clusters=((0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11)),
    ),
)

# The same board from JetPack 6 on, whose GPU clocks are others.
ORIN_AGX_JP6 = replace(
    ORIN_AGX,
    name="orin-agx-jp6",
    title="Virtual Jetson AGX Orin 32 GB with JetPack 6",
    gpu_mhz=_steps(306.0, 102.0, 10, 1300.5),
    stock_modes={
        "MAXN": PowerMode(12, 2201.6, 1300.5, 3199.0),
        "MODE_15W": PowerMode(4, 1113.6, 408.0, 2133.0),
        "MODE_30W": PowerMode(8, 1728.0, 612.0, 3199.0),
        "MODE_50W": PowerMode(12, 1497.6, 816.0, 3199.0),
    },
    sysfs=replace(
        ORIN_AGX.sysfs,
        model="NVIDIA Jetson AGX Orin Developer Kit",
        generation="jetpack6",
        gpu_path="platform/bus@0/17000000.gpu",
    ),
)

BOARDS: dict[str, BoardSpec] = {
    board.name: board for board in (NANO, TX2, TX2_NX, XAVIER_AGX, ORIN_NANO, ORIN_NANO_SUPER, ORIN_AGX, ORIN_AGX_JP6)
}
