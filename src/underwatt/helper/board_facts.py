"""Which Jetson this is, what cannot be asked of it, and NVIDIA's power modes for it.

What cannot be asked stands in a table: the rails that add up to a board's total, and its memory clocks. The power modes
(which one is active, what it caps, which switch would need a reboot) are read from nvpmodel's files; the ``nvpmodel``
program is never run.
"""

import re
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from .errors import InputError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from .sysfs import Sysfs

MODEL_FILE = "proc/device-tree/model"
COMPATIBLE_FILE = "proc/device-tree/compatible"
SERIAL_FILE = "proc/device-tree/serial-number"
RELEASE_FILE = "etc/nv_tegra_release"
CONF_FILE = "etc/nvpmodel.conf"
STATUS_FILE = "var/lib/nvpmodel/status"
VIRTUAL_COMPATIBLE = "underwatt,virtual"  # a simulated tree says so itself, so that no figure passes for real
_NO_CAP = 2**31 - 1
_NOTHING: Any = MappingProxyType({})
_REBOOT_ARGS = ("TPC_PG_MASK", "FBP_PG_MASK")


class Board(NamedTuple):
    """What is known of a board beforehand.

    ``total_rails`` are the rails whose sum is the total, or empty where the board has no sensor. ``emc_mhz`` are
    the memory clocks, which no file lists.
    """

    key: str
    name: str
    total_rails: "tuple[str, ...]"
    emc_mhz: "tuple[float, ...]" = ()
    emc_override: bool = False  # memory clock pinned through override.emc instead of the boot processor
    no_sensor: str = ""  # why there is no power sensor
    read_only: str = ""  # why nothing can be set


_VDD_IN = ("VDD_IN",)
_ORIN_RAILS = ("VDD_GPU_SOC", "VDD_CPU_CV", "VIN_SYS_5V0")
_XAVIER_RAILS = ("GPU", "CPU", "SOC", "CV", "VDDRQ", "SYS5V")
_NO_SENSOR = "The Jetson Nano 2GB has no power sensor."
_THOR = "Jetson Thor is supported read-only so far."
_EMC_NANO = (204.0, 408.0, 665.6, 800.0, 1065.6, 1331.2, 1600.0)
_EMC_TX2 = (204.0, 408.0, 665.6, 800.0, 1062.4, 1331.2, 1600.0, 1866.0)
_EMC_XAVIER = (204.0, 408.0, 665.6, 800.0, 1065.6, 1331.2, 1600.0, 1866.0, 2133.0)
_EMC_ORIN = (204.0, 665.6, 2133.0, 3199.0)

# The first whose pattern is in the model or compatible text: the more specific stand before the more general.
_BOARDS = {
    r"nano[ -]2gb|p3541": Board("nano-2gb", "Jetson Nano 2GB", (), _EMC_NANO, emc_override=True, no_sensor=_NO_SENSOR),
    r"thor|p3834|tegra264": Board("thor", "Jetson AGX Thor", ("VIN",), read_only=_THOR),
    r"orin[ -]nano|p3767-000[345]": Board("orin-nano", "Jetson Orin Nano", _VDD_IN, _EMC_ORIN),
    r"orin[ -]nx|p3767": Board("orin-nx", "Jetson Orin NX", _VDD_IN, _EMC_ORIN),
    r"agx[ -]orin|p3701|p3737": Board("agx-orin", "Jetson AGX Orin", _ORIN_RAILS, _EMC_ORIN),
    r"xavier[ -]nx|p3668": Board("xavier-nx", "Jetson Xavier NX", _VDD_IN, _EMC_XAVIER),
    r"agx[ -]xavier|jetson-agx|jetson-xavier|p2888|p2972": Board(
        "agx-xavier", "Jetson AGX Xavier", _XAVIER_RAILS, _EMC_XAVIER
    ),
    r"tx2[ -]nx|p3636": Board("tx2-nx", "Jetson TX2 NX", _VDD_IN, _EMC_TX2),
    r"tx2|quill|p3310|tegra186": Board("tx2", "Jetson TX2", _VDD_IN, _EMC_TX2),
    r"jetson[ -]nano|p3448|p3450|tegra210": Board("nano", "Jetson Nano", ("POM_5V_IN",), _EMC_NANO, emc_override=True),
}
KNOWN_TOTALS = tuple(dict.fromkeys(board.total_rails for board in _BOARDS.values() if board.total_rails))


