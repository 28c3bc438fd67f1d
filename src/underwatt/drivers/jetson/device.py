"""A Jetson as a device: what ``helper/`` finds, reads and sets, as Underwatt's records."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from underwatt.device.space import Knob, ModeSpace
from underwatt.device.timing import Clock, SystemClock
from underwatt.helper.board import JetsonBoard
from underwatt.helper.board_facts import (
    COMPATIBLE_FILE,
    CONF_FILE,
    MODEL_FILE,
    RELEASE_FILE,
    SERIAL_FILE,
    STATUS_FILE,
    l4t_release,
)
from underwatt.helper.sysfs import Sysfs
from underwatt.records import Capability, DeviceInfo, DeviceState, PowerMode, PowerSample

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from underwatt.helper.board import Identity
    from underwatt.helper.board_facts import NvpConf


def info_of(who: Identity, backend: str, address: str) -> DeviceInfo:
    """A board as Underwatt knows devices; it is the same one, however it is reached."""
    return DeviceInfo(
        backend=backend,
        name=who.name,
        id=who.id,
        address=address,
        simulated=who.simulated,
        software={"l4t": who.release} if who.release else {},
        power_of=who.power_of,
    )


class JetsonDevice:
    """Any Jetson, by the files under ``root``: ``/`` on the board itself, a directory in tests and simulations."""

    def __init__(self, root: str | Path = "/", clock: Clock | None = None, sysfs: Sysfs | None = None) -> None:
        self.clock: Clock = clock or SystemClock()
        self._board = JetsonBoard(sysfs or Sysfs(Path(root).absolute()), self.clock.now_s)
        self.info = info_of(self._board.identity, "jetson", self._board.identity.address)
        self._space = ModeSpace([])
        self._space_of: Mapping[str, tuple[float, ...]] = {}

    @property
    def space(self) -> ModeSpace:
        """The knobs of this board, within the caps of its active nvpmodel mode; follows a mode switch."""
        values = self._board.values()
        if values is not self._space_of:
            self._space = ModeSpace([Knob(name, entries) for name, entries in values.items()])
            self._space_of = values
        return self._space

    def stock_modes(self) -> dict[str, PowerMode]:
        """The modes of nvpmodel.conf, each with every knob at its cap."""
        return {name: PowerMode.of(mode) for name, mode in self._board.stock_modes().items()}

    def capabilities(self) -> tuple[Capability, ...]:
        """Its knobs and sensors, which of them this user may use, and what would permit the others."""
        return tuple(Capability(*ability) for ability in self._board.abilities())

    def read_power(self) -> PowerSample:
        """Total power now; raises ``SensorError`` rather than guess."""
        power_w = self._board.power_w()
        return PowerSample(self.clock.now_s(), power_w)

    def read_state(self) -> DeviceState:
        """Clocks as they run, rails, temperatures, throttling; what cannot be read is left out."""
        state = self._board.state()
        return DeviceState(PowerMode.of(state.running), state.rails_w, state.temperatures_c, state.throttle_reasons)

    def apply(self, mode: PowerMode) -> None:
        """Set the knobs that ``mode`` names and check that they took; what fails midway is put back first."""
        self._board.apply(mode.knobs())

    def snapshot(self, mode: PowerMode | None = None) -> Mapping[str, str]:  # noqa: ARG002 - always all of it
        """The text of every file that ``apply`` could change, and the active nvpmodel mode."""
        return self._board.snapshot()

    def restore(self, snapshot: Mapping[str, str]) -> None:
        """Put back what ``snapshot`` found; may be repeated."""
        self._board.restore(snapshot)

    def foreign_changes(self) -> tuple[str, ...]:
        """What others have changed since it was set here, each said once; cheap enough for every few seconds."""
        return self._board.foreign_changes()

    def kernel_files(self) -> dict[str, str]:
        """The files that tell what this board can do, and nothing of whose it is."""
        return collect(self._board.sysfs, self._board.conf)

    def held_by_others(self) -> tuple[str, ...]:
        """Clocks that are pinned, idle states that are off, the fan, and services that may change them."""
        return held_by_others(self._board.sysfs, self.kernel_files())

    def close(self) -> None:
        """Nothing is held open."""


# The kernel files that others may see: those that tell what a board can do, and nothing of whose it is. What is taken
# is listed here, file by file; whatever else lies on a board is never looked at. The vendor's own text (release, power
# modes) is not copied: what it says is written again in our words.

_CPU, _DEBUG = "sys/devices/system/cpu", "sys/kernel/debug"
_CLOCK = ("available_frequencies", "min_freq", "max_freq", "cur_freq", "governor")
_SHARED = tuple(  # by the cores of a cluster: taken from the first of them
    f"{_CPU}/cpu[0-9]*/cpufreq/{name}"
    for name in (*(f"scaling_{name}" for name in _CLOCK), "cpuinfo_min_freq", "cpuinfo_max_freq", "related_cpus")
)
_TAKEN = (
    MODEL_FILE,
    COMPATIBLE_FILE,
    STATUS_FILE,
    f"{_CPU}/cpu[0-9]*/online",
    f"{_CPU}/cpu[0-9]*/cpuidle/state*/disable",
    *(f"sys/class/devfreq/*/{name}" for name in _CLOCK),
    "sys/class/devfreq/*/device/of_node/name",
    "sys/class/devfreq/*/device/of_node/compatible",
    f"{_DEBUG}/bpmp/debug/clk/emc/*rate*",
    f"{_DEBUG}/clk/override.emc/clk_*",
    f"{_DEBUG}/tegra_bwmgr/emc_*_rate",
    "sys/kernel/nvpmodel_emc_cap/emc_iso_cap",
    "sys/kernel/nvpmodel_clk_cap/emc",
    "sys/bus/i2c/drivers/ina3221x/*/iio:device*/rail_name_*",
    "sys/bus/i2c/drivers/ina3221x/*/iio:device*/in_*_input",
    "sys/bus/i2c/drivers/ina3221x/*/of_node/channel@*/ti,rail-name",
    *(
        f"sys/bus/i2c/drivers/ina3221/*/hwmon/hwmon*/{name}"
        for name in ("name", "in[0-9]*_label", "in[0-9]*_input", "curr[0-9]*_input", "update_interval", "samples")
    ),
    *(f"sys/class/hwmon/hwmon*/{name}" for name in ("name", "power1_input", "power1_label", "in1_label", "pwm1")),
    "sys/class/hwmon/hwmon*/oc[0-9]*_event_cnt",
    "sys/class/thermal/thermal_zone*/type",
    "sys/class/thermal/thermal_zone*/temp",
    "sys/class/thermal/cooling_device*/type",
    "sys/class/thermal/cooling_device*/cur_state",
)
_LONGEST = 2000  # the longest table has some 40 clocks
# What tells a single board; should a listed file hold any of it, that file is left out.
_IDENTITY = (SERIAL_FILE, "etc/machine-id", "sys/class/net/*/address")
_VENDORS_MODES = re.compile(
    r"(?:MODE_)?\d{1,3}W(?:_(?:ALL|DESKTOP|\dCORE))?|MAXN(?:_SUPER)?|MAXQ|MAXP_CORE_(?:ALL|ARM|DENVER)"
)
_CAPS = re.compile(r"CPU_ONLINE|CPU_\w{1,20}|GPU|EMC|[TF][PB]\w{0,20}")
_SERVICES = {"jtop": "jetson-stats", "nvfancontrol": "NVIDIA's fan control", "nvpmodel": "nvpmodel"}


def mode_name(name: str) -> str:
    """The name of a power mode, where the vendor gave it; one that somebody made up may tell who."""
    return name if _VENDORS_MODES.fullmatch(name) else "CUSTOM"


def collect(sysfs: Sysfs, conf: NvpConf) -> dict[str, str]:
    """The texts of the listed files that this user may read, by path."""
    secrets = [text for path in _found(sysfs, _IDENTITY) if len(text := sysfs.text_or_empty(path).strip("\0 \n")) > 5]
    paths = [*_found(sysfs, _TAKEN), *_first_of_clusters(sysfs)]
    files = {path: sysfs.text_or_empty(path) for path in paths}
    if release := l4t_release(sysfs):
        major, _, revision = release[1:].partition(".")
        files[RELEASE_FILE] = f"# R{major} (release), REVISION: {revision}\n"
    if conf.modes:
        files[CONF_FILE] = conf_text(conf)

    def is_plain(text: str) -> bool:
        return text.isascii() and not any(secret.lower() in text.lower() for secret in secrets)

    return {p: t for p, t in sorted(files.items()) if t and is_plain(t) and (len(t) <= _LONGEST or p == CONF_FILE)}


def _found(sysfs: Sysfs, patterns: tuple[str, ...]) -> list[str]:
    return [path for pattern in patterns for path in sysfs.glob(pattern)]


def _first_of_clusters(sysfs: Sysfs) -> Iterator[str]:
    for path in _found(sysfs, _SHARED):
        core = re.search(r"/cpu(\d+)/", path)
        related = sysfs.text_or_empty(f"{path.rsplit('/', 1)[0]}/related_cpus").split()
        if core and (not related or core[1] == related[0]):
            yield path


def conf_text(conf: NvpConf) -> str:
    """The power modes in nvpmodel's grammar and our words: caps, cores and what needs a reboot; no other line."""
    lines: list[str] = []
    for (param, arg), path in sorted(conf.paths.items()):
        if _CAPS.fullmatch(param) and re.fullmatch(r"/sys/[\w/.@:-]+", path):
            lines += [f"< PARAM TYPE=FILE NAME={param} >", f"{arg} {path}"]
    for number, mode in sorted(conf.modes.items()):
        lines.append(f"< POWER_MODEL ID={number} NAME={mode_name(mode.name)} >")
        for (param, arg), value in sorted(mode.values.items()):
            if _CAPS.fullmatch(param) and re.fullmatch(r"\w{1,20}", arg) and re.fullmatch(r"-?\w{1,20}", value):
                lines.append(f"{param} {arg} {value}")
    if conf.default_id is not None:
        lines.append(f"< PM_CONFIG DEFAULT={conf.default_id} >")
    return "\n".join(lines) + "\n"


