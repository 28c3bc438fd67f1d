from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from test_cli_devices import run

from underwatt.events import Ended, Resumed, Started
from underwatt.records import DeviceInfo, WorkloadInfo
from underwatt.runlog.inbox import Inbox, register_run
from underwatt.runlog.log import RunLog

START = Started(
    at_s=0.0,
    started_at="",
    job="digits",
    device=DeviceInfo("v", "Nano", "nano", "virtual:nano"),
    workload=WorkloadInfo("digits", "abc"),
    budget="3W",
    batch_sizes=(8,),
)


@contextmanager
def under_way(folder: Path) -> Iterator[Inbox]:
    with RunLog(folder / "log.jsonl") as log, register_run(folder, "digits", "virtual Nano"):
        log.write(START)
        yield Inbox(folder)


def test_the_run_under_way_gets_the_budget(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with under_way(tmp_path / "run") as inbox:
        assert run("budget", "7W") == 0
        out = capsys.readouterr().out
        assert f"The run in {tmp_path / 'run'} is asked to keep 7W, peak or mean as before; " in out
        assert inbox.take() == "7W"
        assert run("budget", "08:00-18:00=15W,else=7W", "--json") == 0
        assert json.loads(capsys.readouterr().out) == {
            "folder": str(tmp_path / "run"),
            "budget": "08:00-18:00=15W,else=7W",
        }
        assert inbox.take() == "08:00-18:00=15W,else=7W"


def test_several_runs_must_be_told_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with under_way(tmp_path / "one") as one, under_way(tmp_path / "two") as two:
        assert run("budget", "7W") == 2
        shown = capsys.readouterr().err
        assert "2 runs" in shown
        assert str(tmp_path / "one") in shown
        assert str(tmp_path / "two") in shown
        assert run("budget", "7W", "--run", str(tmp_path / "two")) == 0
        assert (one.take(), two.take()) == (None, "7W")


def test_a_run_that_has_ended_takes_no_budget(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    with RunLog(folder / "log.jsonl") as log:
        log.write(START)
        log.write(Ended(at_s=9.0, outcome="reached", restored=True))
        log.power(9.0, 5.0)
    assert run("budget", "7W", "--run", str(folder)) == 2
    assert f"The run in {folder} has ended." in " ".join(capsys.readouterr().err.split())
    assert not (folder / "budget.json").exists()
    with RunLog(folder / "log.jsonl") as log:
        log.write(Resumed(at_s=9.0))
        log.flush()
        assert run("budget", "7W", "--run", str(folder)) == 0


def test_without_a_run_there_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("budget", "7W") == 2
    assert "No run is under way" in capsys.readouterr().err
    assert run("budget", "7W", "--run", str(tmp_path)) == 2
    assert "no run in" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["0W", "7", "2h", "08:00-18:00=15W", "08:00-18:00=15W,17:00-19:00=3W,else=7W"])
def test_nonsense_is_refused_and_not_left(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with under_way(tmp_path / "run") as inbox:
        assert run("budget", text) == 2
        assert "error:" in capsys.readouterr().err
        assert inbox.take() is None


def test_another_process_finds_the_run(tmp_path: Path) -> None:
    with under_way(tmp_path / "run") as inbox:
        done = subprocess.run(
            [sys.executable, "-m", "underwatt", "budget", "6.5W"], capture_output=True, text=True, env=os.environ
        )
        assert done.returncode == 0, done.stderr
        assert inbox.take() == "6.5W"
