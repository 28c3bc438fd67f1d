from __future__ import annotations

from typing import TYPE_CHECKING

import jetson_trees as trees
import pytest

from underwatt.drivers.jetson.boards import detect_board
from underwatt.drivers.jetson.knobs import Emc, find_emc, within_bounds
from underwatt.drivers.jetson.sysfs import Presence, Sysfs
from underwatt.errors import ApplyError

if TYPE_CHECKING:
    from pathlib import Path

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
    emc.pin(204 * MHZ)
    rate, lock = tree.emc_files
    assert sysfs.writes == [(lock, "1"), (rate, "204000000")]
    assert emc.running_mhz() == 204


def test_a_rounded_rate_is_an_error(tmp_path: Path) -> None:
    sysfs = trees.KernelSysfs(trees.plant(tmp_path, trees.ORIN_NANO))
    sysfs.round_to[trees.ORIN_NANO.emc_files[0]] = 665_600_000
    with pytest.raises(ApplyError, match="asked for 2133000000 and took 665600000"):
        emc_of(sysfs).pin(2_133_000_000)


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