def held_by_others(sysfs: Sysfs, files: Mapping[str, str]) -> tuple[str, ...]:
    """What others hold of the knobs now, and who they may be, in sentences."""
    said = [*_pinned(files), *_fan(files)]
    names = {sysfs.text_or_empty(path).strip() for path in sysfs.glob("proc/[0-9]*/comm")}
    said += [f"{what} is running, and may set clocks or the fan." for name, what in _SERVICES.items() if name in names]
    return tuple(said)


def _pinned(files: Mapping[str, str]) -> Iterator[str]:
    pinned = []
    for path, low in files.items():
        if path.endswith("min_freq") and "cpuinfo" not in path:
            high = files.get(f"{path.removesuffix('min_freq')}max_freq")
            table = files.get(f"{path.removesuffix('min_freq')}available_frequencies", "").split()
            if high == low and len(table) > 1:
                pinned.append("CPU" if "cpufreq" in path else "GPU")
    if pinned:
        yield f"The {' and '.join(sorted(set(pinned)))} clock is pinned: by jetson_clocks, or by another tool."
    off = [text.strip() for path, text in files.items() if path.endswith("/disable")]
    if off and all(text == "1" for text in off):
        yield (
            "Idle states of the CPU are switched off, as jetson_clocks does: the board draws more at rest, "
            "and pauses save less. `sudo jetson_clocks --restore` or a restart switches them on."
        )
    locks = [text for path, text in files.items() if path.endswith(("mrq_rate_locked", "override.emc/clk_state"))]
    if any(text.strip() == "1" for text in locks):
        yield "The memory clock is locked: by jetson_clocks, or by another tool."


def _fan(files: Mapping[str, str]) -> Iterator[str]:
    for path, text in files.items():
        if path.endswith("/pwm1") and text.strip().isdecimal():
            yield f"The fan runs at {100 * min(255, int(text)) / 255:.0f}%; it is never touched."
