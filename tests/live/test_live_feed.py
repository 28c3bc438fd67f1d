from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from live_run import FakeRun, Served, eventually

from underwatt.events import Noted
from underwatt.live import feed as reader_module
from underwatt.live.feed import LogReader


def read_all(reader: LogReader) -> LogReader:
    while reader.advance():
        pass
    return reader


def write_long_log(run: FakeRun, hours: float) -> None:
    """A run of many hours, written in the format of the log without waiting for it."""
    run.setting()
    run.log.close()
    with (run.folder / "log.jsonl").open("a", encoding="utf-8") as file:
        for second in range(int(3600 * hours)):
            power = {
                "kind": "power",
                "at_s": [round(second + tenth / 10, 4) for tenth in range(10)],
                "power_w": [round(9 + tenth / 13 + second % 7 / 100, 4) for tenth in range(10)],
            }
            progress = {
                "kind": "progress",
                "at_s": second + 0.95,
                "steps": 10 * second,
                "samples": 320 * second,
                "batch_size": 32,
                "loss": 0.51234,
                "step_s": 0.10123,
                "power_w": 9.3,
                "budget_w": 10.0,
                "energy_j": 9.3 * second,
                "time_left_s": 1000.5,
                "state": "holding",
                "gap_share": 0.0,
            }
            file.write(json.dumps(progress, separators=(",", ":")) + "\n")
            file.write(json.dumps(power, separators=(",", ":")) + "\n")


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


def test_a_damaged_log_is_said_and_does_not_end_the_reader(fake_run: FakeRun) -> None:
    path = fake_run.folder / "log.jsonl"
    with path.open("ab") as file:
        file.write(b"\x00\x00 not json\n")
    reader = LogReader(path)
    assert reader.advance() is False
    assert "damaged" in str(reader.error)


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
    write_long_log(fake_run, hours=3)
    reader = LogReader(fake_run.folder / "log.jsonl")
    reader.open()
    early = reader.view.shown()
    assert early["steps"] == 10 * (3 * 3600 - 1)
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
