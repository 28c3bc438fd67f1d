from __future__ import annotations

import ast
import importlib
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from underwatt.jobs import emitter
from underwatt.jobs.command import parse_line

SOURCE = Path(emitter.__file__).read_text()


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    """The emitter, imported while a pipe is there; and the reading end."""
    fifo = tmp_path / "beats"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDWR | os.O_NONBLOCK)
    monkeypatch.setenv("UNDERWATT_BEATS", str(fifo))
    yield importlib.reload(emitter), reader
    os.close(emitter._fd)
    emitter._waiting.clear()
    os.close(reader)
    monkeypatch.delenv("UNDERWATT_BEATS")
    importlib.reload(emitter)


def _lines(reader: int) -> list[object]:
    return [parse_line(line) for line in os.read(reader, 1 << 20).splitlines()]


def test_is_one_short_file_for_python_3_6_without_dependencies():
    assert len(SOURCE.splitlines()) < 60
    tree = ast.parse(SOURCE, feature_version=(3, 6))
    imports = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert imports == {"atexit", "os", "pathlib", "time"}
    # Evaluated at run time, so they may not use what 3.6 lacks; strings are not evaluated.
    annotations = {ast.unparse(n.annotation) for n in ast.walk(tree) if isinstance(n, ast.AnnAssign | ast.arg)}
    assert annotations <= {"int", "float", "str", "'list[tuple[float, int]]'"}


def test_prints_itself_to_be_copied(tmp_path):
    copy = subprocess.check_output([sys.executable, "-m", "underwatt.jobs.emitter"], text=True)
    assert copy == SOURCE
    (tmp_path / "underwatt_beat.py").write_text(copy)
    subprocess.run([sys.executable, "-I", "-c", "import underwatt_beat"], cwd=tmp_path, check=False)
    code = "import underwatt_beat; underwatt_beat.step(); underwatt_beat.metric(1); underwatt_beat.oom()"
    assert subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=False).returncode == 0


def test_steps_travel_together_each_with_its_own_time(fresh):
    beats, reader = fresh
    before_s = time.monotonic()
    beats.step()  # the first goes at once
    for _ in range(5):
        beats.step()
    beats.metric(0.5)  # takes along what waits
    lines = _lines(reader)
    times_s = [line.at_s for line in lines[:-1]]
    assert len(times_s) == 6
    assert times_s == sorted(times_s)
    assert before_s - 1e-5 <= times_s[0]
    assert times_s[-1] <= time.monotonic() + 1e-5
    assert lines[-1] == 0.5


def test_a_full_pipe_loses_no_count_and_does_not_wait(fresh):
    beats, reader = fresh
    started_s = time.monotonic()
    for _ in range(20_000):  # several times what a pipe holds
        beats.step()
    assert time.monotonic() - started_s < 5.0
    assert len(beats._waiting) <= beats.MOST_WAITING
    received = sum(line.steps for line in _lines(reader))
    beats._send()
    received += sum(line.steps for line in _lines(reader))
    assert received == 20_000


def test_a_listener_that_leaves_breaks_nothing(fresh, tmp_path):
    beats, reader = fresh
    fifo = tmp_path / "beats"
    os.close(os.open(fifo, os.O_RDWR))
    beats.step()
    spare = os.open(os.devnull, os.O_RDONLY)
    os.dup2(spare, reader)  # the reading end is gone, the number stays valid for the fixture
    os.close(spare)
    assert [beats.step() for _ in range(300)] == [None] * 300, "training goes on"
    beats.oom()


def test_a_forked_process_sends_nothing_of_its_parents(fresh):
    beats, reader = fresh
    beats.step()
    beats.step()
    pid = os.fork()
    if pid == 0:
        beats._send()
        os._exit(0)
    os.waitpid(pid, 0)
    assert len(_lines(reader)) == 1
    beats._send()
    assert len(_lines(reader)) == 1


@pytest.mark.parametrize("call", ["beats.step(3)", "beats.oom()"])
def test_a_trainer_that_is_forked_off_reports_its_own(fresh, call):
    beats, reader = fresh
    beats.step()
    beats.step()  # waits, and stays the parent's
    os.read(reader, 1 << 20)
    pid = os.fork()
    if pid == 0:
        os.close(beats._fd)  # as a daemon does
        eval(call)
        beats._send()
        os._exit(0)
    os.waitpid(pid, 0)
    (line,) = _lines(reader)
    assert getattr(line, "steps", 3) == 3
    beats._send()
    assert len(_lines(reader)) == 1


def test_a_beat_costs_little(fresh):
    beats, reader = fresh

    def per_call_us(call):
        best = 1.0
        for _ in range(20):
            started_s = time.perf_counter()
            for _ in range(90):
                call()
            best = min(best, (time.perf_counter() - started_s) / 90)
            beats._send()
            os.read(reader, 1 << 20)
        return best * 1e6

    assert per_call_us(beats.step) < 5.0
