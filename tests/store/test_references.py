from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from underwatt.predict.base import SettingArray
from underwatt.predict.fewshot import FewShot
from underwatt.store.exchange import builtin_reference

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "make_references.py"
BUILTIN = ROOT / "src" / "underwatt" / "store" / "builtin"


def test_every_reference_says_that_it_is_simulated() -> None:
    boards = {path.name.split("_")[1] for path in BUILTIN.glob("simulated_*.csv")}
    assert {"nano", "orin-agx"} <= boards
    for profile in map(builtin_reference, boards):
        assert profile.device.simulated
        assert "simulated" in profile.workload.name
        assert len(profile.usable()) >= 100


def test_references_are_what_the_virtual_boards_give(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("make_references", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.main(["--out", str(tmp_path)]) == 0
    packaged = Path(script.OUT)
    assert {p.name for p in tmp_path.iterdir()} == {p.name for p in packaged.glob("*.csv")}
    for path in tmp_path.iterdir():
        assert path.read_text() == (packaged / path.name).read_text(), "run benchmarks/make_references.py again"


@pytest.mark.parametrize(("board", "other"), [("nano", "tx2-nx"), ("orin-agx", "xavier-agx")])
def test_five_settings_and_another_board_predict_a_board(board: str, other: str) -> None:
    seen = builtin_reference(board).measurements
    rows = np.linspace(0, len(seen) - 1, 5).astype(int)
    fitted = FewShot().fit([seen[at] for at in rows], [builtin_reference(other)])
    predicted = fitted.predict(SettingArray.of([m.setting for m in seen]))
    assert np.abs(predicted.log_step_s - np.log([m.step_s for m in seen])).mean() < 0.2
    assert np.abs(predicted.log_power_w - np.log([m.power_w for m in seen])).mean() < 0.12
