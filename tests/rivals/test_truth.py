from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from test_as_you_go import COST, board, settings_of

from underwatt.device.registry import open_device
from underwatt.predict.base import SettingArray
from underwatt.records import PowerMode, Setting
from underwatt.rivals.compare import truth_of

if TYPE_CHECKING:
    from pathlib import Path


def test_the_truth_of_a_virtual_board_is_its_own() -> None:
    device, _ = board()
    candidates = settings_of(device)
    truth = truth_of(device, candidates, COST)
    assert truth is not None
    assert truth.name == "simulated truth"
    for row in np.random.default_rng(0).choice(len(candidates), 30, replace=False):
        setting = candidates[int(row)]
        if setting.batch_size == 512:
            assert np.isnan(truth.step_s[row])
            continue
        assert truth.step_s[row] == pytest.approx(device.board.true_step_s(COST, setting.mode, setting.batch_size))
        assert truth.power_w[row] == pytest.approx(device.board.true_power_w(COST, setting.mode, setting.batch_size))


def test_knobs_that_are_left_alone_stay_as_they_are() -> None:
    device, _ = board()
    setting = Setting(PowerMode(gpu_mhz=921.6), 8)
    truth = truth_of(device, SettingArray.of([setting]), COST)
    assert truth is not None
    assert truth.step_s[0] == pytest.approx(device.board.true_step_s(COST, setting.mode, 8))


def test_a_replayed_table_knows_what_it_holds(tmp_path: Path) -> None:
    table = tmp_path / "table.csv"
    table.write_text("cores,cpu_mhz,gpu_mhz,mem_mhz,time_ms,power_w\n2,500,900,2000,100,5\n4,500,900,2000,80,6\n")
    modes = [PowerMode(cores, 500.0, 900.0, 2000.0) for cores in (2, 3, 4)]
    candidates = SettingArray.of([Setting(mode, 16) for mode in modes])
    truth = truth_of(open_device(f"replay:{table}"), candidates, None)
    assert truth is not None
    assert truth.name == "recorded table"
    assert truth.step_s.tolist() == pytest.approx([0.1, np.nan, 0.08], nan_ok=True)
    assert truth.power_w.tolist() == pytest.approx([5, np.nan, 6], nan_ok=True)


def test_nobody_knows_the_truth_otherwise() -> None:
    device, _ = board()
    candidates = settings_of(device, (8,))
    assert truth_of(None, candidates, COST) is None
    assert truth_of(device, candidates, None) is None
