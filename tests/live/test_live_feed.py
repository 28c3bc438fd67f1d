from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from live_run import FakeRun, Served, eventually

from underwatt.events import Noted, Progressed, Readings, Seconds, to_line
from underwatt.live import feed as reader_module
from underwatt.live.feed import LogReader
from underwatt.runlog.line_files import recent_folder


def read_all(reader: LogReader) -> LogReader:
    while reader.advance():
        pass
    return reader


def write_long_log(run: FakeRun, hours: int) -> None:
    """A run of many hours, written in the format of the log without waiting for it."""
    run.setting()
    run.log.close()
    log = run.folder / "log.jsonl"
    recent_folder(log).mkdir(exist_ok=True)

    def progress(second: int) -> bytes:
        found = Progressed(
            at_s=second + 0.95,
            steps=10 * second,
            samples=320 * second,
            batch_size=32,
            loss=0.51234,
            step_s=0.10123,
            power_w=9.3,
            budget_w=10.0,
            energy_j=9.3 * second,
            time_left_s=1000.5,
            state="holding",
            gap_share=0.0,
        )
        return to_line(found)

    figures = {"span_s": 60.0, "bounded_s": 60.0, "judged_s": 60.0, "over_s": 0.0, "energy_j": 558.0}
    with log.open("ab") as lasting:
        for minute in range(60 * hours - 1):
            rows = [tuple(base + second % 7 / 100 for second in range(60)) for base in (9.3, 9.0, 9.6)]
            over = {"energy_over_j": 0.0, "readings_over": 0, "peaks": 0, "first_over_s": None, "worst_over": 0.0}
            until_s = 60 * minute + 59.9
            lasting.write(progress(60 * minute))
            lasting.write(to_line(Seconds(60 * minute, *rows, (10,) * 60, until_s=until_s, **figures, **over)))
    with (recent_folder(log) / f"{3 * hours - 1:06d}.jsonl").open("wb") as recent:
        for second in range(3600 * hours - 1200, 3600 * hours):
            times = tuple(second + tenth / 10 for tenth in range(10))
            recent.write(to_line(Readings(times, tuple(9 + tenth / 13 for tenth in range(10)))))
            recent.write(progress(second))


def test_follows_what_is_appended(fake_run: FakeRun) -> None:
    reader = LogReader(fake_run.folder / "log.jsonl")
    reader.open()
    read_all(reader)
    assert reader.view.facts["job"] == "digits"
    assert reader.read_share == 1.0
    fake_run.second(9.0)
    fake_run.second(9.0)
    read_all(reader)
    assert reader.view.facts["steps"] == 20
    assert reader.quiet_s() < 5


def test_waits_for_a_log_that_is_not_there_yet(tmp_path: Path) -> None:
    reader = LogReader(tmp_path / "log.jsonl")
    reader.open()
    assert reader.advance() is False
    assert reader.view.facts["phase"] == "waiting"
    FakeRun(tmp_path).start()
    read_all(reader)
    assert reader.view.facts["phase"] == "running"


def test_another_run_in_the_same_folder_begins_anew(fake_run: FakeRun) -> None:
    fake_run.second(9.0)
    fake_run.end()
    path = fake_run.folder / "log.jsonl"
    reader = read_all(LogReader(path))
    assert reader.view.facts["phase"] == "ended"
    path.unlink()
    second = FakeRun(fake_run.folder)
    second.start(target=0.5)
    read_all(reader)
    assert reader.view.facts["phase"] == "running"
    assert reader.view.facts["target"] == 0.5
    assert "steps" not in reader.view.facts


def test_a_damaged_line_is_said_and_what_comes_after_it_is_read(fake_run: FakeRun) -> None:
    path = fake_run.folder / "log.jsonl"
    reader = read_all(LogReader(path))
    with path.open("ab") as file:
        file.write(b"\x00\x00 not json\n")
    fake_run.second(9.0)
    fake_run.setting(64)
    fake_run.log.flush()
    read_all(reader)
    assert reader.error is None
    assert reader.view.shown()["unreadable"] == 1
    assert [entry["kind"] for entry in reader.view.entries] == ["start", "budget", "damage", "setting"]
    assert "is damaged" in reader.view.entries[2]["text"]
    assert reader.view.facts["setting"]["batch_size"] == 64


