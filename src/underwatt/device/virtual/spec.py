"""What must be known of a board to simulate it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from underwatt.device.space import Knob, ModeSpace
from underwatt.errors import InputError

if TYPE_CHECKING:
    from underwatt.physics import BoardConstants
    from underwatt.records import PowerMode


@dataclass(frozen=True, slots=True)
class SensorRail:
    """One channel of a power sensor: which share of each part's power flows through it.

    A rail outside the total is fed by another one, so that adding it would count its power twice.
    """

    name: str
    static: float
    gpu: float
    cpu: float
    mem: float
    in_total: bool
    volts: float


@dataclass(frozen=True, slots=True)
class Sensor:
    """An INA3221-like sensor: it averages over a window, follows slowly, and knows only whole steps of current."""

    window_s: float
    lag_s: float
    step_ma: float
    noise: float  # relative, of each published value


@dataclass(frozen=True, slots=True)
class Thermal:
    """One body with one way out for its heat, and the temperatures at which its GPU is slowed and set free."""

    resistance_c_per_w: float
    capacity_j_per_c: float
    throttle_c: float
    recover_c: float
    leakage_per_c: float  # growth of static power for each degree above REFERENCE_C


@dataclass(frozen=True, slots=True)
class StockMode:
    """A mode of the vendor's nvpmodel; the watts in its name are a preset, not a promise."""

    id: int
    name: str
    mode: PowerMode


@dataclass(frozen=True, slots=True)
class SysfsNames:
    """Where this board's files are, and who it says it is."""

    model: str
    compatible: tuple[str, ...]
    generation: Literal["jetpack4", "jetpack5", "jetpack6"]
    gpu_path: str  # below sys/devices
    gpu_name: str  # of_node/name
    gpu_compatible: str
    clusters: tuple[tuple[int, ...], ...]  # cores that share a clock
    sensor_chips: tuple[tuple[str, tuple[str, ...]], ...]  # i2c address, rail of each channel
    emc: Literal["bpmp", "override"]


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
    sensor: Sensor
    thermal: Thermal
    stock_modes: tuple[StockMode, ...]
    default_mode: str  # the name of the stock mode it starts in
    sysfs: SysfsNames

    @property
    def space(self) -> ModeSpace:
        """Every mode of the board."""
        cores = tuple(float(count) for count in range(1, self.cpu_cores + 1))
        return ModeSpace(
            (
                Knob("cpu_cores", cores),
                Knob("cpu_mhz", self.cpu_mhz),
                Knob("gpu_mhz", self.gpu_mhz),
                Knob("mem_mhz", self.mem_mhz),
            )
        )

    def stock_mode(self, name: str) -> StockMode:
        """The stock mode of that name."""
        for stock in self.stock_modes:
            if stock.name == name:
                return stock
        names = ", ".join(stock.name for stock in self.stock_modes)
        raise InputError(f"{self.title} has no stock mode {name!r}.", hint=f"It has: {names}.")


REFERENCE_C = 45.0  # the temperature at which static_w is meant
