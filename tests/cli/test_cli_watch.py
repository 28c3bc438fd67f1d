from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from test_cli_devices import run

from underwatt.events import Noted
from underwatt.runlog.inbox import register_run
from underwatt.runlog.log import RunLog

pytest.importorskip("starlette", reason="the extra 'watch' is not installed")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with RunLog(tmp_path / "run" / "log.jsonl") as log:
        log.write(Noted(at_s=0.0, level="info", text="hello"))
    return tmp_path / "run"


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "underwatt", "watch", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM)])
def test_serves_until_asked_to_end_and_keeps_the_token_to_itself(folder: Path, sent: int, code: int) -> None:
    with start("--run", str(folder), "--json") as process:
        assert process.stdout is not None
        said = json.loads(process.stdout.readline())
        assert said["url"] == f"http://127.0.0.1:{said['port']}/?token={said['token']}"
        assert len(said["token"]) >= 32
        assert said["run"] == str(folder)
        with urllib.request.urlopen(said["url"], timeout=10) as answer:
            assert b"<title>Underwatt" in answer.read()
        process.send_signal(sent)
        out, errors = process.communicate(timeout=15)
    assert process.returncode == code
    assert said["token"] not in out + errors
    assert "Traceback" not in errors


def test_finds_the_run_that_is_under_way(folder: Path) -> None:
    with register_run(folder, "digits", "nano"), start() as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        with urllib.request.urlopen(url, timeout=10) as answer:
            assert answer.status == 200
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=15)
    assert "Ctrl-C ends the page, not the run" in " ".join(errors.split())


def test_says_what_is_missing(tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("watch") == 2
    assert "No run is under way" in capsys.readouterr().err
    assert run("watch", "--run", str(tmp_path / "nowhere")) == 2
    assert "There is no run in" in " ".join(capsys.readouterr().err.split())
    state = tmp_path / "state" / "runs"
    with register_run(folder, "digits", "nano"):
        entry = next(state.glob("*.json"))
        (state / "other.json").write_text(entry.read_text())
        assert run("watch") == 2
    shown = " ".join(capsys.readouterr().err.split())
    assert "2 runs are under way" in shown
    assert "--run" in shown
