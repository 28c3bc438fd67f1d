from __future__ import annotations

import math

import pytest
from hypothesis import given, strategies as st
from live_run import FakeRun

from underwatt.errors import InputError
from underwatt.events import (
    BudgetChanged,
    Ended,
    Expected,
    Noted,
    Planned,
    Progressed,
    Resumed,
    Scored,
    SettingChanged,
    Verdict,
)
from underwatt.live.feed import LogReader
from underwatt.live.view import ENTRIES, RECENT_S, WHOLE_BINS, FoldedPower, RunView, Thinned
from underwatt.records import PowerMode, Setting
from underwatt.runlog.log import follow


def seen(run: FakeRun) -> RunView:
    run.log.flush()
    reader = LogReader(run.folder / "log.jsonl")
    while reader.advance():
        pass
    return reader.view


def words(view: RunView) -> list[str]:
    return [entry["text"] for entry in view.entries]


def test_a_run_is_told_from_start_to_end(fake_run: FakeRun) -> None:
    fake_run.setting(16, 307.2, "searching", "to learn")
    fake_run.second(6.0, "searching")
    fake_run.measured(16, 6.0)
    chosen, expected = Setting(PowerMode(gpu_mhz=614.4), 32), Expected(10.0, 9.0, 90.0)
    fake_run.log.write(Planned(at_s=fake_run.at_s, chosen=chosen, expected=expected, reason="It is the fastest."))
    fake_run.setting(32, 614.4, "holding", "fastest")
    fake_run.second(9.5)
    fake_run.log.write(Scored(at_s=fake_run.at_s, samples=1280, value=0.91, target=0.95))
    fake_run.log.write(Noted(at_s=fake_run.at_s, level="warning", text="Hot."))
    view = seen(fake_run)
    shown = view.shown()
    assert (shown["phase"], shown["state"], shown["simulated"]) == ("running", "holding", True)
    assert shown["device"] == "Jetson Nano (virtual)"
    assert shown["power_w"] == pytest.approx(6.0, abs=0.2)  # the last whole second
    assert shown["budget_w"] == 10.0
    assert shown["score"] == 0.91
    assert shown["measured"] == 1
    assert shown["setting"]["batch_size"] == 32
    assert {"name": "GPU", "value": 614.4, "unit": "MHz"} in shown["setting"]["knobs"]
    assert words(view) == [
        "digits on Jetson Nano (virtual) began, with a budget of 10 W mean.",
        "Budget: 10 W mean.",
        "Searching: batch 16, 4 cores, CPU 1479 MHz, GPU 307.2 MHz, memory 1600 MHz – to learn",
        "Measured batch 16, GPU 614.4 MHz: 100 ms a step, 6.00 W",
        "Chose batch 32, GPU 614.4 MHz. It is the fastest.",
        "Holding: batch 32, 4 cores, CPU 1479 MHz, GPU 614.4 MHz, memory 1600 MHz – fastest",
        "Score 0.91 of 0.95 after 1,280 samples.",
        "Hot.",
    ]
    assert view.entries[-1]["level"] == "warning"
    fake_run.end()
    view = seen(fake_run)
    assert view.shown()["phase"] == "ended"
    assert view.shown()["end"]["words"] == "The run reached its target"
    assert "as it was before" in words(view)[-1]


def test_watts_of_a_lost_sensor_are_not_those_of_now(fake_run: FakeRun) -> None:
    fake_run.second(9.0)
    fake_run.second(9.0)
    assert seen(fake_run).shown()["power_w"] == pytest.approx(9.0, abs=0.2)
    fake_run.log.write(Noted(at_s=fake_run.at_s + 20, level="warning", text="The sensor is lost."))
    assert seen(fake_run).shown()["power_w"] is None


@pytest.mark.parametrize("outcome", ["limit", "interrupted", "failed", "energy spent", "another"])
def test_every_end_has_words(fake_run: FakeRun, outcome: str) -> None:
    fake_run.end(outcome, restored=False, error="The disk is full.")
    view = seen(fake_run)
    assert "NOT put back. The disk is full." in words(view)[-1]
    assert view.entries[-1]["level"] == ("warning" if outcome == "failed" else "info")