def test_a_log_that_cannot_be_read_is_said_and_waited_for(fake_run: FakeRun) -> None:
    path = fake_run.folder / "log.jsonl"
    path.rename(path.with_name("away"))
    path.mkdir()
    reader = LogReader(path)
    assert reader.advance() is False
    assert "cannot be read" in str(reader.error)
    path.rmdir()
    path.with_name("away").rename(path)
    read_all(reader)
    assert reader.error is None
    assert reader.view.facts["phase"] == "running"


def test_readings_are_followed_from_file_to_file_and_none_is_taken_twice(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run")
    run.start()
    reader = LogReader(run.folder / "log.jsonl")
    for second in range(2500):
        run.second(9.0)
        if second % 90 == 0:
            read_all(reader)
    read_all(reader)
    assert len(list(recent_folder(run.folder / "log.jsonl").iterdir())) == 3
    assert reader.view.facts["steps"] == 25_000
    assert sum(one.readings for one in reader.view.trace._whole) == 10 * 2499, "the last second is not over"
    fresh = read_all(LogReader(run.folder / "log.jsonl"))
    assert fresh.view.facts["steps"] == 25_000
    assert [row[0] for row in fresh.view.trace.recent()] == [row[0] for row in reader.view.trace.recent()]
    run.end()
    assert read_all(LogReader(run.folder / "log.jsonl")).view.facts["phase"] == "ended"
    run.log.close()


def test_a_line_that_is_not_whole_yet_is_left_for_later(fake_run: FakeRun) -> None:
    path = fake_run.folder / "log.jsonl"
    reader = read_all(LogReader(path))
    line = json.dumps({"kind": "note", "at_s": 1.0, "level": "info", "text": "whole"}) + "\n"
    with path.open("a", encoding="utf-8") as file:
        file.write(line[:20])
        file.flush()
        assert reader.advance() is False
        assert reader.view.entries[-1]["kind"] == "budget"
        file.write(line[20:])
    read_all(reader)
    assert reader.view.entries[-1]["text"] == "whole"


def test_a_line_longer_than_a_piece_is_read(fake_run: FakeRun) -> None:
    fake_run.log.write(Noted(at_s=1.0, level="info", text="x" * 900_000))
    fake_run.log.write(Noted(at_s=2.0, level="info", text="after it"))
    fake_run.log.flush()
    reader = read_all(LogReader(fake_run.folder / "log.jsonl"))
    assert reader.view.entries[-1]["text"] == "after it"


def test_a_killed_process_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_module, "_LOOK_FOR_PROCESS_S", 0.0)
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        FakeRun(tmp_path).start(pid=process.pid)
        reader = read_all(LogReader(tmp_path / "log.jsonl"))
        assert reader.view.facts["phase"] == "running"
        process.kill()
        process.wait()
        monkeypatch.setattr(reader_module, "_LOOK_FOR_PROCESS_S", 600.0)
        reader.advance()
        assert reader.view.facts["phase"] == "running", "its log has just grown"
        monkeypatch.setattr(reader_module, "_LOOK_FOR_PROCESS_S", 0.0)
        reader.advance()
        assert reader.view.facts["phase"] == "gone"


def test_a_long_log_shows_its_end_first_and_all_of_it_later(fake_run: FakeRun) -> None:
    write_long_log(fake_run, hours=24)
    reader = LogReader(fake_run.folder / "log.jsonl")
    reader.open()
    early = reader.view.shown()
    assert early["steps"] == 10 * (24 * 3600 - 1)
    assert early["job"] == "digits"
    assert len(reader.view.trace.recent()) == 301
    assert reader.read_share == 0.0
    assert "setting" not in early
    assert reader.advance() is True
    assert 0 < reader.read_share < 1
    read_all(reader)
    assert reader.read_share == 1.0
    late = reader.view.shown()
    assert late["steps"] == early["steps"]
    assert late["setting"]["batch_size"] == 32
    assert reader.view.trace.whole()[0][0] == 0.0


@pytest.mark.slow
def test_the_page_of_a_24_hour_run_is_there_within_2_seconds(fake_run: FakeRun) -> None:
    write_long_log(fake_run, hours=24)
    began = time.process_time()  # of a core: the tests of others may run beside this one
    with Served(fake_run.folder) as served:
        content = next(found for found in served.states() if found["facts"]["phase"] != "waiting")
        took_s = time.process_time() - began
        assert content["everything"]
        assert content["facts"]["steps"] == 10 * (24 * 3600 - 1)
        assert took_s < 2.0
        eventually(lambda: served.server.feed.reader.read_share == 1.0, within_s=60)
        assert served.server.feed.reader.view.trace.width_s == 128.0
