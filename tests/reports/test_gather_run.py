"""Figures of a run, read as data."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import report_world as world
from hypothesis import given, settings, strategies as st

from underwatt.budget import parse_budget
from underwatt.events import BudgetChanged, Expected, Planned, Resumed, SettingChanged, Verdict
from underwatt.measure.meter import Trace
from underwatt.reports.build import build_report
from underwatt.reports.gather_run import budget_of, energy_figures, happened, stretches, thin, trace_figure
from underwatt.reports.report_records import PowerTrace, Report
from underwatt.runlog.log import read_log
from underwatt.runlog.run_record import Points, RunRecord

EXPECTED = Expected(time_s=600.0, power_w=5.5, energy_j=3300.0)


def test_the_trace_keeps_its_excess_and_follows_the_budget(whole: Report, record: RunRecord) -> None:
    trace = whole.trace
    assert trace is not None
    assert trace.readings == 6000
    assert len(trace.at_s) <= 4000
    assert trace.over_power_w == (7.25,)
    assert trace.readings_over == 1
    assert trace.budget_w == (6.0, 5.0)
    assert (trace.bounded_s, trace.judged_s) == pytest.approx((600.0, 600.0))
    assert trace.time_over_s == record.verdict().over_s == 0
    assert "Of 10.0 min under a budget, 10.0 min were judged, by means over 1 s: never above it" in trace.message
    assert [change.kind for change in trace.changes] == [
        "budget",
        "searching",
        "holding",
        "budget",
        "holding",
        "info",
        "end",
    ]


def test_energy_by_time_and_by_setting_add_up(whole: Report, record: RunRecord) -> None:
    over_time, spent = whole.energy_over_time, whole.energy_spent
    assert over_time is not None
    assert spent is not None
    assert over_time.energy_j[-1] == pytest.approx(record.energy_j(), rel=1e-6)
    assert sum(share.energy_j for share in spent.shares) == pytest.approx(record.energy_j(), rel=1e-3)
    assert sum(share.time_s for share in spent.shares) == pytest.approx(600, abs=0.2)
    assert [share.energy_j for share in spent.shares] == sorted((s.energy_j for s in spent.shares), reverse=True)


def test_energy_is_not_counted_while_a_run_was_stopped(tmp_path: Path) -> None:
    world.write_run(tmp_path / "log.jsonl", seconds=60, excess_at_s=None)
    lines = (tmp_path / "log.jsonl").read_text().splitlines()
    later = [
        '{"kind":"resume","at_s":1000,"started_at":"","pid":2}',
        '{"kind":"power","at_s":[1001,1002],"power_w":[5.0,5.0]}',
    ]
    (tmp_path / "log.jsonl").write_text("\n".join([*lines, *later]) + "\n")
    record = read_log(tmp_path / "log.jsonl")
    found = energy_figures(record)
    assert found is not None
    assert (
        found[0].energy_j[-1] == pytest.approx(record.energy_j(), rel=1e-6) == pytest.approx(60 * 5.25 + 10, rel=0.02)
    )


def test_the_lag_of_the_sensor_after_a_change_is_no_excess(record: RunRecord) -> None:
    at_s, power_w = record.power.at_s, np.array(record.power.power_w)
    power_w[(at_s > 300.0) & (at_s < 301.5)] = 5.9  # the budget fell to 5 W at 300 s
    lagging = replace(record, power=replace(record.power, power_w=power_w))
    quiet, told = trace_figure(record), trace_figure(lagging)
    assert quiet is not None
    assert told is not None
    assert lagging.time_over_s() > record.time_over_s() + 1
    assert told.time_over_s == quiet.time_over_s
    assert told.judged_s == pytest.approx(quiet.judged_s - 1.4)
    assert "Not judged are readings that came down within 2.5 s of a change" in told.message
    assert told.readings_over > quiet.readings_over  # no single reading is hidden


def ended(record: RunRecord, **changed: Any) -> RunRecord:
    return replace(record, events=(*record.events[:-1], replace(record.events[-1], **changed)))


def test_how_a_run_went_is_told_whether_or_not_there_is_a_plan(record: RunRecord) -> None:
    failed = ended(record, outcome="failed", score=None, error="CUDA ran out of memory.", restored=False)
    bare = build_report(world.profile(2), None, made_at="", record=failed)
    assert bare.decision is None
    assert "failed" in bare.happened
    assert "CUDA ran out of memory. The device was not put back" in bare.happened
    unknown = happened(ended(record, energy_j=math.nan, score=None))
    assert unknown == "The training under 6 W, then 5 W reached its target after 10.0 min and 123,456 samples."
    cut = replace(record, events=record.events[:-1])
    assert happened(cut) == "The run under 6 W, then 5 W has not ended, or was cut off."


@pytest.mark.parametrize(
    ("deadline", "outcome", "late_s", "says"),
    [
        ("15min", "reached", -300.0, "The deadline of 15 min was made, 5.00 min early."),
        ("9min", "finished", 60.0, "The deadline of 9 min was missed by 60.0 s."),
        ("9min", "interrupted", 60.0, "The deadline of 9 min was missed by 60.0 s."),
        ("15min", "limit", None, ""),
    ],
)
def test_a_deadline_is_said_to_have_been_made_or_missed(
    record: RunRecord, deadline: str, outcome: str, late_s: float | None, says: str
) -> None:
    start = replace(record.start, budget=str(parse_budget("08:00-18:00=15W,else=7W", deadline)))
    run = ended(replace(record, events=(start, *record.events[1:])), outcome=outcome)
    assert run.late_s == late_s
    assert says in happened(run)
    assert ("deadline" in happened(run)) == bool(says)
    longer = Resumed(at_s=599.0, budget=str(parse_budget("5W, 1h")))
    assert replace(run, events=(*run.events[:-1], longer, run.events[-1])).deadline_s == 3600
    assert record.late_s is None


def budgets(record: RunRecord, **changed: Any) -> RunRecord:
    """The same run under other budgets."""
    events = (replace(event, **changed) if isinstance(event, BudgetChanged) else event for event in record.events)
    return replace(record, events=tuple(events))


def test_budgets_that_change_often_are_told_by_their_range(record: RunRecord) -> None:
    many = [BudgetChanged(at_s=310.0 + at, power_w=4.0, why="changed") for at in range(9)]
    assert "under 6 W, then 5 W, then 4 W reached" in happened(replace(record, events=(*record.events, *many)))
    many = [replace(step, power_w=4.0 + at) for at, step in enumerate(many)]
    assert "under budgets from 4 W to 12 W reached" in happened(replace(record, events=(*record.events, *many)))
    assert happened(budgets(record, power_w=None)).startswith("The training reached")
    assert "under 6 W peak, then 5 W peak reached" in happened(budgets(record, watts="peak"))


def test_expected_energy_names_the_budget_it_is_for(whole: Report) -> None:
    assert whole.energy_over_time is not None
    assert whole.energy_over_time.expected_under == "6 W mean"
    assert "With 6 W mean all along, the plan expects" in whole.energy_over_time.message


def test_one_setting_leaves_no_rest(record: RunRecord) -> None:
    settings = [at for at, event in enumerate(record.events) if isinstance(event, SettingChanged)]
    for count, words in ((1, ""), (2, ", the rest at 1 other setting.")):
        kept = tuple(event for at, event in enumerate(record.events) if at not in settings[count:])
        found = energy_figures(replace(record, events=kept))
        assert found is not None
        assert found[1] is not None
        assert ("the rest" in found[1].message) == bool(words)
        assert found[1].message.endswith(words)


def test_readings_are_judged_by_what_the_budget_bounds(record: RunRecord) -> None:
    def judged(**more: Any) -> PowerTrace:
        trace = trace_figure(budgets(record, **more))
        assert trace is not None
        return trace

    mean, peak, long = judged(watts="mean"), judged(watts="peak"), judged(watts="mean", window_s=60.0)
    assert [trace.windows_s for trace in (mean, peak, long)] == [(1.0,), (0.0,), (60.0,)]
    assert mean.time_over_s == 0 < peak.time_over_s  # one reading of 7.25 W
    assert "by single readings: above it by more than 2% for 100 ms" in peak.message
    assert [change.text for change in peak.changes if change.kind == "budget"] == [
        "6 W peak (start)",
        "5 W peak (changed)",
    ]
    first, later = record.of(BudgetChanged)
    mixed = tuple(replace(later, watts="peak") if event == later else event for event in record.events)
    both = trace_figure(replace(record, events=mixed))
    assert first.watts == "mean"
    assert both is not None
    assert both.windows_s == (0.0, 1.0)
    assert "by single readings and means over 1 s" in both.message


def short_run(record: RunRecord, seconds: float, power_w: float) -> RunRecord:
    """The beginning of a run that draws so much, and changes its setting twice a second."""
    kept = record.power.at_s <= seconds
    power = Trace(record.power.at_s[kept], np.full(int(kept.sum()), power_w), None, missed=0)
    [setting, other, *_] = record.of(SettingChanged)
    moves = [replace((setting, other)[at % 2], at_s=at / 2) for at in range(int(2 * seconds))]
    assert record.end is not None
    end = replace(record.end, at_s=seconds, energy_j=power_w * seconds)
    return replace(record, events=(record.start, record.of(BudgetChanged)[0], *moves, end), power=power)


def test_a_run_that_stays_above_the_budget_is_never_said_to_have_held_it(record: RunRecord) -> None:
    above = trace_figure(short_run(record, 27.0, 9.0))
    assert above is not None
    assert above.judged_s == above.time_over_s == pytest.approx(27.0)
    assert "Of 27.0 s under a budget, 27.0 s were judged" in above.message
    assert "above it by more than 2% for 27.0 s" in above.message
    assert "never" not in above.message


def test_what_the_run_itself_said_of_its_budget_stands_first(record: RunRecord) -> None:
    run = short_run(record, 27.0, 4.0)
    said = Verdict(bounded_s=27.0, judged_s=25.0, over_s=3.0, worst_over=0.07, since_s=4.0, why="It draws more.")
    trace = trace_figure(ended(run, verdict=said))
    assert trace is not None
    assert trace.message.startswith(
        "The budget was NOT held: above it for 3.0 s of 25 s, first at 4 s, by up to 7.0%. It draws more. 270 readings"
    )
    assert trace.time_over_s == 3.0


def test_a_short_run_is_too_short_to_say(record: RunRecord) -> None:
    quiet, above = (trace_figure(short_run(record, 3.0, power_w)) for power_w in (4.0, 9.0))
    assert quiet is not None
    assert above is not None
    assert "3.00 s were judged: too short to say whether it was held." in quiet.message
    assert "too short to say whether it was held, but power was more than 2% above it for 3.00 s" in above.message


def test_mean_watts_are_one_number_and_a_short_run_says_what_they_are_worth(record: RunRecord) -> None:
    long, short = short_run(record, 20.0, 5.0), short_run(record, 2.0, 5.0)
    for run, says in ((long, "5.00 W on average"), (short, "5.00 W on average (too short for watts and joules")):
        lagging = replace(run, power=replace(run.power, power_w=run.power.power_w / 2))  # the sensor's own mean differs
        trace = trace_figure(lagging)
        assert trace is not None
        assert says in trace.message
        assert says in happened(lagging)
    assert "too short" not in happened(long)


def test_the_budget_of_a_run_is_the_one_it_last_decided_under(record: RunRecord) -> None:
    assert budget_of(record) == parse_budget("6W")
    chosen = record.of(SettingChanged)[0].setting
    plans = [Planned(at_s=at_s, chosen=chosen, expected=EXPECTED) for at_s in (20.0, 310.0)]
    assert budget_of(replace(record, events=(*record.events, plans[0]))) == parse_budget("6W")
    assert budget_of(replace(record, events=(*record.events, *plans))) == parse_budget("5W")


@given(
    power_w=st.lists(st.floats(0, 100), min_size=1, max_size=400),
    bound_w=st.floats(0, 100),
    most=st.integers(8, 60),
)
def test_no_excess_and_no_extreme_is_hidden(power_w: list[float], bound_w: float, most: int) -> None:
    power, bound = np.array(power_w), np.full(len(power_w), bound_w)
    rows = thin(power, bound, most)
    assert len(rows) <= most
    assert list(rows) == sorted(set(rows.tolist()))
    assert power[rows].max() == power.max()
    assert power[rows].min() == power.min()
    assert (power[rows] > bound[rows]).any() == (power > bound).any()
    assert {0, len(power) - 1} <= set(rows.tolist())


def test_an_excess_below_the_highest_reading_stays_where_the_budget_dropped() -> None:
    power, bound = np.full(10_000, 9.0), np.full(10_000, 10.0)
    bound[5000:] = 5.0
    power[5000:] = 4.0
    power[5003] = 6.0  # over its budget, though 9 W were fine a moment before
    rows = thin(power, bound, 300)
    assert 5003 in rows
    assert (power[rows] > bound[rows]).sum() == 1


def test_every_stretch_with_an_excess_shows_one() -> None:
    rng = np.random.default_rng(0)
    power, bound = rng.normal(9, 0.2, 864_000), np.full(864_000, 10.0)
    spikes = rng.choice(864_000, 40, replace=False)
    power[spikes] = 10.001
    rows = thin(power, bound)
    shown = rows[power[rows] > bound[rows]]
    assert len(rows) <= 4000
    stretch = 864_000 / ((4000 - 2) // 3)
    assert all(np.abs(shown - spike).min() <= stretch for spike in spikes)


def test_a_short_trace_is_shown_whole() -> None:
    power = np.array([3.0, 1.0, 2.0])
    assert thin(power, np.full(3, 2.5)).tolist() == [0, 1, 2]


@settings(max_examples=50)
@given(st.lists(st.floats(0.1, 100), max_size=300), st.integers(1, 50))
def test_stretches_bound_what_they_average(power_w: list[float], most: int) -> None:
    power = np.array(power_w, dtype=float)
    points = Points(np.arange(len(power), dtype=float), power, power, power, np.ones(len(power)), power)
    middle, low, mean, high = stretches(points, most)
    assert len(middle) <= most
    assert np.all(low <= mean + 1e-9)
    assert np.all(mean <= high + 1e-9)
    if len(power):
        assert high.max() == pytest.approx(power.max())
