from __future__ import annotations

import errno
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import timeit
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from log_world import recorded, started

from underwatt.errors import InputError
from underwatt.events import (
    BudgetChanged,
    Ended,
    Measured,
    Noted,
    Progressed,
    Readings,
    Resumed,
    Scored,
    to_line,
)
from underwatt.records import Measurement, PowerMode, Setting
from underwatt.runlog.line_files import LONGEST_LINE, recent_files, recent_folder
from underwatt.runlog.log import KEEP_READINGS, RunLog, follow, has_ended, read_log

SETTING = Setting(PowerMode(gpu_mhz=600.0), 8)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "log.jsonl"


def recent_lines(path: Path) -> list[Any]:
    """What the files of the last hour hold."""
    return [line for file in recent_files(recent_folder(path)) for line in follow(file)[0]]


def test_what_is_written_is_read(path: Path) -> None:
    with RunLog(path) as log:
        log.write(started())
        log.write(BudgetChanged(at_s=0.0, power_w=10.0, why="start"))
        log.power(0.1, 8.0)
        log.power(0.2, 9.0)
        log.flush()
        log.power(0.3, 10.0)
        log.write(Measured(at_s=0.3, measurement=Measurement(SETTING, 0.1, 9.5)))
        log.write(Scored(at_s=0.3, value=np.float32(0.5), samples=np.int64(7), target=np.array(np.nan)))
        log.write(Noted(at_s=0.3, level="info", text={1}))
        log.write(Ended(at_s=0.4, outcome="reached", restored=True, score=math.nan))
    assert log.error is None
    record = read_log(str(path))
    assert record.start.job == "digits"
    assert [event.kind for event in record.events] == ["start", "budget", "measured", "score", "note", "end"]
    assert record.of(Measured)[0].measurement.power_w == 9.5
    score = record.of(Scored)[0]
    assert (score.value, score.samples, score.target, record.of(Noted)[0].text) == (0.5, 7, None, "{1}")
    assert record.power.at_s.tolist() == [0.1, 0.2, 0.3]
    assert record.power.power_w.tolist() == [8.0, 9.0, 10.0]
    assert record.end is not None
    assert record.end.score is None
    assert record.energy_j() == pytest.approx(0.1 * 27)
    assert record.budget_at([-1.0, 0.0, 5.0]).tolist() == [math.inf, 10.0, 10.0]
    assert sorted(path.name for path in path.parent.iterdir()) == ["log.jsonl", "log.recent"]


def test_nothing_is_written_before_a_flush(path: Path) -> None:
    log = RunLog(path)
    log.write(started())
    log.power(0.1, 8.0)
    assert path.read_bytes() == b""
    log.flush()
    assert len(path.read_bytes().splitlines()) == 1
    assert len(recent_lines(path)) == 1
    log.close()
    log.close()


def test_a_reading_costs_about_a_microsecond(path: Path) -> None:
    log = RunLog(path)
    assert min(timeit.repeat(lambda: log.power(0.1, 8.0), number=10_000, repeat=5)) / 10_000 < 3e-6
    log.close()


def test_a_reading_that_is_no_number_is_none(path: Path) -> None:
    record = recorded(path, [8.0, math.nan, math.inf, 9.0])
    assert record.power.power_w.tolist() == [8.0, 9.0]
    assert record.power.missed == 2
    assert b"NaN" not in path.read_bytes()


def test_a_torn_last_line_is_skipped_and_removed_by_the_run_that_goes_on(path: Path) -> None:
    recorded(path, [8.0])
    whole = path.stat().st_size
    for torn in (path, *recent_files(recent_folder(path))):
        with torn.open("ab") as file:
            file.write(b'{"kind":"power","at_s":[0.2,')
    assert len(read_log(path).power) == 1
    assert read_log(path).end is None
    _, at = follow(path)
    assert at == whole
    with RunLog(path) as log:
        log.write(Resumed(at_s=0.2, pid=1))
        log.power(0.3, 9.0)
    assert [event.kind for event in follow(path, at)[0]] == ["resume", "seconds"]
    record = read_log(path)
    assert record.power.power_w.tolist() == [8.0, 9.0]
    assert record.warning is None


