"""The figures of a whole report, read as data."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import report_world as world

from underwatt.budget import parse_budget
from underwatt.events import Expected, Planned, SettingChanged
from underwatt.records import Setting, to_json
from underwatt.reports.build import build_report, decided_by, parity_figure
from underwatt.reports.gather_run import trace_figure
from underwatt.reports.page import render, sections_of
from underwatt.reports.report_records import Report
from underwatt.runlog.run_record import RunRecord

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
    assert agreed.front is not None
    assert agreed.front.chosen == fallback.chosen, "with the same intervals, whoever chose it"


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


def test_pauses_count_where_the_run_knew_what_they_draw(record: RunRecord) -> None:
    most = Setting(world.candidates()[len(world.candidates()) - 1].mode, 4)  # short steps, or the mean would swing
    plan = Planned(at_s=20.0, chosen=most, expected=EXPECTED, reason="with pauses.")
    start = replace(record.start, idle_w=1.5)
    report = world.report(record=replace(record, events=(start, *record.events[1:], plan)))
    alone = world.report(record=replace(record, events=(*record.events, plan)))
    assert report.front is not None
    assert alone.front is not None
    assert report.decision is not None
    assert "with pauses that are to hold it to 6 W mean (" in report.decision.sentence
    assert report.front.chosen.power_w.expected == pytest.approx(6.0)
    assert report.front.chosen.time_s.expected > 1.05 * alone.front.chosen.time_s.expected
    assert all(point.power_w <= 6 * (1 + 1e-9) for point in report.front.measured if point.fits)
    assert report.front.paused > 0 == alone.front.paused
    of_all = f"{alone.front.keeping} of {alone.front.settings} settings keep 6 W mean"  # which a plan says too
    assert alone.front.message.startswith(f"{of_all};")
    more = report.front.keeping - alone.front.keeping
    assert report.front.message.startswith(f"{of_all} by themselves, {more} more by pauses;")
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
    assert "; the usual way (largest batch that fits, highest clock) is predicted to take" in whole.decision.sentence
    assert "to reach a score of 0.97 in" in whole.decision.sentence


def test_the_published_baseline_alone_gives_the_speed_up() -> None:
    report = world.report(budget=parse_budget("2.5W"))
    assert report.front is not None
    assert report.decision is not None
    assert "No setting for largest batch that fits, highest clock" in report.front.message
    assert "as long" not in report.decision.sentence
    assert [figure.name for figure in report.decision.key_figures].count("Speed-up") == 0


def test_a_choice_that_draws_more_than_the_budget_is_not_said_to_be_within_it(record: RunRecord) -> None:
    most = world.candidates()[len(world.candidates()) - 1]
    plan = Planned(at_s=20.0, chosen=most, expected=EXPECTED, reason="with pauses.")
    report = world.report(record=replace(record, events=(*record.events, plan)))
    assert report.decision is not None
    assert "with pauses that are to hold it to 6 W mean" in report.decision.sentence
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
    assert any("batch sizes are weighed by what 7 other trainings needed" in text for text in report.assumptions)
    assert any("Not knowing how this training learns costs" in text for text in report.assumptions)


def test_simulated_is_said(whole: Report) -> None:
    assert whole.title.simulated
    assert any("simulated" in text for text in whole.assumptions)
    assert any("of the same family as the simulator" in text for text in whole.assumptions)
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
