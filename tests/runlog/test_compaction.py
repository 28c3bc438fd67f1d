"""What a log keeps of readings that it lets go must tell the same of the budget as every one of them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from log_world import started

from underwatt.errors import InputError
from underwatt.events import BudgetChanged, Ended, Event, Progressed, Resumed, Seconds, SettingChanged
from underwatt.measure.meter import Trace
from underwatt.records import PowerMode, Setting
from underwatt.runlog import line_files, log as log_module
from underwatt.runlog.line_files import recent_files, recent_folder
from underwatt.runlog.log import RunLog, follow, read_log
from underwatt.runlog.run_record import RunRecord
from underwatt.runlog.tally import Tally


class Happened(NamedTuple):
    """Something in a run, so long after the last thing."""

    after_s: float
    what: str  # "budget", "setting" or "kill"
    number: int


class Story:
    """A run that is written to a log, and every reading of it apart."""

    def __init__(self, path: Path, seed: int) -> None:
        self.path = path
        self.log = RunLog(path)
        self.random = np.random.default_rng(seed)
        self.events: list[Event] = []
        self.at_s, self.level_w = 0.0, 10.0
        self.readings: list[tuple[float, float]] = []
        self.tell(started())
        self.tell(BudgetChanged(at_s=0.0, power_w=self.level_w, why="start"))

    def tell(self, event: Event) -> None:
        self.events.append(event)
        self.log.write(event)

    def read(self, seconds: float) -> None:
        for _ in range(round(10 * seconds)):
            self.at_s = round(self.at_s + 0.1 + self.random.normal(0, 0.004), 4)
            power_w = round(self.level_w * (0.98 + 0.05 * self.random.normal()), 4)
            self.readings.append((self.at_s, power_w))
            self.log.power(self.at_s, power_w)
            if self.random.random() < 0.1:
                self.log.flush()
        self.log.flush()

    def happen(self, one: Happened) -> None:
        self.read(one.after_s)
        at_s = round(self.at_s + 0.02, 4)
        match one.what:
            case "budget":
                budgets = [("mean", None), ("peak", None), ("mean", 5.0), ("mean", 60.0)]
                watts, window_s = budgets[one.number % 4]
                power_w = None if one.number == 7 else 5.0 + one.number
                self.tell(BudgetChanged(at_s=at_s, power_w=power_w, watts=watts, window_s=window_s, why="changed"))
            case "setting":
                self.level_w = 4.0 + one.number
                setting = Setting(PowerMode(gpu_mhz=100.0 + one.number), 8)
                self.tell(SettingChanged(at_s=at_s, setting=setting, state="holding"))
            case "kill":  # what was flushed is in the files, and nothing closes them
                self.log._log.let_go()
                self.log._recent.let_go()
                self.log = RunLog(self.path)
                self.tell(Resumed(at_s=at_s))
        self.at_s = at_s

    def every_reading(self) -> RunRecord:
        at_s, power_w = np.array(self.readings, dtype=float).reshape(-1, 2).T
        return RunRecord(tuple(self.events), Trace(at_s, power_w, None, missed=0))


@settings(max_examples=60, deadline=None)
@given(
    happened=st.lists(
        st.builds(
            Happened,
            st.floats(0.1, 12.0),
            st.sampled_from(["budget", "setting", "setting", "kill"]),
            st.integers(0, 9),
        ),
        max_size=12,
    ),
    seed=st.integers(0, 1000),
)
def test_the_verdict_of_the_log_is_that_of_every_reading(
    tmp_path_factory: pytest.TempPathFactory, happened: list[Happened], seed: int
) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(log_module, "MINUTE_S", 3.0)
        story = Story(tmp_path_factory.mktemp("story") / "log.jsonl", seed)
        for one in happened:
            story.happen(one)
        story.read(2.0)
        expected = story.every_reading()
        assert read_log(story.path).tally == expected.tally, "of a run under way, or killed"
        story.log.close()
        assert read_log(story.path).tally == expected.tally
        shutil.rmtree(recent_folder(story.path))
        record = read_log(story.path)
    assert record.tally == expected.tally, "without a single reading"
    assert record.tally != Tally()
    assert record.verdict() == expected.verdict()
    assert record.energy_j() == expected.energy_j()
    assert record.points.readings.sum() == len(story.readings)
    assert record.points.high_w.max() == pytest.approx(max(watts for _, watts in story.readings), abs=1e-3)
    if record.settled is not None:
        with pytest.raises(InputError, match="longer than single readings are kept"):
            record.time_over_s(window_s=3.0)


def test_single_readings_of_the_last_hour_are_kept_and_older_ones_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "log.jsonl"
    with RunLog(path) as log:
        log.write(started())
        log.write(BudgetChanged(at_s=0.0, power_w=10.0))
        for second in range(3 * 3600):
            for tenth in range(10):
                log.power(second + tenth / 10, 9.0 + tenth / 100)
            log.write(Progressed(at_s=second + 0.95, steps=second, samples=0, batch_size=8, state="holding"))
            log.flush()
        log.write(Ended(at_s=3 * 3600.0, outcome="reached", restored=True))
    record = read_log(path)
    kept_s = record.power.at_s[-1] - record.power.at_s[0]
    assert 3600 <= kept_s <= 3600 + 2 * line_files.PIECE_S
    assert record.tally.readings == 3 * 36_000
    assert record.energy_j() == pytest.approx(9.045 * 3 * 3600, rel=1e-4)
    assert len(record.points.at_s) < 3 * 3600 + 1000, "seconds, and the readings that are not settled"
    progress = [event.steps for event in record.of(Progressed)]
    assert progress == sorted(progress)
    assert len(progress) > 3600
    assert path.stat().st_size <= 5e6 * 3 / 24, "5 MB a day"
    lines = [line for line in follow(path)[0] if isinstance(line, Seconds)]
    assert lines[0].mean_w[0] == pytest.approx(9.045)
    assert (lines[0].low_w[0], lines[0].high_w[0], lines[0].readings[0]) == (9.0, 9.09, 10)


def test_another_run_in_the_folder_does_not_get_the_readings_of_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    for _ in range(2):
        with RunLog(path) as log:
            log.write(started())
            log.power(0.1, 8.0)
        assert len(read_log(path).power) == 1
        path.unlink()


def test_a_damaged_minute_costs_that_minute(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    with RunLog(path) as log:
        log.write(started())
        for tenth in range(1, 3001):
            log.power(tenth / 10, 8.0)
            if tenth % 10 == 0:
                log.flush()
    for old in recent_files(recent_folder(path)):
        old.unlink()
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], lines[2][:40] + b"\n", *lines[3:]]))
    record = read_log(path)
    assert record.energy_j() == pytest.approx(8.0 * (300 - 60), rel=0.01)
    assert record.warning is not None


@pytest.mark.slow
def test_ten_days_are_read_in_little_memory(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    path = tmp_path / "log.jsonl"
    with RunLog(path) as log:
        log.write(started())
        for tenth in range(1, 1201):
            log.power(tenth / 10, 9.0 + tenth % 10 / 100)
            if tenth % 10 == 0:
                log.flush()
    line = next(line for line in path.read_bytes().splitlines() if b'"seconds"' in line)
    at = line.index(b'"at_s":') + 7
    rest = line[line.index(b",", at) :]
    with path.open("ab") as file:
        for minute in range(2, 10 * 1440):
            file.write(line[:at] + b"%d" % (60 * minute) + rest + b"\n")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    record = read_log(path)
    assert len(record.points.at_s) > 860_000
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024 < 150