@settings(max_examples=50, deadline=None)
@given(cut=st.integers(0, 10_000))
def test_a_log_cut_anywhere_is_read_up_to_there(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    path = tmp_path_factory.mktemp("cut") / "log.jsonl"
    recorded(path, [8.0] * 30, settings=[0.1, 0.2])
    text = path.read_bytes()
    cut %= len(text) + 1
    path.write_bytes(text[:cut])
    lines = text[:cut].count(b"\n")
    assert len(follow(path)[0]) == lines
    if lines:
        record = read_log(path)
        assert len(record.events) == min(lines, 4)
        assert len(record.power) == record.tally.readings == 30, "the readings are beside it"
    else:
        with pytest.raises(InputError, match="does not begin"):
            read_log(path)


def test_kill_leaves_every_flushed_line(path: Path) -> None:
    recorded(path, [])
    program = f"""
import os, signal
from underwatt.runlog.log import RunLog
log = RunLog({str(path)!r})
for n in range(1000):
    log.power(n / 10, 8.0)
    log.flush()
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", program], check=False)
    assert done.returncode == -signal.SIGKILL
    assert len(read_log(path).power) == 1000


@pytest.mark.parametrize("damage", [b"{", b"[1, 2]", b"\x00\xff not json", b"[" * 100_000, b"9" * 5000, b""])
def test_damage_in_the_middle_is_left_out_counted_and_told(path: Path, damage: bytes) -> None:
    recorded(path, [8.0])
    text = path.read_bytes()
    lines = text.splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], damage + b"\n", *lines[2:]]))
    record = read_log(path)
    assert [event.kind for event in record.events] == ["start", "budget"]
    assert record.verdict() == recorded(path.with_name("whole.jsonl"), [8.0]).verdict()
    assert record.damage == (f"{path}, line 3 is damaged.",)
    assert record.warning is not None
    assert "1 line of the log" in record.warning
    found, byte = follow(path)
    assert [isinstance(line, InputError) for line in found] == [False, False, True, False]
    assert byte == path.stat().st_size, "a reader beside the run goes on after it"
    path.write_text("[1, 2]\n")
    with pytest.raises(InputError, match="does not begin"):
        read_log(path)


def test_a_log_that_is_no_plain_file_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "zero.jsonl").symlink_to("/dev/zero")
    for name in ("pipe.jsonl", "zero.jsonl", "."):
        for read in (read_log, follow):
            with pytest.raises(InputError, match=r"cannot be read"):
                read(tmp_path / name)
        assert not has_ended(tmp_path / name)


def test_what_is_longer_than_any_line_is_passed_over(path: Path) -> None:
    recorded(path, [8.0])
    with path.open("ab") as file:
        file.write(b"x" * (LONGEST_LINE + 10) + b"\n" + to_line(Noted(at_s=1.0, level="info", text="after it")))
    assert read_log(path).of(Noted)[0].text == "after it"
    found, byte = follow(path, 0, LONGEST_LINE)
    while byte < path.stat().st_size:
        more, byte = follow(path, byte, LONGEST_LINE)
        found += more
    assert isinstance(found[-1], Noted)


@pytest.mark.parametrize(
    "line",
    [
        '{"kind": "setting", "at_s": 1.0}',
        '{"kind": "setting", "at_s": 1.0, "state": "holding", "setting": {"mode": {"gpu_mhz": -9}, "batch_size": 1}}',
        '{"kind": "budget", "at_s": "soon", "power_w": 7.0, "why": "start"}',
        '{"kind": "budget", "at_s": null, "power_w": 7.0, "why": "start"}',
        '{"kind": "budget", "at_s": 1.0, "power_w": 0.0, "why": "start"}',
        '{"kind": "budget", "at_s": 1.0, "power_w": 1e300, "why": "start"}',
        '{"kind": "budget", "at_s": 1.0, "power_w": 7.0, "window_s": 1e300, "why": "start"}',
        '{"kind": "power", "at_s": 3.0, "power_w": [1.0]}',
        '{"kind": "power", "at_s": [3.0, 4.0], "power_w": [1.0]}',
        '{"kind": "power", "at_s": [NaN], "power_w": [1.0]}',
        '{"kind": "measured", "at_s": 1.0, "measurement": []}',
        '{"kind": "start", "at_s": 0.0, "job": "x", "device": null, "budget": "1W"}',
        '{"kind": "end", "at_s": 1.0, "outcome": ["reached"]}',
        '{"kind": "end", "at_s": 1e300, "outcome": "reached", "restored": true}',
        '{"kind": "power", "at_s": "12", "power_w": "12"}',
        f'{{"kind": "power", "at_s": [1{"0" * 400}], "power_w": [1.0]}}',
        '{"kind": "seconds", "at_s": 1.0, "mean_w": [1.0]}',
        '{"kind": "seconds", "at_s": 1.0, "mean_w": [1.0], "low_w": [1.0], "high_w": [1.0], "readings": [1]}',
    ],
)
def test_a_line_that_makes_no_sense_is_left_out_with_its_reason(path: Path, line: str) -> None:
    recorded(path, [8.0])
    with path.open("a") as file:
        file.write(line + "\n")
    record = read_log(path)
    assert len(record.events) == 2
    assert record.damage[0].startswith(f"{path}, line 4 makes no sense: ")
    *rest, error = follow(path)[0]
    assert len(rest) == 3
    assert isinstance(error, InputError), "a reader of a run under way may go on after it"


def test_a_kind_that_is_not_known_is_left_out(path: Path) -> None:
    recorded(path, [8.0])
    with path.open("a") as file:
        file.write('{"kind": "from the future", "at_s": 1.0}\n{"kind": [], "at_s": 1.0}\n')
    assert len(read_log(path).events) == 2
    assert len(follow(path)[0]) == 3


def test_files_that_are_no_log(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        read_log(tmp_path / "none.jsonl")
    (tmp_path / "other.jsonl").write_text('{"kind": "note", "at_s": 0, "level": "info", "text": ""}\n')
    with pytest.raises(InputError, match="does not begin"):
        read_log(tmp_path / "other.jsonl")
    with pytest.raises(InputError, match="cannot be written"):
        RunLog(tmp_path / "other.jsonl" / "log.jsonl")


def test_a_live_reader_sees_whole_lines_as_they_come(path: Path) -> None:
    assert follow(path) == ([], 0)
    with RunLog(path) as log:
        assert follow(path) == ([], 0)
        log.write(started())
        log.flush()
        first, at = follow(path)
        assert [event.kind for event in first] == ["start"]
        assert follow(path, at) == ([], at)
        log.power(0.1, 8.0)
        log.flush()
        assert recent_lines(path) == [Readings((0.1,), (8.0,))]
    path.write_bytes(b"")
    assert follow(path, at) == ([], 0)


def test_a_full_disk_ends_nothing_and_nothing_is_lost(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = RunLog(path)
    log.write(started())
    log.flush()
    log.power(0.1, 8.0)
    log.write(Noted(at_s=0.1, level="info", text="kept"))
    write, room = os.write, 10

    def nearly_full(file: int, text: bytes) -> int:
        nonlocal room
        if not room:
            raise OSError(errno.ENOSPC, "No space left on device")
        part = text[:room]
        room -= len(part)
        return write(file, part)

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", nearly_full)
        log.flush()
        assert "No space left" in (log.error or "")
        assert [event.kind for event in read_log(path).events] == ["start"]
        log.power(0.2, 9.0)
        log.flush()
    log.flush()
    assert log.error is None
    log.close()
    record = read_log(path)
    assert record.power.power_w.tolist() == [8.0, 9.0]
    assert record.of(Noted)[0].text == "kept"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").symlink_to("/dev/full")
    log = RunLog(tmp_path / "log.jsonl")
    log.write(started())
    log.flush()
    assert "No space left" in (log.error or "")
    log.close()


def test_what_waits_for_the_disk_is_bounded_and_the_newest(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = RunLog(path)
    log.write(started())
    log.flush()

    def refuse(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", refuse)
        patched.setattr("underwatt.runlog.line_files.KEEP_BYTES", 200_000)
        for number in range(50_000):
            log.power(number / 10, 8.0)
            if number % 1000 == 0:
                log.flush()
        log.flush()
    log.close()
    record = read_log(path)
    assert 10_000 < len(record.power) < 20_000
    assert record.power.at_s[-1] == 4999.9
    assert record.tally.readings == 50_000, "what lasts of them is all there"


def test_what_nobody_flushes_is_bounded(path: Path) -> None:
    with RunLog(path) as log:
        log.write(started())
        for number in range(KEEP_READINGS + 500):
            log.power(number / 10, 8.0)
    assert len(read_log(path).power) == KEEP_READINGS


def test_a_removed_folder_is_made_again_and_the_log_can_be_read(path: Path) -> None:
    log = RunLog(path)
    log.write(started())
    log.write(BudgetChanged(at_s=0.0, power_w=10.0, why="start"))
    log.power(0.1, 8.0)
    log.flush()
    shutil.rmtree(path.parent)
    log.power(0.2, 8.0)
    log.power(0.3, 8.0)
    log.close()
    record = read_log(path)
    assert record.start.job == "digits"
    assert record.budget_at([100.0]) == [10.0]
    assert record.energy_j() == pytest.approx(2.4)  # also of the reading that nobody can look up any more
    with RunLog(path) as log:  # a resumed run has not written the start itself
        shutil.rmtree(path.parent)
        log.write(Noted(at_s=200.0, level="info", text="still here"))
    assert read_log(path).start.job == "digits"


def test_a_folder_that_cannot_be_made_again_is_tried_again(path: Path) -> None:
    log = RunLog(path)
    log.write(started())
    shutil.rmtree(path.parent)
    path.parent.write_text("in the way")
    log.flush()
    assert log.error
    path.parent.unlink()
    log.flush()
    assert log.error is None
    log.close()
    assert read_log(path).start.at_s == 0


def test_threads_lose_nothing(path: Path) -> None:
    log = RunLog(path)
    log.write(started())

    def sample() -> None:
        for number in range(5000):
            log.power(number / 10, 8.0)

    def train() -> None:
        for number in range(500):
            log.write(Progressed(at_s=number, steps=number, samples=0, batch_size=8, state="holding"))
            log.flush()

    threads = [threading.Thread(target=target) for target in (sample, train, train)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    log.close()
    record = read_log(path)
    assert record.power.at_s.tolist() == [number / 10 for number in range(5000)]
    assert len(record.of(Progressed)) == 1000


def outcome(path: Path) -> str:
    end = read_log(path).end
    return "" if end is None else end.outcome


def test_a_resumed_run_has_no_end_until_it_ends_again(path: Path) -> None:
    with RunLog(path) as log:
        log.write(started())
        log.power(0.1, 8.0)
        log.write(Ended(at_s=0.1, outcome="interrupted", restored=True))
    assert outcome(path) == "interrupted"
    with RunLog(path) as log:
        log.write(Resumed(at_s=50.0))
        log.power(50.1, 8.0)
        log.flush()
        assert read_log(path).end is None
        assert read_log(path).energy_j() == pytest.approx(1.6)  # the time between is not counted
        log.write(Ended(at_s=51.0, outcome="reached", restored=True))
    assert outcome(path) == "reached"
