"""The GPU clock of a Jetson, through its devfreq node."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from underwatt.device.jetson.sysfs import write_range
from underwatt.errors import DeviceError

if TYPE_CHECKING:
    from underwatt.device.jetson.sysfs import Sysfs

HZ_PER_MHZ = 1_000_000
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


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU whose clock range can be set; ``node`` is its devfreq folder."""

    sysfs: Sysfs
    node: str

    @property
    def files(self) -> tuple[str, str]:
        """What setting the clock changes."""
        return f"{self.node}/min_freq", f"{self.node}/max_freq"

    def table_hz(self) -> tuple[int, ...]:
        """Every clock the hardware has, ascending."""
        return self.sysfs.read_ints(f"{self.node}/available_frequencies")

    def pin(self, hz: int) -> None:
        """Hold the clock at one value."""
        write_range(self.sysfs, self.files, f"{hz}\n", f"{hz}\n")

    def running_mhz(self) -> float | None:
        """The clock now, or ``None`` while the GPU is powered down."""
        try:
            return self.sysfs.read_int(f"{self.node}/cur_freq") / HZ_PER_MHZ or None
        except DeviceError:
            return None


def find_gpu(sysfs: Sysfs) -> Gpu | None:
    """The devfreq node of the GPU: by what its device tree says it is, then in the places where boards keep it."""
    for of_node in sysfs.glob("sys/class/devfreq/*/device/of_node"):
        if _is_gpu(sysfs, of_node):
            node = of_node.removesuffix("/device/of_node")
            if sysfs.exists(f"{node}/available_frequencies"):
                return Gpu(sysfs, node)
    for place in _KNOWN_PLACES:
        for name in _KNOWN_NODES:
            node = place.format(node=name)
            if sysfs.exists(f"{node}/available_frequencies"):
                return Gpu(sysfs, node)
    return None


def find_railgate(sysfs: Sysfs) -> str | None:
    """The file that wakes a GPU which is powered down, or ``None`` where there is none."""
    return next((path for pattern in _RAILGATES for path in sysfs.glob(pattern)), None)


def _is_gpu(sysfs: Sysfs, of_node: str) -> bool:
    words: list[str] = []
    for file in ("name", "compatible"):
        try:
            words += sysfs.read(f"{of_node}/{file}").strip("\0\n").split("\0")
        except DeviceError:
            continue
    return any(word == "gpu" or word.endswith(_CHIPS) for word in words)
