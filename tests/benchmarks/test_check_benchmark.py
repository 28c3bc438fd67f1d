"""The benchmark of checks compares plans from a board with plans from its file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import check


def test_a_row_of_a_virtual_board(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("UNDERWATT_STATE", str(tmp_path))
    assert check.main(["--boards", "nano", "--mounted", "--json", str(tmp_path / "rows.json")]) == 0
    [row] = json.loads((tmp_path / "rows.json").read_text())
    assert row["device"] == "virtual:nano"
    assert (row["settings"], row["plans"], row["same_plans"]) == (12, 20, 20)
    assert row["seconds"] < 120
    assert "virtual:nano" in capsys.readouterr().out
