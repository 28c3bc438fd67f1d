"""NVIDIA Jetson boards, read and set through the kernel's own files; no vendor program is run."""

from __future__ import annotations

import os
from pathlib import Path

from underwatt.drivers.jetson.device import JetsonDevice
from underwatt.errors import NoDeviceError
from underwatt.helper import SOCKET
from underwatt.helper.board_facts import is_jetson
from underwatt.helper.knobs import CPU_FOLDER
from underwatt.helper.sysfs import Sysfs

_LIMITS = (f"{CPU_FOLDER}/cpu*/cpufreq/scaling_max_freq", "sys/class/devfreq/*/max_freq")


def through_helper() -> bool:
    """Whether this user sets the board by its helper: there is one to speak to, and nothing to be set without it."""
    sysfs = Sysfs("/")
    return os.access(SOCKET, os.W_OK) and not any(sysfs.settable(p) for limit in _LIMITS for p in sysfs.glob(limit))


class JetsonBackend:
    """Finds the Jetson that this process runs on; opens one under any directory."""

    name = "jetson"

    def __init__(self, root: str = "/") -> None:
        self._root = root

    def affinity(self) -> float:
        """Certain where the device tree or the release file says Tegra, none elsewhere."""
        return 1.0 if is_jetson(Sysfs(self._root)) else 0.0

    def find(self) -> tuple[str, ...]:
        """The board this runs on, if it is one and is not found as its helper's."""
        return (self._root,) if self.affinity() and not through_helper() else ()

    def open(self, where: str) -> JetsonDevice:
        """Open the board, or the directory that looks like one."""
        root = where or self._root
        if not Path(root).is_dir() or not is_jetson(Sysfs(root)):
            hint = "On a Jetson, check that /proc/device-tree is readable; elsewhere try --device virtual:nano."
            raise NoDeviceError(f"There is no Jetson at {root}.", hint=hint)
        return JetsonDevice(root)


backend = JetsonBackend()
