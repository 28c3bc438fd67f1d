from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import jetson_trees as trees
import pytest

from underwatt.drivers.jetson.device import JetsonDevice
from underwatt.drivers.jetson.sysfs import Presence, Sysfs
from underwatt.errors import NotPermittedError
from underwatt.records import Capability, PowerMode

if TYPE_CHECKING:
    from pathlib import Path


class Unprivileged(Sysfs):
    """A user without root: nothing may be written, debugfs may not even be entered."""

    def writable(self, path: str) -> bool:
        return False

    def presence(self, path: str) -> Presence:
        return Presence.HIDDEN if path.startswith("sys/kernel/debug/") else super().presence(path)

    def readable(self, path: str) -> bool:
        return not path.startswith("sys/kernel/debug/")

    def _pull(self, path: str) -> bytes:
        if not self.readable(path):
            raise PermissionError(13, "no")
        return super()._pull(path)


def listed(device: JetsonDevice) -> dict[str, Capability]:
    return {item.name: item for item in device.capabilities()}


def test_root_may_use_everything(tmp_path: Path) -> None:
    items = listed(JetsonDevice(trees.plant(tmp_path, trees.ORIN_AGX_JP5)))
    assert all(item.usable and not item.remedy for item in items.values())
    assert items["gpu_mhz"].detail == "114.75 to 1300.5 MHz, 13 values"
    assert items["cpu_cores"].detail == "1 to 12, 12 values"
    assert items["power"].detail == "total of VDD_GPU_SOC + VDD_CPU_CV + VIN_SYS_5V0"
    assert items["nvpmodel"].detail == "mode 0 (MAXN) is active"


@pytest.mark.parametrize("name", trees.SETTABLE)
def test_an_unprivileged_user_sees_every_knob_and_what_would_permit_it(tmp_path: Path, name: str) -> None:
    root = trees.plant(tmp_path, trees.SETTABLE[name])
    device = JetsonDevice(sysfs=Unprivileged(root))
    items = listed(device)
    for knob in ("cpu_cores", "cpu_mhz", "gpu_mhz", "mem_mhz"):
        assert device.space.knob(knob)
        assert not items[knob].usable
        assert "sudo" in items[knob].remedy
    assert "99-underwatt.rules" in items["gpu_mhz"].remedy
    assert "debugfs" in items["mem_mhz"].remedy
    before = trees.dump(root)
    for mode in (PowerMode(cpu_cores=1), device.space.lowest):
        with pytest.raises(NotPermittedError, match="may not set cpu_cores"):
            device.apply(mode)
    assert trees.dump(root) == before
    device.restore(device.snapshot())


def test_caps_are_named(tmp_path: Path) -> None:
    trees.plant(tmp_path, trees.ORIN_AGX_JP5)
    trees.put(tmp_path, "var/lib/nvpmodel/status", "pmode:0002")
    assert "within nvpmodel mode 2 30W" in listed(JetsonDevice(tmp_path))["gpu_mhz"].detail


def test_debugfs_that_is_not_mounted(tmp_path: Path) -> None:
    trees.plant(tmp_path, trees.ORIN_NANO)
    shutil.rmtree(tmp_path / "sys/kernel/debug")
    device = JetsonDevice(tmp_path)
    item = listed(device)["mem_mhz"]
    assert device.space.knob("mem_mhz") is None
    assert not item.usable
    assert "mount -t debugfs" in item.remedy


def test_memory_clocks_that_cannot_be_pinned(tmp_path: Path) -> None:
    trees.plant(tmp_path, trees.ORIN_NANO)
    shutil.rmtree(tmp_path / trees.BPMP)
    trees.put(tmp_path, "sys/kernel/debug/clk/clk_summary", "")
    item = listed(JetsonDevice(tmp_path))["mem_mhz"]
    assert not item.usable
    assert item.remedy


def test_an_unknown_board_without_root(tmp_path: Path) -> None:
    trees.plant(tmp_path, trees.ORIN_NANO)
    trees.put(tmp_path, "proc/device-tree/model", "New\0")
    trees.put(tmp_path, "proc/device-tree/compatible", "nvidia,tegra999\0")
    item = listed(JetsonDevice(sysfs=Unprivileged(tmp_path)))["mem_mhz"]
    assert not item.usable
    assert "sudo" in item.remedy


def test_a_container_without_sys(tmp_path: Path) -> None:
    trees.plant(tmp_path, trees.ORIN_NANO)
    shutil.rmtree(tmp_path / "sys")
    device = JetsonDevice(tmp_path)
    assert device.space.knobs == ()
    items = listed(device)
    assert not any(items[name].usable for name in ("cpu_cores", "gpu_mhz", "mem_mhz", "power", "temperature"))
    assert all(item.usable or item.remedy for item in items.values())
    assert device.read_state().running == PowerMode()
