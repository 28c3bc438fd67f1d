"""Which Jetson this is, and what cannot be asked of it: the rails that add up to its total, its memory clocks."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from underwatt.errors import DeviceError

if TYPE_CHECKING:
    from underwatt.device.jetson.sysfs import Sysfs

MODEL_FILE = "proc/device-tree/model"
COMPATIBLE_FILE = "proc/device-tree/compatible"
SERIAL_FILE = "proc/device-tree/serial-number"
RELEASE_FILE = "etc/nv_tegra_release"
VIRTUAL_COMPATIBLE = "underwatt,virtual"  # a simulated tree says so itself, so that no figure passes for real


@dataclass(frozen=True, slots=True)
class Board:
    """What is known of a board beforehand.

    ``total_rails`` are the rails whose sum is the total, or empty where the board has no sensor. ``emc_mhz`` are
    the memory clocks, which no file lists.
    """

    key: str
    name: str
    total_rails: tuple[str, ...]
    emc_mhz: tuple[float, ...] = ()
    emc_override: bool = False  # memory clock pinned through override.emc instead of the boot processor
    no_sensor: str = ""  # why there is no power sensor
    read_only: str = ""  # why nothing can be set


_VDD_IN = ("VDD_IN",)
_EMC_NANO = (204.0, 408.0, 665.6, 800.0, 1065.6, 1331.2, 1600.0)
_EMC_TX2 = (204.0, 408.0, 665.6, 800.0, 1062.4, 1331.2, 1600.0, 1866.0)
_EMC_XAVIER = (204.0, 408.0, 665.6, 800.0, 1065.6, 1331.2, 1600.0, 1866.0, 2133.0)
_EMC_ORIN = (204.0, 665.6, 2133.0, 3199.0)

# The first whose pattern is in the model or compatible text: the more specific stand before the more general.
_BOARDS: tuple[tuple[str, Board], ...] = (
    (
        r"nano[ -]2gb|p3541",
        Board(
            "nano-2gb",
            "Jetson Nano 2GB",
            (),
            _EMC_NANO,
            emc_override=True,
            no_sensor="The Jetson Nano 2GB has no power sensor.",
        ),
    ),
    (
        r"thor|p3834|tegra264",
        Board("thor", "Jetson AGX Thor", ("VIN",), read_only="Jetson Thor is supported read-only so far."),
    ),
    (r"orin[ -]nano|p3767-000[345]", Board("orin-nano", "Jetson Orin Nano", _VDD_IN, _EMC_ORIN)),
    (r"orin[ -]nx|p3767", Board("orin-nx", "Jetson Orin NX", _VDD_IN, _EMC_ORIN)),
    (
        r"agx[ -]orin|p3701|p3737",
        Board("agx-orin", "Jetson AGX Orin", ("VDD_GPU_SOC", "VDD_CPU_CV", "VIN_SYS_5V0"), _EMC_ORIN),
    ),
    (r"xavier[ -]nx|p3668", Board("xavier-nx", "Jetson Xavier NX", _VDD_IN, _EMC_XAVIER)),
    (
        r"agx[ -]xavier|jetson-agx|jetson-xavier|p2888|p2972",
        Board("agx-xavier", "Jetson AGX Xavier", ("GPU", "CPU", "SOC", "CV", "VDDRQ", "SYS5V"), _EMC_XAVIER),
    ),
    (r"tx2[ -]nx|p3636", Board("tx2-nx", "Jetson TX2 NX", _VDD_IN, _EMC_TX2)),
    (r"tx2|quill|p3310|tegra186", Board("tx2", "Jetson TX2", _VDD_IN, _EMC_TX2)),
    (
        r"jetson[ -]nano|p3448|p3450|tegra210",
        Board("nano", "Jetson Nano", ("POM_5V_IN",), _EMC_NANO, emc_override=True),
    ),
)
KNOWN_TOTALS: tuple[tuple[str, ...], ...] = tuple(
    dict.fromkeys(board.total_rails for _, board in _BOARDS if board.total_rails)
)


def detect_board(sysfs: Sysfs) -> Board:
    """The board that the device tree names; one that is not in the table gets no assumptions."""
    model = _text_or_empty(sysfs, MODEL_FILE)
    text = f"{model}\n{_text_or_empty(sysfs, COMPATIBLE_FILE)}".lower()
    for pattern, board in _BOARDS:
        if re.search(pattern, text):
            return board
    return Board("unknown", model.strip("\0 \n") or "unknown Jetson", ())


def is_jetson(sysfs: Sysfs) -> bool:
    """Whether the device tree or the release file says Tegra."""
    return "nvidia,tegra" in _text_or_empty(sysfs, COMPATIBLE_FILE) or sysfs.exists(RELEASE_FILE)


def is_simulated(sysfs: Sysfs) -> bool:
    """Whether the device tree says that this is a virtual board."""
    return VIRTUAL_COMPATIBLE in _text_or_empty(sysfs, COMPATIBLE_FILE).split("\0")


def serial_number(sysfs: Sysfs) -> str:
    """The serial number of the board, or nothing where it is not told (containers hide it)."""
    return _text_or_empty(sysfs, SERIAL_FILE).strip("\0 \n")


def l4t_release(sysfs: Sysfs) -> str:
    """The release of NVIDIA's Linux (R35.4.1), or nothing where it is not told."""
    found = re.search(r"#\s*R(\d+).*?REVISION:\s*([\d.]+)", _text_or_empty(sysfs, RELEASE_FILE))
    return f"R{found[1]}.{found[2]}" if found else ""


def _text_or_empty(sysfs: Sysfs, path: str) -> str:
    try:
        return sysfs.read(path)
    except DeviceError:
        return ""