def test_a_resumed_run_goes_on(fake_run: FakeRun) -> None:
    fake_run.end("interrupted")
    fake_run.log.write(Resumed(at_s=fake_run.at_s, started_at="2026-07-02T12:00:00+02:00", pid=1))
    view = seen(fake_run)
    assert view.facts["phase"] == "running"
    assert view.facts["end"] is None


def test_what_was_asked_for_holds_until_the_run_says_so(fake_run: FakeRun) -> None:
    view = seen(fake_run)
    view.ask("7W")
    assert view.facts["asked"]["budget"] == "7W"
    view.apply(BudgetChanged(at_s=1.0, power_w=12.0, why="schedule"))
    assert view.facts["asked"] is not None
    view.apply(BudgetChanged(at_s=2.0, power_w=7.0, why="changed"))
    assert view.facts["asked"] is None
    assert view.facts["budget_w"] == 7.0
    view.ask("7W")
    assert view.facts["asked"] is None, "it holds already"
    with pytest.raises(InputError):
        view.ask("7 apples")


def test_a_process_that_is_gone_is_not_an_end_that_was_written(fake_run: FakeRun) -> None:
    view = seen(fake_run)
    view.lose()
    assert view.facts["phase"] == "gone"
    fake_run.second()
    fake_run.log.flush()
    view.apply(follow(fake_run.folder / "log.jsonl")[0][-1])
    assert view.facts["phase"] == "running", "it goes on after all"
    fake_run.end()
    view = seen(fake_run)
    view.lose()
    assert view.facts["phase"] == "ended"


def test_a_line_of_another_shape_is_counted_and_left_out(fake_run: FakeRun) -> None:
    with (fake_run.folder / "log.jsonl").open("a") as file:
        file.write('{"kind": "setting", "at_s": 1.0}\n')
        file.write("not JSON at all\n")
    view = seen(fake_run)
    assert view.unreadable == 2
    assert [(entry["kind"], entry["level"]) for entry in view.entries][2:] == [("damage", "warning")], "said once"
    fake_run.second()
    assert seen(fake_run).facts["steps"] == 10, "and what comes after it is read"


def test_entries_are_bounded() -> None:
    view = RunView()
    for number in range(ENTRIES + 50):
        view.apply(Noted(at_s=number, level="info", text=str(number)))
    assert view.unreadable == 0
    assert len(view.entries) == ENTRIES
    assert view.entries[-1]["number"] == ENTRIES + 50


def test_at_the_end_of_a_short_run_the_last_batch_size_is_shown_and_no_state() -> None:
    view = RunView()
    view.apply(Progressed(at_s=0.0, steps=1, samples=8, batch_size=8, state="searching"))
    view.apply(SettingChanged(at_s=0.5, setting=Setting(PowerMode(), 64), state="holding"))
    assert (view.shown()["batch_size"], view.shown()["state"]) == (64, "holding")
    view.apply(Ended(at_s=0.9, outcome="reached", restored=True))
    assert (view.shown()["batch_size"], view.shown()["state"]) == (64, None)


def test_a_warning_of_the_budget_is_gone_when_it_is_held_again() -> None:
    view = RunView()
    view.apply(Noted(at_s=3.0, level="warning", text="Over the budget: the mean of the last seconds is 4 W."))
    view.apply(Noted(at_s=4.0, level="info", text="Within the budget of 3 W again."))
    assert view.shown()["warning"] is None
    view.apply(Noted(at_s=5.0, level="warning", text="Power cannot be read."))
    view.apply(Noted(at_s=6.0, level="info", text="Within the budget of 3 W again."))
    assert view.shown()["warning"] == {"text": "Power cannot be read.", "at_s": 5.0}


