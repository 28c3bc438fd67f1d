from __future__ import annotations

from typing import TYPE_CHECKING

import jetson_trees as trees
import pytest

from underwatt.drivers.jetson.boards import detect_board, is_jetson, l4t_release, serial_number
from underwatt.drivers.jetson.sysfs import Sysfs

if TYPE_CHECKING:
    from pathlib import Path

KEYS = {"xavier-agx": "agx-xavier", "orin-agx-jp5": "agx-orin", "orin-agx-jp6": "agx-orin"}


@pytest.mark.parametrize("name", trees.ALL)
def test_each_board_is_told_from_the_others(tmp_path: Path, name: str) -> None:
    sysfs = Sysfs(trees.plant(tmp_path, trees.ALL[name]))
    assert is_jetson(sysfs)
    assert detect_board(sysfs).key == KEYS.get(name, name)


@pytest.mark.parametrize(
    ("model", "compatible", "key"),
    [
        ("", "nvidia,p3737-0000+p3701-0005\0nvidia,tegra234\0", "agx-orin"),
        ("", "nvidia,p3768-0000+p3767-0000\0nvidia,tegra234\0", "orin-nx"),
        ("", "nvidia,p3768-0000+p3767-0003\0nvidia,tegra234\0", "orin-nano"),
        ("NVIDIA Jetson Orin NX Engineering Reference\0", "nvidia,tegra234\0", "orin-nx"),
        ("quill\0", "nvidia,p2597-0000+p3310-1000\0nvidia,tegra186\0", "tx2"),
        ("", "nvidia,jetson-xavier-nx\0nvidia,tegra194\0", "xavier-nx"),
        ("NVIDIA Jetson AGX Xavier Industrial\0", "nvidia,tegra194\0", "agx-xavier"),
        ("A board of tomorrow\0", "nvidia,tegra999\0", "unknown"),
        ("", "", "unknown"),
    ],
)
def test_variants(tmp_path: Path, model: str, compatible: str, key: str) -> None:
    trees.put(tmp_path, "proc/device-tree/model", model)
    trees.put(tmp_path, "proc/device-tree/compatible", compatible)
    assert detect_board(Sysfs(tmp_path)).key == key


def test_release_and_serial(tmp_path: Path) -> None:
    sysfs = Sysfs(trees.plant(tmp_path, trees.ORIN_AGX_JP5))
    assert l4t_release(sysfs) == "R35.4.1"
    assert serial_number(sysfs) == "1420921055555"


def test_a_plain_machine_is_no_jetson(tmp_path: Path) -> None:
    assert not is_jetson(Sysfs(tmp_path))
    assert l4t_release(Sysfs(tmp_path)) == serial_number(Sysfs(tmp_path)) == ""
