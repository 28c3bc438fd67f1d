"""NVIDIA Jetson boards, read and set through the kernel's own files; no vendor program is run."""

from __future__ import annotations

from pathlib import Path

from underwatt.drivers.jetson.device import JetsonDevice
from underwatt.errors import NoDeviceError
from underwatt.helper.board_facts import is_jetson
from underwatt.helper.sysfs import Sysfs


class JetsonBackend:
    """Finds the Jetson that this process runs on; opens one under any directory."""

    name = "jetson"

    def __init__(self, root: str = "/") -> None:
        self._root = root

    def affinity(self) -> float:
        """Certain where the device tree or the release file says Tegra, none elsewhere."""
        return 1.0 if is_jetson(Sysfs(self._root)) else 0.0

    def find(self) -> tuple[str, ...]:
        """The board this runs on, if it is one."""
        return (self._root,) if self.affinity() else ()

    def open(self, where: str) -> JetsonDevice:
        """Open the board, or the directory that looks like one."""
        root = where or self._root
        if not Path(root).is_dir() or not is_jetson(Sysfs(root)):
            hint = "On a Jetson, check that /proc/device-tree is readable; elsewhere try --device virtual:nano."
            raise NoDeviceError(f"There is no Jetson at {root}.", hint=hint)
        return JetsonDevice(root)


backend = JetsonBackend()
