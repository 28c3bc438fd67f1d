"""The figures of a whole report, read as data."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import report_world as world

from underwatt.budget import parse_budget
from underwatt.events import BudgetChanged, Expected, Planned, SettingChanged
from underwatt.measure.meter import Trace
from underwatt.records import Setting, to_json
from underwatt.reports.build import build_report, decided_by, parity_figure
from underwatt.reports.figures import PowerTrace, Report
from underwatt.reports.page import render, sections_of
from underwatt.reports.run_figures import budget_of, energy_figures, happened, trace_figure
from underwatt.runlog.log import read_log
from underwatt.runlog.record import RunRecord

EXPECTED = Expected(time_s=600.0, power_w=5.5, energy_j=3300.0)


def test_nothing_is_missing_where_everything_is_known(whole: Report) -> None:
    assert whole.missing == ()
    assert all(getattr(whole, name) is not None for name in whole.__dataclass_fields__)
    json.dumps(to_json(whole), allow_nan=False)


def test_the_decision_names_setting_time_watts_and_budget(whole: Report) -> None:
    assert whole.decision is not None
    assert whole.front is not None
    chosen = whole.front.chosen
    assert str(chosen.setting) in whole.decision.sentence
    assert "6 W mean" in whole.decision.sentence
    assert "0.97" in whole.decision.sentence
    assert "under 6 W, then 5 W reached its target with a score of 0.971" in whole.happened
    assert chosen.power_w.expected <= 6


def test_the_front_holds_budget_measurements_others_and_their_verdicts(whole: Report) -> None:
    front = whole.front
    assert front is not None
    assert front.budget_w == 6
    assert front.per == "target"
    assert 0 < front.keeping < front.settings == len(world.candidates())
    assert len(front.measured) == world.MEASURED  # what ran out of memory has no time
    assert all(point.fits == (point.power_w <= 6) for point in front.measured)
    times, powers = ([getattr(p, name).expected for p in front.front] for name in ("time_s", "power_w"))
    assert times == sorted(times)
    assert powers == sorted(powers, reverse=True)
    names = {other.choice.name for other in front.others}
    assert any("largest batch" in name for name in names)
    assert any("vendor" in name for name in names)
    over = [other.choice for other in front.others if other.choice.fits == "over"]
    assert over
    assert all(choice.power_w > 6 for choice in over)
    for point in front.front:
        assert point.time_s.low <= point.time_s.expected <= point.time_s.high


def test_heat_maps_hold_the_choice_and_mark_what_keeps_the_budget(whole: Report) -> None:
    heat, power, front = whole.time_map, whole.power_map, whole.front
    assert heat is not None
    assert power is not None
    assert front is not None
    row, column = heat.chosen
    assert heat.knob == "gpu_mhz"
    assert heat.knob_values[row] == front.chosen.setting.mode.gpu_mhz
    assert heat.batch_sizes[column] == front.chosen.setting.batch_size
    assert heat.values[row][column] == pytest.approx(front.chosen.time_s.expected)
    assert power.values[row][column] == pytest.approx(front.chosen.power_w.expected)
    assert power.keeps[row][column]
    for line, kept in zip(power.values, power.keeps, strict=True):
        assert all(watts <= 6.3 for watts, keeps in zip(line, kept, strict=True) if keeps)
        assert all(keeps is False for watts, keeps in zip(line, kept, strict=True) if watts > 6.3)
    kept_times = [
        t for line, kept in zip(heat.values, heat.keeps, strict=True) for t, k in zip(line, kept, strict=True) if k
    ]
    assert min(kept_times) == pytest.approx(front.chosen.time_s.expected)


def test_convergence_has_runs_inside_a_band(whole: Report) -> None:
    found = whole.convergence
    assert found is not None
    assert len(found.runs) == 12
    assert all(low <= mid <= high for low, mid, high in zip(found.low, found.samples, found.high, strict=True))
    assert {4, 8, 16, 32, 64} <= set(found.batch_sizes)
    assert found.chosen_batch_size is not None


def test_parity_holds_each_setting_back(whole: Report) -> None:
    parity = whole.parity
    assert parity is not None
    assert len(parity.settings) == parity.measured == world.MEASURED
    measured = {m.setting: m for m in world.profile().usable()}
    for at, setting in enumerate(parity.settings):
        assert parity.step_s.measured[at] == measured[setting].step_s
        assert parity.step_s.predicted[at] != measured[setting].step_s
    errors = [abs(p / m - 1) for p, m in zip(parity.step_s.predicted, parity.step_s.measured, strict=True)]
    assert parity.step_s.mean_error == pytest.approx(100 * float(np.mean(errors)))


def test_very_many_settings_are_checked_by_some() -> None:
    parity = parity_figure(world.profile(30).measurements, most=12)
    assert len(set(parity.settings)) == 12
    assert parity.measured == 30


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


def test_what_a_run_decided_is_shown_as_its_choice(record: RunRecord) -> None:
    decided = record.of(SettingChanged)[1].setting
    plan = Planned(at_s=20.0, chosen=decided, expected=EXPECTED, reason="it was measured.")
    told = replace(record, events=(*record.events, plan))
    report = world.report(record=told)
    assert report.front is not None
    assert report.decision is not None
    assert report.front.chosen.setting == decided
    assert report.decision.reason == "it was measured."
    assert any("The run held settings that it had measured" in text for text in report.assumptions)
    assert decided_by(told, parse_budget("4W")) is None  # the run decided for 6 W
    fallback = world.report(record=record).front
    assert fallback is not None
    same = replace(plan, chosen=fallback.chosen.setting)
    agreed = world.report(record=replace(record, events=(*record.events, same)))
    assert agreed.decision is not None
    assert agreed.decision.reason == "it was measured."


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


def test_convergence_runs_for_another_target_are_not_used(record: RunRecord) -> None:
    other = replace(record, events=(replace(record.start, target=0.9999), *record.events[1:]))
    report = build_report(
        world.profile(),
        world.candidates(),
        made_at="",
        convergence=world.trainings(),
        target=0.9999,
        budget=parse_budget("6W"),
        record=other,
    )
    assert report.convergence is None
    [missing] = [item for item in report.missing if item.section == "Convergence"]
    assert "The convergence runs are for 0.97, the target is 0.9999" in missing.why
    assert report.front is not None
    assert report.front.per == "sample"
    assert report.title.target == 0.9999
    assert "to 0.9999 on" in render(report)


def test_a_budget_of_peaks_is_not_compared_with_means() -> None:
    report = world.report(budget=parse_budget("6W peak"))
    assert report.front is not None
    assert report.decision is not None
    assert report.front.bounds == "peak"
    details = {figure.name: figure.detail for figure in report.decision.key_figures}
    assert details["Mean power"] == "peaks within 6 W"


def test_a_choice_that_cannot_reach_the_target_any_more_is_planned_anew(record: RunRecord) -> None:
    most = world.candidates()[len(world.candidates()) - 1]
    plan = Planned(at_s=20.0, chosen=most, expected=EXPECTED, reason="as it was.")
    never = tuple(
        replace(run, samples=math.inf) if run.batch_size == most.batch_size else run for run in world.trainings()
    )
    report = world.report(record=replace(record, events=(*record.events, plan)), convergence=never)
    assert report.front is not None
    assert report.decision is not None
    assert report.decision.reason != "as it was."
    assert math.isfinite(report.front.chosen.time_s.expected)
    assert any("may be chosen where its predicted risk" in text for text in report.assumptions)


def test_the_budget_of_a_run_is_the_one_it_last_decided_under(record: RunRecord) -> None:
    assert budget_of(record) == parse_budget("6W")
    chosen = record.of(SettingChanged)[0].setting
    plans = [Planned(at_s=at_s, chosen=chosen, expected=EXPECTED) for at_s in (20.0, 310.0)]
    assert budget_of(replace(record, events=(*record.events, plans[0]))) == parse_budget("6W")
    assert budget_of(replace(record, events=(*record.events, *plans))) == parse_budget("5W")


def test_pauses_count_where_the_run_knew_what_they_draw(record: RunRecord) -> None:
    most = Setting(world.candidates()[len(world.candidates()) - 1].mode, 4)  # short steps, or the mean would swing
    plan = Planned(at_s=20.0, chosen=most, expected=EXPECTED, reason="with pauses.")
    start = replace(record.start, idle_w=1.5)
    report = world.report(record=replace(record, events=(start, *record.events[1:], plan)))
    alone = world.report(record=replace(record, events=(*record.events, plan)))
    assert report.front is not None
    assert alone.front is not None
    assert report.decision is not None
    assert "held to 6 W mean by pauses (" in report.decision.sentence
    assert report.front.chosen.power_w.expected == pytest.approx(6.0)
    assert report.front.chosen.time_s.expected > 1.05 * alone.front.chosen.time_s.expected
    assert all(point.power_w <= 6 * (1 + 1e-9) for point in report.front.measured if point.fits)
    assert report.front.paused > 0 == alone.front.paused
    keys = {section.id: section.key for section in sections_of(report)}
    assert "as pauses between steps would hold them" in keys["front"]
    assert "as pauses between steps would hold them" in keys["maps"]
    assert not any("as pauses" in section.key for section in sections_of(alone))


def test_the_same_setting_is_one_point_with_all_its_names(whole: Report) -> None:
    assert whole.front is not None
    settings = [other.choice.setting for other in whole.front.others]
    assert len(settings) == len(set(settings))
    one = world.report(budget=parse_budget("40W")).front  # nothing is bounded: the rules agree more
    assert one is not None
    shared = [other for other in one.others if "; " in other.choice.name]
    assert shared
    assert all(other.label.endswith(f"(+{other.choice.name.count('; ')})") for other in shared)


def test_the_sentence_says_that_the_baseline_is_predicted(whole: Report) -> None:
    assert whole.decision is not None
    assert "; the usual way (largest batch, highest clock) is predicted to take" in whole.decision.sentence
    assert "to reach a score of 0.97 in" in whole.decision.sentence


def test_the_published_baseline_alone_gives_the_speed_up() -> None:
    report = world.report(budget=parse_budget("2.5W"))
    assert report.front is not None
    assert report.decision is not None
    assert "No setting for largest batch, highest clock" in report.front.message
    assert "as long" not in report.decision.sentence
    assert [figure.name for figure in report.decision.key_figures].count("Speed-up") == 0


def test_a_choice_that_draws_more_than_the_budget_is_not_said_to_be_within_it(record: RunRecord) -> None:
    most = world.candidates()[len(world.candidates()) - 1]
    plan = Planned(at_s=20.0, chosen=most, expected=EXPECTED, reason="with pauses.")
    report = world.report(record=replace(record, events=(*record.events, plan)))
    assert report.decision is not None
    assert "held to 6 W mean by pauses" in report.decision.sentence
    assert "within" not in report.decision.sentence


def test_sections_without_data_say_which_command_provides_them() -> None:
    bare = build_report(world.profile(2), None, made_at="now")
    assert {item.command.split(" JOB")[0] for item in bare.missing} == {
        "underwatt converge",
        "underwatt profile",
        "underwatt run",
    }
    assert bare.measurements is not None
    assert bare.decision is bare.front is bare.trace is bare.parity is None
    unbounded = build_report(world.profile(), world.candidates(), made_at="now")
    assert any("underwatt report --budget" in item.command for item in unbounded.missing)
    assert unbounded.parity is not None


def test_a_budget_that_nothing_keeps_is_explained_not_an_error() -> None:
    report = world.report(budget=parse_budget("0.5W"))
    assert report.front is None
    assert any("smallest feasible power" in item.why for item in report.missing)


def test_without_convergence_times_are_of_one_sample() -> None:
    report = world.report(convergence=())
    assert report.front is not None
    assert report.front.per == "sample"
    assert report.front.chosen.time_s.expected < 60
    assert any("same number of samples" in text for text in report.assumptions)


def test_simulated_is_said(whole: Report) -> None:
    assert whole.title.simulated
    assert any("simulated" in text for text in whole.assumptions)
    real = replace(world.profile(4), device=replace(world.profile().device, simulated=False))
    told = build_report(real, None, made_at="now")
    assert not told.title.simulated
    assert not any("simulated" in text for text in told.assumptions)


def test_a_run_without_readings_is_left_out(record: RunRecord) -> None:
    empty = replace(record, power=replace(record.power, at_s=np.empty(0), power_w=np.empty(0)))
    assert trace_figure(empty) is None
    assert any(
        "no power" in item.why for item in build_report(world.profile(4), None, made_at="", record=empty).missing
    )


def test_messages_hold_no_nan(whole: Report) -> None:
    for name in whole.__dataclass_fields__:
        message = getattr(getattr(whole, name), "message", "")
        assert "nan" not in message.lower().split()
    assert math.isfinite(whole.trace.energy_over_j)  # type: ignore[union-attr]
