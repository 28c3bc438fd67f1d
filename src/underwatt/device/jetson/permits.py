"""What this user may read and set on a Jetson, and what would permit the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING

from underwatt.device.jetson.emc import DEBUGFS
from underwatt.device.jetson.gpu import find_railgate
from underwatt.device.jetson.sysfs import Presence
from underwatt.errors import ApplyError, DeviceError, NotPermittedError
from underwatt.records import Capability

if TYPE_CHECKING:
    from underwatt.device.jetson.boards import Board
    from underwatt.device.jetson.hardware import Hardware
    from underwatt.device.jetson.power import PowerMonitor
    from underwatt.device.jetson.sysfs import Sysfs
    from underwatt.device.jetson.thermal import Thermal
    from underwatt.device.space import Knob, ModeSpace

JETSON_KNOBS = ("cpu_cores", "cpu_mhz", "gpu_mhz", "mem_mhz")
_UDEV = {
    "cpu_cores": 'SUBSYSTEM=="cpu", RUN+="/bin/sh -c \'chgrp underwatt /sys%p/online; chmod g+w /sys%p/online\'"',
    "cpu_mhz": 'SUBSYSTEM=="cpu", RUN+="/bin/sh -c \'cd /sys%p/cpufreq && chgrp underwatt scaling_m*_freq && '
    "chmod g+w scaling_m*_freq'\"",
    "gpu_mhz": 'SUBSYSTEM=="devfreq", RUN+="/bin/sh -c \'cd /sys%p && chgrp underwatt m??_freq && '
    "chmod g+w m??_freq'\"",
}


def blocked_files(sysfs: Sysfs, files: tuple[str, ...]) -> tuple[str, ...]:
    """The files that this user may not both read and write."""
    return tuple(path for path in files if not (sysfs.writable(path) and sysfs.readable(path)))


def remedy_for(knob: str) -> str:
    """What permits setting a knob: sudo, or a rule for a group where the file lets itself be given one."""
    if knob == "mem_mhz":
        return "Run with sudo: the memory clock is set through debugfs, which only root may enter."
    return (
        "Run with sudo, or let a group named underwatt set it: put "
        f"{_UDEV[knob]} into /etc/udev/rules.d/99-underwatt.rules and reboot; in a container, mount /sys writable."
    )


def require_writable(sysfs: Sysfs, hardware: Hardware, knobs: tuple[str, ...]) -> None:
    """Raise ``NotPermittedError`` unless every file that these knobs write may be read and written.

    One that is gone is an ``ApplyError``: no right would bring it back.
    """
    for knob in knobs:
        files = hardware.files_for(knob)
        gone = [path for path in files if sysfs.presence(path) is Presence.ABSENT]
        if gone:
            raise ApplyError(
                f"Cannot set {knob}: {sysfs.full(gone[0])} is missing.",
                hint="Its driver may have been unloaded; 'underwatt devices' shows what is there.",
            )
        blocked = blocked_files(sysfs, files)
        if blocked:
            more = f" and {len(blocked) - 1} more" if len(blocked) > 1 else ""
            raise NotPermittedError(
                f"This user may not set {knob}: {sysfs.full(blocked[0])}{more} cannot be written.",
                hint=remedy_for(knob),
            )


def knob_capabilities(
    sysfs: Sysfs, board: Board, hardware: Hardware, space: ModeSpace, capped: str
) -> tuple[Capability, ...]:
    """One entry for each knob a Jetson can have, also for those this one lacks."""
    found = []
    for name in JETSON_KNOBS:
        knob = space.knob(name)
        if knob is None:
            detail, remedy = _why_missing(sysfs, board, name)
            found.append(Capability(name, "knob", usable=False, detail=detail, remedy=remedy))
            continue
        blocked = blocked_files(sysfs, hardware.files_for(name))
        detail = f"{_extent(knob)}{f' ({capped})' if capped else ''}"
        found.append(Capability(name, "knob", not blocked, detail, remedy_for(name) if blocked else ""))
    return tuple(found)


def sensor_capabilities(monitor: PowerMonitor, thermal: Thermal) -> tuple[Capability, ...]:
    """Power and temperature, tried by reading them."""
    try:
        monitor.total_w()
        rails = " + ".join(rail.name for rail in monitor.total_rails())
        power = Capability("power", "sensor", usable=True, detail=f"total of {rails}")
    except DeviceError as exc:
        power = Capability("power", "sensor", usable=False, detail=exc.message, remedy=exc.hint)
    zones = ", ".join(thermal.temperatures_c())
    temperature = Capability(
        "temperature",
        "sensor",
        usable=bool(zones),
        detail=zones or "No thermal zone can be read.",
        remedy="" if zones else "In a container, mount /sys.",
    )
    return power, temperature


def _extent(knob: Knob) -> str:
    low, high, count = knob.values[0], knob.values[-1], len(knob.values)
    unit = "" if knob.name == "cpu_cores" else " MHz"
    return f"{low:g}{unit}" if count == 1 else f"{low:g} to {high:g}{unit}, {count} values"


def _why_missing(sysfs: Sysfs, board: Board, name: str) -> tuple[str, str]:
    """Why a knob is not there, and what may bring it."""
    if board.read_only:
        return board.read_only, "Set its mode with nvpmodel; Underwatt measures what it draws."
    if name == "gpu_mhz":
        gate = find_railgate(sysfs)
        wake = f"echo 0 | sudo tee {sysfs.full(gate)}" if gate else "start any CUDA program"
        return "No devfreq node of a GPU was found; it may be powered down.", f"Wake it: {wake}."
    if name == "mem_mhz":
        if sysfs.presence(f"{DEBUGFS}/clk") is Presence.ABSENT:
            return "debugfs is not mounted.", "Mount it: sudo mount -t debugfs none /sys/kernel/debug."
        if sysfs.presence(f"{DEBUGFS}/clk") is Presence.HIDDEN:
            return "Only root may see the memory clocks of this board.", remedy_for(name)
        return "This board's memory clocks are not known or cannot be pinned.", "The other knobs still work."
    return "The kernel offers no such control here.", "In a container, mount /sys."
