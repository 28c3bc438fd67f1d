"""The benchmark of boards counts what the mount itself says, and a driver that does nothing gets nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from kernel_mount import why_not

import boards
from underwatt.drivers.jetson.device import JetsonDevice
from underwatt.records import PowerMode

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())


def test_rows_of_two_boards_and_of_kills(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rows.json"
    arguments = ["--only", "nano:4", "orin-nano:7", "--tries", "2", "--kills", "2", "--json", str(out)]
    assert boards.main(arguments) == 0
    every = {"tried": 2, "applied": 2, "restored": 2}
    *rows, kills = json.loads(out.read_text())
    assert rows == [{"board": "nano", "release": "4", **every}, {"board": "orin-nano", "release": "7", **every}]
    assert (kills["board"], kills["tried"], kills["restored"]) == ("kill -9", 2, 2)
    assert "orin-nano" in capsys.readouterr().out


def test_a_driver_that_only_says_so_has_applied_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def idle(_self: JetsonDevice, _mode: PowerMode) -> None:
        return None

    monkeypatch.setenv("UNDERWATT_STATE", str(tmp_path / "state"))
    monkeypatch.setattr(JetsonDevice, "apply", idle)
    cell = boards.SETTABLE["nano", "4"]
    with boards.mounted(cell, tmp_path / "board") as mount:
        assert boards.tried(cell, mount, 2) == (0, 2)