def detect_board(sysfs: "Sysfs") -> "Board":
    """The board that the device tree names; one that is not in the table gets no assumptions."""
    model = sysfs.text_or_empty(MODEL_FILE)
    text = f"{model}\n{sysfs.text_or_empty(COMPATIBLE_FILE)}".lower()
    for pattern, board in _BOARDS.items():
        if re.search(pattern, text):
            return board
    return Board("unknown", model.strip("\0 \n") or "unknown Jetson", ())


def is_jetson(sysfs: "Sysfs") -> bool:
    """Whether the device tree or the release file says Tegra."""
    return "nvidia,tegra" in sysfs.text_or_empty(COMPATIBLE_FILE) or sysfs.exists(RELEASE_FILE)


def is_simulated(sysfs: "Sysfs") -> bool:
    """Whether the device tree says that this is a virtual board."""
    return VIRTUAL_COMPATIBLE in sysfs.text_or_empty(COMPATIBLE_FILE).split("\0")


def serial_number(sysfs: "Sysfs") -> str:
    """The serial number of the board, or nothing where it is not told (containers hide it)."""
    return sysfs.text_or_empty(SERIAL_FILE).strip("\0 \n")


def l4t_release(sysfs: "Sysfs") -> str:
    """The release of NVIDIA's Linux (R35.4.1), or nothing where it is not told."""
    found = re.search(r"#\s*R(\d+).*?REVISION:\s*([\d.]+)", sysfs.text_or_empty(RELEASE_FILE))
    return f"R{found[1]}.{found[2]}" if found else ""


def release_major(sysfs: "Sysfs") -> int:
    """The first number of the release, 0 where it is not told."""
    found = re.match(r"R(\d+)", l4t_release(sysfs))
    return int(found[1]) if found else 0


def nearest(table: "Collection[int]", value: float) -> int:
    """The entry that a value means: kernels and nvpmodel's own files spell clocks with rounding of their own."""
    return min(table, key=lambda entry: abs(entry - value))


class Caps(NamedTuple):
    """What a power mode allows at most; nothing named is nothing capped."""

    gpu_hz: "int | None" = None
    emc_hz: "int | None" = None
    cpu_khz: "Mapping[int, int]" = _NOTHING  # by a core of the cluster
    all_cpu_khz: "int | None" = None  # where the file does not say for which core
    cores_off: "frozenset[int]" = frozenset()

    def cluster_khz(self, cores: "Collection[int]") -> "int | None":
        """The lowest cap that holds for some of these cores."""
        named = [cap for core, cap in self.cpu_khz.items() if core in cores]
        return min((*named, self.all_cpu_khz) if self.all_cpu_khz is not None else named, default=None)


class NvpMode(NamedTuple):
    """One mode of the file: values by parameter and argument, as (``GPU``, ``MAX_FREQ``)."""

    id: int
    name: str
    values: "Mapping[tuple[str, str], str]"


