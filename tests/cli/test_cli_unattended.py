"""Runs that nobody looks after: a terminal that closes, and a unit file that trains on after a reboot."""

from __future__ import annotations

import os
import pty
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from underwatt.cli.run import run as run_command
from underwatt.runlog.log import read_log

REPOSITORY = Path(__file__).resolve().parent.parent.parent
UNIT = REPOSITORY / "examples" / "underwatt-train.service"
WORDS = ["run", "endless.py:endless", "--device", "virtual:nano", "--budget", "4W", "--out", "run"]


def in_terminal(folder: Path, words: Sequence[str]) -> tuple[int, int]:
    """Start a command on a terminal of its own; its process and the terminal's other side."""
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(folder)
        path = f"{REPOSITORY / 'tests' / 'helpers'}:{REPOSITORY / 'src'}"
        environment = {**os.environ, "PYTHONPATH": path, "TERM": "xterm"}
        os.execve(sys.executable, [sys.executable, "-m", "underwatt", *words], environment)
    return child, terminal


def wait_for(path: Path, text: str) -> None:
    end_s = time.monotonic() + 60
    while not path.exists() or text not in path.read_text():
        assert time.monotonic() < end_s
        time.sleep(0.02)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "endless.py").write_text("import small_job\n\ndef endless():\n    return small_job.job(target=2.0)\n")
    return tmp_path


def test_a_run_outlives_its_terminal(folder: Path) -> None:
    child, terminal = in_terminal(folder, [*WORDS, "--limit", "20000"])
    wait_for(folder / "run" / "log.jsonl", '"setting"')
    os.close(terminal)  # as when an ssh connection breaks
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 3, "it came to its limit of samples"
    log = read_log(folder / "run" / "log.jsonl")
    assert log.end is not None
    assert (log.end.outcome, log.end.restored) == ("limit", True)
    assert log.end.samples >= 20_000


def test_without_its_terminal_it_still_ends_in_good_order(folder: Path) -> None:
    child, terminal = in_terminal(folder, WORDS)
    wait_for(folder / "run" / "log.jsonl", '"setting"')
    os.close(terminal)
    time.sleep(0.5)
    os.kill(child, signal.SIGTERM)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 128 + signal.SIGTERM
    log = read_log(folder / "run" / "log.jsonl")
    assert log.end is not None
    assert (log.end.outcome, log.end.restored) == ("interrupted", True)


def test_the_unit_file_names_options_that_there_are() -> None:
    text = UNIT.read_text()
    (line,) = re.findall(r"^ExecStart=(.*)$", text, re.MULTILINE)
    options = set(re.findall(r"--[a-z-]+", line))
    assert {"--schedule", "--out", "--resume"} <= options
    known = {name.replace("_", "-") for name in run_command.__annotations__}
    assert {option[2:] for option in options} <= known | {"out", "limit", "target"}


def test_the_unit_file_trains_and_goes_on_where_it_was_stopped(folder: Path) -> None:
    """What the unit starts, as its shell would, twice: stopped as by a shutdown, and started again."""
    (line,) = re.findall(r"^ExecStart=(.*)$", UNIT.read_text(), re.MULTILINE)
    words = shlex.split(line)
    assert words[:2] == ["/bin/sh", "-c"]
    underwatt = f"{sys.executable} -m underwatt"
    script = words[2].replace("%h/venv/bin/underwatt", underwatt).replace("$$", "$")
    script = script.replace("train.py:job", "endless.py:endless --device virtual:nano --limit 100000")
    (folder / "sun.csv").write_text("at_s,power_w\n0,4\n20,3\n")
    path = f"{REPOSITORY / 'tests' / 'helpers'}:{REPOSITORY / 'src'}"
    started = {"cwd": folder, "env": {**os.environ, "PYTHONPATH": path}, "stdout": subprocess.DEVNULL}
    first = subprocess.Popen(["/bin/sh", "-c", script], stderr=subprocess.DEVNULL, **started)  # type: ignore[call-overload]
    (log_path,) = wait_for_one(folder, "runs/*/log.jsonl")
    wait_for(log_path, '"setting"')
    time.sleep(0.3)
    first.terminate()
    assert first.wait(30) == 128 + signal.SIGTERM
    stopped = read_log(log_path).end
    assert stopped is not None
    second = subprocess.run(["/bin/sh", "-c", script], stderr=subprocess.PIPE, check=False, **started)  # type: ignore[call-overload]
    assert second.returncode in (3, 6), second.stderr
    ended = read_log(log_path).end
    assert ended is not None
    assert ended.outcome == "limit"
    assert ended.samples >= 100_000 > stopped.samples > 0


def wait_for_one(folder: Path, pattern: str) -> list[Path]:
    end_s = time.monotonic() + 60
    while not (found := list(folder.glob(pattern))):
        assert time.monotonic() < end_s
        time.sleep(0.02)
    return found


@pytest.mark.skipif(not Path("/usr/bin/systemd-analyze").exists(), reason="systemd-analyze is not here")
def test_systemd_finds_nothing_wrong_with_the_unit_file() -> None:
    found = subprocess.run(["systemd-analyze", "verify", str(UNIT)], capture_output=True, text=True, check=False)
    said = found.stdout + found.stderr
    assert not [line for line in said.splitlines() if "underwatt" in line and "not executable" not in line], said
