"""What a report says of a run beside its watts: scores, speed, clock, temperature, and the decision at each level."""

from __future__ import annotations

from dataclasses import replace

import pytest
from report_world import device, write_run

from underwatt.events import Progressed, Scored, SettingChanged
from underwatt.records import PowerMode
from underwatt.reports.draw_run import draw_along
from underwatt.reports.gather_run import along_figure, levels_figure
from underwatt.reports.words import set_command
from underwatt.runlog.run_record import RunRecord


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> RunRecord:
    return write_run(tmp_path_factory.mktemp("along") / "log.jsonl")


def test_scores_speed_clock_and_temperature_stand_beside_the_watts(record: RunRecord) -> None:
    along = along_figure(record)
    assert along is not None
    assert along.scores == tuple(pytest.approx(0.891 + share / 100) for share in range(1, 9))
    seconds = record.of(Progressed)[1].at_s - record.of(Progressed)[0].at_s
    assert along.samples_a_second == (pytest.approx(12_000 / seconds, abs=1e-3),) * 7
    assert along.temperature_c[-1] == 38.0
    assert along.clock == "gpu_mhz"
    assert set(along.clock_values) == {record.of(Progressed)[0].running.gpu_mhz}
    assert "The best of 8 scores was 0.971 (target 0.97)" in along.message
    assert "123,456 samples" in along.message
    assert list(draw_along(along)) == ["score", "speed", "clock", "temperature"]


def test_where_less_is_better_the_best_score_is_the_least(record: RunRecord) -> None:
    losses = [replace(event, value=2.0 - event.value, target=1.03) for event in record.of(Scored)]
    start = replace(record.start, target=1.03)
    along = along_figure(replace(record, events=(start, *losses, record.events[-1])))
    assert along is not None
    assert "was 1.029 (target 1.03)" in along.message
    assert along_figure(replace(record, events=(start, record.events[-1]))) is None


def test_what_a_resumed_run_had_lost_counts_for_no_speed(record: RunRecord) -> None:
    told = list(record.of(Progressed))
    told[5] = replace(told[5], samples=told[2].samples)
    along = along_figure(replace(record, events=(record.start, *told)))
    assert along is not None
    assert min(along.samples_a_second) == 0.0


def test_each_level_of_the_budget_has_its_decision_and_the_command_that_sets_it(record: RunRecord) -> None:
    levels = levels_figure(record)
    assert levels is not None
    first, second = levels.rows
    assert [first.allowed, second.allowed] == ["6 W mean", "5 W mean"]
    _, best, later = (event.setting for event in record.of(SettingChanged))
    assert (first.setting, second.setting) == (best, later), "what was only tried is no decision"
    assert first.time_s == pytest.approx(record.end.at_s / 2)
    assert first.power_w == pytest.approx(5.7, rel=0.02)
    assert second.power_w == pytest.approx(4.8, rel=0.02)
    assert first.command == "", "a board inside one process cannot be left set"
    one = [event for event in record.events if getattr(event, "power_w", None) != 5.0]
    assert levels_figure(replace(record, events=tuple(one))) is None


def test_the_command_names_every_knob() -> None:
    here = replace(device().info, in_process=False, address="jetson:/")
    mode = PowerMode(cpu_cores=4, cpu_mhz=1479.0, gpu_mhz=614.4)
    expected = "underwatt set --device jetson:/ --cpu-cores 4 --cpu-mhz 1479 --gpu-mhz 614.4"
    assert set_command(here, mode) == expected
    assert set_command(here, PowerMode()) == ""
