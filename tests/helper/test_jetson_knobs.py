from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import jetson_trees as trees
import pytest

from underwatt.errors import ApplyError, ModeError
from underwatt.helper.board_facts import detect_board
from underwatt.helper.knobs import (
    Cpu,
    Emc,
    find_cpu,
    find_emc,
    find_gpu,
    find_railgate,
    nearest_not_above,
    within_bounds,
)
from underwatt.helper.sysfs import Presence, Sysfs, Writes

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
        cpu.switch(Writes(sysfs), 0, on=False)
    assert sysfs.writes == []


def test_a_cluster_is_reached_through_a_core_that_is_on(tmp_path: Path) -> None:
    cpu, sysfs = cpu_of(tmp_path, trees.ORIN_AGX_JP5)
    for core in (4, 5, 8, 9, 10, 11):
        cpu.switch(Writes(sysfs), core, on=False)
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


@pytest.mark.parametrize(
    ("value", "cap", "expected"), [(25, None, 20), (5, None, 10), (30, None, 30), (30, 24, 20), (30, 29, 30)]
)
def test_nearest_not_above(value: int, cap: int | None, expected: int) -> None:
    assert nearest_not_above((30, 10, 20), value, cap) == expected


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
    gpu.pin(Writes(sysfs), 76_800_000)
    sysfs.writes.clear()
    gpu.pin(Writes(sysfs), 921_600_000)
    gpu.pin(Writes(sysfs), 153_600_000)
    assert [path.rsplit("/", 1)[1] for path, _ in sysfs.writes] == ["max_freq", "min_freq", "min_freq", "max_freq"]


def test_a_powered_down_gpu_has_no_clock(tmp_path: Path) -> None:
    sysfs = Sysfs(trees.plant(tmp_path, trees.NANO))
    gpu = find_gpu(sysfs)
    assert gpu is not None
    for reads in (0, -1):
        trees.put(tmp_path, f"{trees.NANO.gpu}/cur_freq", reads)
        assert gpu.running_mhz() is None
    (tmp_path / trees.NANO.gpu / "cur_freq").unlink()
    assert gpu.running_mhz() is None


MHZ = 1_000_000


def emc_of(sysfs: Sysfs) -> Emc:
    emc = find_emc(sysfs, detect_board(sysfs))
    assert emc is not None
    return emc


@pytest.mark.parametrize("name", trees.SETTABLE)
def test_clocks_stay_within_the_bounds(tmp_path: Path, name: str) -> None:
    tree = trees.SETTABLE[name]
    emc = emc_of(Sysfs(trees.plant(tmp_path, tree)))
    table = emc.table()
    assert table == tuple(sorted(set(table)))
    assert table[0] == 204 * MHZ
    assert table[-1] == tree.emc_bounds[1]
    assert emc.files == tree.emc_files


def test_agx_boards_have_the_published_number_of_clocks(tmp_path: Path) -> None:
    orin = emc_of(Sysfs(trees.plant(tmp_path / "orin", trees.ORIN_AGX_JP5)))
    xavier = emc_of(Sysfs(trees.plant(tmp_path / "xavier", trees.XAVIER_AGX)))
    assert orin.table() == (204 * MHZ, 665_600_000, 2133 * MHZ, 3199 * MHZ)
    assert len(xavier.table()) == 9


def test_the_cap_of_nvpmodel_holds(tmp_path: Path) -> None:
    trees.plant(tmp_path, trees.ORIN_AGX_JP5)
    trees.put(tmp_path, "sys/kernel/nvpmodel_emc_cap/emc_iso_cap", 2_133_000_000)
    assert emc_of(Sysfs(tmp_path)).table()[-1] == 2133 * MHZ


@pytest.mark.parametrize("name", ["nano", "orin-agx-jp6"])
def test_pinning_locks_first(tmp_path: Path, name: str) -> None:
    tree = trees.SETTABLE[name]
    sysfs = trees.KernelSysfs(trees.plant(tmp_path, tree))
    emc = emc_of(sysfs)
    emc.pin(Writes(sysfs), 204 * MHZ)
    rate, lock = tree.emc_files
    assert sysfs.writes == [(lock, "1"), (rate, "204000000")]
    assert emc.running_mhz() == 204


def test_a_rounded_rate_is_an_error(tmp_path: Path) -> None:
    sysfs = trees.KernelSysfs(trees.plant(tmp_path, trees.ORIN_NANO))
    sysfs.round_to[trees.ORIN_NANO.emc_files[0]] = 665_600_000
    writes = Writes(sysfs)
    emc_of(sysfs).pin(writes, 2_133_000_000)
    with pytest.raises(ApplyError, match="asked for 2133000000 and took 665600000"):
        writes.settle()


def test_without_debugfs_there_is_no_knob_but_a_hidden_one_stays(tmp_path: Path) -> None:
    class Hidden(Sysfs):
        def presence(self, path: str) -> Presence:
            return Presence.HIDDEN if "/debug/" in path else super().presence(path)

        def _pull(self, path: str) -> bytes:
            if "/debug/" in path:
                raise PermissionError(13, "no")
            return super()._pull(path)

    root = trees.plant(tmp_path, trees.ORIN_NANO)
    hidden = emc_of(Hidden(root))
    assert [hz / MHZ for hz in hidden.table()] == [204, 665.6, 2133, 3199]
    assert hidden.running_mhz() is None
    (root / trees.ORIN_NANO.emc_files[0]).unlink()
    assert find_emc(Sysfs(root), detect_board(Sysfs(root))) is None


def test_bounds() -> None:
    known = (204.0, 665.6, 2133.0)
    assert within_bounds(known, None, None, None) == (204 * MHZ, 665_600_000, 2133 * MHZ)
    assert within_bounds(known, 300 * MHZ, 2_132_999_999, None) == (665_600_000, 2_132_999_999)
    assert within_bounds(known, None, 1600 * MHZ, None) == (204 * MHZ, 665_600_000, 1600 * MHZ)
    assert within_bounds(known, None, None, 100 * MHZ) == (204 * MHZ,)
    assert within_bounds((), 200, 1000, None) == (200, 1000)
    assert within_bounds((), None, None, None) == ()