def test_a_warning_stands_out_until_the_budget_changes() -> None:
    view = RunView()
    text = "Waiting alone draws 1.9 W: 1 W cannot be held, and training waits."
    view.apply(Noted(at_s=3.0, level="warning", text=text))
    view.apply(BudgetChanged(at_s=3.0, power_w=1.0, why="changed"))  # what it warns of
    view.apply(Noted(at_s=4.0, level="info", text="something else"))
    assert view.shown()["warning"] == {"text": text, "at_s": 3.0}
    view.apply(BudgetChanged(at_s=9.0, power_w=5.0, why="changed"))
    assert view.shown()["warning"] is None


def test_a_budget_says_what_its_watts_bound() -> None:
    view = RunView()
    view.apply(BudgetChanged(at_s=1.0, power_w=3.0, watts="peak", window_s=None, why="changed"))
    assert view.facts["budget_means"] == "for peaks"
    assert view.entries[-1]["text"] == "Budget changed: 3 W peak."
    view.apply(BudgetChanged(at_s=2.0, power_w=3.0, watts="mean", window_s=60.0, why="changed"))
    assert view.facts["budget_means"] == "as mean over 60 s"
    view.apply(BudgetChanged(at_s=3.0, power_w=3.0, watts="mean", window_s=None, why="changed"))
    assert view.facts["budget_means"] == ""


def filled(seconds: int, power_w: float = 9.0) -> FoldedPower:
    trace = FoldedPower()
    trace.add_budget(0.0, 10.0)
    for second in range(seconds):
        trace.add([second + tenth / 10 for tenth in range(10)], [power_w + tenth / 10 for tenth in range(10)])
    return trace


def test_a_second_is_its_lowest_mean_and_highest_reading() -> None:
    trace = filled(3)
    assert trace.recent()[0] == [0.0, 9.0, 9.45, 9.9, 10.0]
    assert trace.latest() is not None
    assert trace.latest().at_s == 1.0  # type: ignore[union-attr]
    assert trace.newest_s() == (2.0, 1.0)


def test_lines_that_cross_seconds_give_the_same_as_readings_one_by_one() -> None:
    times = [tenth / 10 for tenth in range(57)]
    watts = [5 + tenth % 7 for tenth in range(57)]
    one_by_one, at_once = FoldedPower(), FoldedPower()
    at_once.add(times, watts)
    for at_s, power_w in zip(times, watts, strict=True):
        one_by_one.add([at_s], [power_w])
    assert at_once.recent() == one_by_one.recent()
    assert at_once.whole() == one_by_one.whole()


def test_recent_forgets_and_whole_gets_wider_but_neither_grows() -> None:
    trace = filled(5000)
    assert len(trace.recent()) == RECENT_S + 1
    rows = trace.whole()
    assert WHOLE_BINS / 2 <= len(rows) <= WHOLE_BINS
    assert trace.width_s == 8.0
    assert rows[0] == [0.0, 9.0, 9.45, 9.9, 10.0]
    assert [row[0] for row in rows] == [8.0 * place for place in range(len(rows))]
    assert trace.whole(since_s=4000.0)[0][0] == 4000.0


def test_time_over_counts_seconds_beyond_the_tolerance_by_the_budget_of_the_time() -> None:
    trace = FoldedPower()
    trace.add_budget(5.5, 7.0)  # written before the readings that came earlier, as a log does
    trace.add_budget(0.0, 10.0)
    for second in range(12):
        trace.add([second, second + 0.5], [10.1 if second < 5 else 7.5, 10.1 if second < 5 else 7.5])
    assert trace.over_s == 5.0  # seconds 6 to 10: 5 has both budgets, 11 is not over yet
    assert trace.recent()[5][4] == 10.0
    assert trace.recent()[6][4] == 7.0


def test_no_limit_and_lost_readings_are_not_zero() -> None:
    trace = FoldedPower()
    trace.add([0.0, 0.1], [math.nan, math.nan])
    assert trace.latest() is None
    assert trace.recent() == []
    trace.add([0.2, 0.3], [math.nan, 50.0])
    trace.add_budget(1.0, None)
    trace.add([1.0, 2.0], [60.0, 60.0])
    assert trace.recent()[0] == [0.0, 50.0, 50.0, 50.0, None]
    assert trace.over_s == 0.0