class NvpConf(NamedTuple):
    """The whole file: the modes by number, and the path behind each argument."""

    modes: "Mapping[int, NvpMode]" = _NOTHING
    paths: "Mapping[tuple[str, str], str]" = _NOTHING
    default_id: "int | None" = None  # the mode of a board on which none was ever chosen

    def caps(self, mode_id: "int | None") -> "Caps":
        """What a mode caps; one that is not in the file (a custom one) caps nothing that we know of."""
        if mode_id is None or mode_id not in self.modes:
            return Caps()
        values = self.modes[mode_id].values
        cpu_khz: dict[int, int] = {}
        all_cpu_khz: int | None = None
        cores_off: set[int] = set()
        for (param, arg), text in values.items():
            core = re.fullmatch(r"CORE_([0-9]{1,4})", arg)
            if param == "CPU_ONLINE" and core and text == "0":
                cores_off.add(int(core[1]))
            cap = _cap(text)
            if param.startswith("CPU_") and arg == "MAX_FREQ" and cap:
                named = re.search(r"/(?:cpu|policy)([0-9]{1,4})/", self.paths.get((param, arg), ""))
                if named:
                    cpu_khz[int(named[1])] = cap
                else:
                    all_cpu_khz = min(cap, all_cpu_khz or cap)
        gpu_hz, emc_hz = (_cap(values.get((part, "MAX_FREQ"), "")) for part in ("GPU", "EMC"))
        return Caps(gpu_hz, emc_hz, cpu_khz, all_cpu_khz, frozenset(cores_off - {0}))

    def reboot_reasons(self, from_id: "int | None", to_id: int) -> "tuple[str, ...]":
        """The arguments that differ between two modes and only take effect after a reboot."""
        if from_id is None or from_id not in self.modes or to_id not in self.modes:
            return ()
        before, after = self.modes[from_id].values, self.modes[to_id].values
        shared = [key for key in before.keys() & after.keys() if key[1] in _REBOOT_ARGS]
        return tuple(sorted({key[1] for key in shared if _mask(before[key]) != _mask(after[key])}))


def parse_conf(text: str) -> "NvpConf":
    """Read the text of ``nvpmodel.conf``; raises ``InputError`` naming the line that makes no sense."""
    modes: dict[int, NvpMode] = {}
    paths: dict[tuple[str, str], str] = {}
    section, param = "", ""
    values: dict[tuple[str, str], str] = {}
    default_id: int | None = None
    for number, raw in enumerate(text.splitlines(), start=1):
        line = raw.split("#", 1)[0].strip()
        if line.startswith("<"):
            section, attributes = _header(line, number)
            if section == "PARAM":
                param = attributes.get("NAME", "")
            elif section == "PM_CONFIG" and re.fullmatch(r"[0-9]{1,6}", attributes.get("DEFAULT", "")):
                default_id = int(attributes["DEFAULT"])
            elif section == "POWER_MODEL":
                values = {}
                text_id = attributes.get("ID", "")
                if not re.fullmatch(r"[0-9]{1,6}", text_id):
                    raise InputError(f"Line {number} of nvpmodel.conf needs ID=number, not {text_id[:20]!r}.")
                mode_id = int(text_id)
                if mode_id in modes:
                    raise InputError(f"Line {number} of nvpmodel.conf defines mode {mode_id} again.")
                modes[mode_id] = NvpMode(mode_id, attributes.get("NAME", str(mode_id)), values)
            continue
        words = line.split()
        if section == "PARAM" and len(words) >= 2:
            paths[param, words[0]] = words[1]
        elif section == "POWER_MODEL" and words:
            if len(words) < 3:
                raise InputError(f"Line {number} of nvpmodel.conf is not 'PARAM ARG VALUE': {line[:60]!r}.")
            values[words[0], words[1]] = words[2]
    return NvpConf(modes, paths, default_id)


def active_id(sysfs: "Sysfs") -> "int | None":
    """The number of the active mode, or ``None`` where the board does not tell."""
    found = re.search(r"pmode:\s*([0-9]{1,6})", sysfs.text_or_empty(STATUS_FILE))
    return int(found[1]) if found else None


def _header(line: str, number: int) -> "tuple[str, dict[str, str]]":
    found = re.fullmatch(r"<\s*([A-Z_]+)\s*(.*?)\s*>", line)
    if not found:
        raise InputError(f"Line {number} of nvpmodel.conf is not a section header: {line[:60]!r}.")
    pairs = (word.partition("=") for word in found[2].split())
    return found[1], {key: value for key, _, value in pairs}


def _cap(text: str) -> "int | None":
    """A cap in the file's own unit; 0, -1 and the largest 32-bit number all mean none."""
    if not re.fullmatch(r"[0-9]{1,12}", text):
        return None
    value = int(text)
    return value if 0 < value < _NO_CAP else None


def _mask(text: str) -> "int | str":
    """A mask as a number, however it is spelled."""
    try:
        return int(text, 0)
    except ValueError:
        return text
