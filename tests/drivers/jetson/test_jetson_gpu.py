from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import jetson_trees as trees
import pytest

from underwatt.drivers.jetson.knobs import find_gpu, find_railgate
from underwatt.drivers.jetson.sysfs import Sysfs

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("name", trees.SETTABLE)
def test_the_gpu_is_found_among_other_nodes(tmp_path: Path, name: str) -> None:
    tree = trees.SETTABLE[name]
    gpu = find_gpu(Sysfs(trees.plant(tmp_path, tree)))
    assert gpu is not None
    assert gpu.folder == tree.gpu
    assert gpu.table() == tree.gpu_hz
    assert gpu.running_mhz() == pytest.approx(tree.gpu_hz[1] / 1e6)


def test_a_node_of_an_unheard_name_is_found_by_what_it_is(tmp_path: Path) -> None:
    trees.put(tmp_path, "sys/class/devfreq/odd.name/device/of_node/compatible", "x,y\0nvidia,ga10b\0")
    trees.put(tmp_path, "sys/class/devfreq/odd.name/available_frequencies", "2 1")
    gpu = find_gpu(Sysfs(tmp_path))
    assert gpu is not None
    assert gpu.folder == "sys/class/devfreq/odd.name"
    assert gpu.table() == (1, 2)


@pytest.mark.parametrize(
    "node",
    [
        "sys/devices/57000000.gpu/devfreq/57000000.gpu",
        "sys/devices/17000000.gp10b/devfreq/17000000.gp10b",
        "sys/devices/17000000.ga10b/devfreq_dev",
        "sys/devices/platform/bus@0/17000000.gpu/devfreq/17000000.gpu",
    ],
)
def test_known_places_outside_the_class(tmp_path: Path, node: str) -> None:
    trees.put(tmp_path, f"{node}/available_frequencies", "1 2")
    gpu = find_gpu(Sysfs(tmp_path))
    assert gpu is not None
    assert gpu.folder == node


def test_a_sleeping_gpu_is_not_found_but_its_switch_is(tmp_path: Path) -> None:
    trees.plant(tmp_path, trees.XAVIER_NX)
    shutil.rmtree(tmp_path / trees.XAVIER_NX.gpu)
    trees.put(tmp_path, "sys/devices/17000000.gv11b/railgate_enable", 1)
    assert find_gpu(Sysfs(tmp_path)) is None
    assert find_railgate(Sysfs(tmp_path)) == "sys/devices/17000000.gv11b/railgate_enable"


def test_pinning_raises_the_maximum_first_and_lowers_the_minimum_first(tmp_path: Path) -> None:
    sysfs = trees.KernelSysfs(trees.plant(tmp_path, trees.NANO))
    gpu = find_gpu(sysfs)
    assert gpu is not None
    gpu.pin(76_800_000)
    sysfs.writes.clear()
    gpu.pin(921_600_000)
    gpu.pin(153_600_000)
    assert [path.rsplit("/", 1)[1] for path, _ in sysfs.writes] == ["max_freq", "min_freq", "min_freq", "max_freq"]


def test_a_powered_down_gpu_has_no_clock(tmp_path: Path) -> None:
    sysfs = Sysfs(trees.plant(tmp_path, trees.NANO))
    gpu = find_gpu(sysfs)
    assert gpu is not None
    trees.put(tmp_path, f"{trees.NANO.gpu}/cur_freq", 0)
    assert gpu.running_mhz() is None
    (tmp_path / trees.NANO.gpu / "cur_freq").unlink()
    assert gpu.running_mhz() is None