def test_many_budgets_do_not_pile_up() -> None:
    trace = FoldedPower()
    for second in range(10_000):
        trace.add_budget(second, 5.0 + second % 2)
        trace.add([second, second + 0.9], [1.0, 1.0])
    assert trace.recent()[-1][4] == 6.0
    assert len(trace._budget_w) <= 2001


@given(st.lists(st.tuples(st.floats(0, 5000), st.floats(0, 500)), min_size=1, max_size=60))
def test_no_reading_in_order_is_lost(readings: list[tuple[float, float]]) -> None:
    readings.sort()
    trace = FoldedPower()
    trace.add([at_s for at_s, _ in readings], [power_w for _, power_w in readings])
    trace.add([9000.0], [1.0])
    total = sum(one.readings for one in trace._whole)
    assert total == len(readings)
    assert sum(one.mean_w * one.readings for one in trace._whole) == pytest.approx(sum(w for _, w in readings))


def progressed(verdict: Verdict) -> Progressed:
    return Progressed(at_s=9.0, steps=9, samples=90, batch_size=10, state="holding", verdict=verdict)


def test_the_runs_own_verdict_is_shown_while_it_goes_on_and_when_it_has_ended() -> None:
    view = RunView()
    for event in (
        progressed(Verdict(bounded_s=9.0, judged_s=9.0)),
        Ended(at_s=99.0, outcome="reached", restored=True, verdict=Verdict(bounded_s=99.0, judged_s=99.0, over_s=7.0)),
    ):
        view.apply(event)
        found = view.shown()["verdict"]
        assert found == {"held": event.verdict.held, "over_s": event.verdict.over_s, "words": str(event.verdict)}
    assert found["held"] is False
    unbounded = RunView()
    unbounded.apply(progressed(Verdict()))
    assert unbounded.shown()["verdict"] is None


def test_scores_that_follow_each_other_are_one_line_of_the_log_and_all_of_the_curve() -> None:
    view = RunView()
    view.apply(Noted(at_s=0.0, level="warning", text="important"))
    for number in range(ENTRIES * 3):
        view.apply(Scored(at_s=float(number), samples=number, value=number / 1000, target=0.9))
    assert [entry["kind"] for entry in view.entries] == ["note", "score"]
    assert view.entries[-1]["text"].startswith("Score 0.599 of 0.9")
    assert view.scores.rows[0] == [0.0, 0.0]
    assert view.scores.rows[-1][0] > ENTRIES * 2.9
    assert len(view.scores.rows) <= 400


def test_a_curve_that_is_thinned_is_read_anew_and_else_only_what_is_new() -> None:
    rows = Thinned(most=10)
    for at in range(5):
        rows.add([float(at), 1.0])
    mark = rows.mark
    rows.add([5.0, 1.0])
    assert rows.since(mark) == {"whole": False, "rows": [[5.0, 1.0]]}
    assert rows.since((0, 0))["whole"]
    for at in range(6, 30):
        rows.add([float(at), 1.0])
    assert len(rows.rows) <= 10
    assert rows.since(mark) == {"whole": True, "rows": rows.rows}


def test_samples_a_second_are_counted_as_they_are_and_not_by_the_time_of_a_step() -> None:
    view = RunView()
    told = {"batch_size": 32, "state": "holding", "step_s": 0.1, "temperature_c": 51.0}
    for second in range(1, 31):  # half of the time is pauses: five steps a second, of a tenth each
        samples = 160 * second
        running = PowerMode(gpu_mhz=614.4)
        view.apply(Progressed(at_s=float(second), steps=5 * second, samples=samples, running=running, **told))
    facts = view.shown()
    assert facts["samples_s"] == pytest.approx(160.0)
    assert (facts["temperature_c"], facts["clock"]) == (51.0, "GPU clock, MHz")
    assert view.course.rows[-1] == [30.0, pytest.approx(160.0), 614.4, 51.0]
