from __future__ import annotations

from typing import TYPE_CHECKING

import jetson_trees as trees
import pytest

from underwatt.drivers.jetson.knobs import Cpu, find_cpu, nearest_not_above
from underwatt.drivers.jetson.sysfs import Sysfs
from underwatt.errors import ModeError

if TYPE_CHECKING:
    from pathlib import Path


def cpu_of(root: Path, tree: trees.Tree) -> tuple[Cpu, trees.KernelSysfs]:
    sysfs = trees.KernelSysfs(trees.plant(root, tree))
    cpu = find_cpu(sysfs)
    assert cpu is not None
    return cpu, sysfs


@pytest.mark.parametrize("name", trees.ALL)
def test_clusters_and_tables(tmp_path: Path, name: str) -> None:
    tree = trees.ALL[name]
    cpu, _ = cpu_of(tmp_path, tree)
    assert cpu.cores == tree.cores
    assert [(cluster.cores, cluster.table()) for cluster in cpu.clusters()] == list(tree.clusters)
    assert cpu.online() == set(tree.cores)
    assert cpu.switchable == set(tree.cores) - {0}


def test_the_cluster_of_core_0_is_used_first(tmp_path: Path) -> None:
    cpu, _ = cpu_of(tmp_path, trees.TX2_NX)
    assert cpu.order() == (0, 3, 4, 5, 1, 2)


def test_core_0_stays_on(tmp_path: Path) -> None:
    cpu, sysfs = cpu_of(tmp_path, trees.TX2_NX)
    with pytest.raises(ModeError, match="Core 0"):
        cpu.switch(0, on=False)
    assert sysfs.writes == []


def test_a_cluster_is_reached_through_a_core_that_is_on(tmp_path: Path) -> None:
    cpu, _ = cpu_of(tmp_path, trees.ORIN_AGX_JP5)
    for core in (4, 5, 8, 9, 10, 11):
        cpu.switch(core, on=False)
    assert [(c.cores, c.folder.rsplit("/", 2)[1]) for c in cpu.clusters()] == [
        ((0, 1, 2, 3), "cpu0"),
        ((4, 5, 6, 7), "cpu6"),
    ]
    assert cpu.online() == {0, 1, 2, 3, 6, 7}


def test_a_core_without_a_switch_is_on(tmp_path: Path) -> None:
    trees.plant(tmp_path, trees.NANO)
    for core in (0, 1):
        (tmp_path / f"{trees.CPU}/cpu{core}/online").unlink()
    cpu = find_cpu(Sysfs(tmp_path))
    assert cpu is not None
    assert cpu.switchable == {2, 3}
    assert cpu.online() == {0, 1, 2, 3}


def test_what_the_kernel_does_not_tell_is_none(tmp_path: Path) -> None:
    cpu, _ = cpu_of(tmp_path, trees.NANO)
    assert cpu.running_mhz() == pytest.approx(403.2)
    (tmp_path / f"{trees.CPU}/cpufreq/policy0/scaling_cur_freq").unlink()
    (tmp_path / f"{trees.CPU}/cpu2/online").unlink()
    assert cpu.running_mhz() is None
    assert cpu.running_cores() is None
    assert find_cpu(Sysfs(tmp_path / "nowhere")) is None


@pytest.mark.parametrize(("value", "cap", "expected"), [(25, None, 20), (5, None, 10), (30, None, 30), (30, 29, 20)])
def test_nearest_not_above(value: int, cap: int | None, expected: int) -> None:
    assert nearest_not_above((30, 10, 20), value, cap) == expected
