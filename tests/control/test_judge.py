from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from underwatt.control.judge import Bound, Judge, LiveJudge, Second, Seconds
from underwatt.events import Judgement, Verdict


def judged(watts: list[float], bound: Bound, *, begin_s: float = 0.0, judge: Judge | None = None) -> Judge:
    judge = judge or Judge()
    judge.budget(begin_s, bound)
    for at, power_w in enumerate(watts):
        judge.take(Second(begin_s + at, begin_s + at + 1, power_w, power_w, 10))
    return judge


def test_a_mean_within_the_budget_is_held() -> None:
    verdict = judged([9.9, 10.1] * 30, Bound(10.0)).verdict
    assert verdict.judgement is Judgement.HELD
    assert verdict.held is True
    assert "was held" in str(verdict)


def test_a_mean_above_it_is_not_held_and_says_since_when_and_by_how_much() -> None:
    verdict = judged([9.0] * 50 + [11.0] * 50, Bound(10.0)).verdict
    assert verdict.held is False
    assert verdict.since_s is not None
    assert 50 <= verdict.since_s <= 55
    assert math.isclose(verdict.worst_over, 0.1, rel_tol=1e-6)
    assert "NOT held" in str(verdict)


def test_one_second_in_a_hundred_is_forgiven_of_means_and_none_of_peaks() -> None:
    watts = [9.0] * 300 + [25.0] + [9.0] * 300
    assert judged(watts, Bound(10.0)).verdict.held is True
    peaks = judged(watts, Bound(10.0, is_peak=True)).verdict
    assert peaks.held is False
    assert peaks.peaks == 1


def test_a_short_run_proves_nothing_unless_it_is_over() -> None:
    assert judged([9.0] * 6, Bound(10.0)).verdict.judgement is Judgement.TOO_SHORT
    assert judged([20.0] * 6, Bound(10.0)).verdict.judgement is Judgement.NOT_HELD
    assert Verdict().judgement is Judgement.UNBOUNDED


def test_where_watts_lie_about_the_tolerance_it_is_said_once() -> None:
    meter: Any = SimpleNamespace(newest=None)
    live = LiveJudge(meter, 0.0)
    told = []
    for live._judge.over in (0.0, 0.021, 0.019, 0.022, 0.018, 0.03, 0.005, 0.019):
        told.append((live.news(10.0) or ("",))[0])
    assert told == ["", "warning", "", "", "", "", "info", ""]


def shown(true_w: list[float], lag_s: float, judge: Judge, falls: dict[float, Bound] | None = None) -> Judge:
    """Judge what a sensor that lags shows of watts that were truly drawn, a tenth of a second each."""
    judge.lag_s, falls, read_w, seconds = lag_s, falls or {}, true_w[0], Seconds()
    for at, power_w in enumerate(true_w):
        if bound := falls.get(at / 10):
            for one in seconds.cut():
                judge.take(one)
            judge.budget(at / 10, bound)
        read_w += (power_w - read_w) * -math.expm1(-0.1 / lag_s)
        for one in seconds.read((at + 1) / 10, read_w):
            judge.take(one)
    return judge


@pytest.mark.parametrize("lag_s", [0.3, 0.9, 2.0])
def test_what_a_lagging_sensor_still_shows_after_a_fall_is_not_held_against_a_run(lag_s: float) -> None:
    falls = {float(at): Bound(10.0 if at % 80 == 0 else 6.0) for at in range(0, 400, 40)}
    true_w = [9.9 if at // 400 % 2 == 0 else 5.9 for at in range(4000)]
    verdict = shown(true_w, lag_s, Judge(), falls).verdict
    assert verdict.judged_s > 380
    assert verdict.over_s == 0


@pytest.mark.parametrize("lag_s", [0.3, 0.9, 2.0])
def test_what_is_drawn_too_long_after_a_fall_counts_though_the_sensor_is_blamed_for_it_easily(lag_s: float) -> None:
    """Runs were judged held that were above their budget for 1 to 3.5% of the time: right after each fall of it."""
    falls = {float(at): Bound(10.0 if at % 80 == 0 else 6.0) for at in range(0, 400, 40)}
    true_w = [9.9 if at % 800 < 415 else 5.9 for at in range(4000)]  # a second and a half too late
    verdict = shown(true_w, lag_s, Judge(), falls).verdict
    true_s = sum(
        sum(true_w[end - 50 : end]) > 1.02 * sum(10.0 if at % 800 < 400 else 6.0 for at in range(end - 50, end))
        for end in range(50, 4000)
    )
    assert verdict.held is False
    assert abs(verdict.over_s - true_s / 10) <= 1.5 * 5


def test_the_lag_of_a_sensor_after_peak_watts_fell_is_excused_only_where_it_ends() -> None:
    high, low = Bound(10.0, is_peak=True), Bound(6.0, is_peak=True)
    late = judged([9.0] * 100, high)
    late.budget(100.0, low)
    for at in (100.0, 101.0):
        late.take(Second(at, at + 1, 8.5, 9.0, 10))
    for at in range(102, 400):
        late.take(Second(at, at + 1, 5.9, 6.0, 10))
    assert late.verdict.held is True
    stays = judged([8.0] * 60, low, begin_s=100.0, judge=judged([9.0] * 100, high))
    assert stays.verdict.over_s >= 55


def test_five_steps_are_a_window_where_they_take_longer() -> None:
    watts = [14.0, 14.0, 5.0, 5.0] * 30  # steps of two seconds with pauses of two
    assert judged(watts, Bound(9.7)).verdict.held is False
    slow = Judge()
    for _ in range(5):
        slow.steps_take(4.0)
    assert judged(watts, Bound(9.7), judge=slow).verdict.held is True


def test_long_steps_are_judged_whole_where_joules_are_counted() -> None:
    """Wherever a window of five mean steps began, it held two of them or three: 10% above, on every second look."""
    judge, at_s = Judge(), 0.0
    judge.budget(0.0, Bound(250.0))
    for step in range(40):
        judge.step_begins(at_s)
        pause_s = 6.2 if step % 3 else 0.5  # the last one of an epoch is small
        for seconds, power_w in ((pause_s * 122 / 382, 632.0), (pause_s, 128.0)):
            judge.take(Second(at_s, at_s + seconds, power_w, power_w, 10))
            at_s += seconds
    assert judge.verdict.over_s == 0
    assert judge.verdict.judged_s > 0.8 * at_s
    assert abs(judge.over) < 0.01
    for _ in range(20):
        judge.step_begins(at_s)
        for seconds, power_w in ((2.0, 632.0), (5.0, 128.0)):  # 272 W
            judge.take(Second(at_s, at_s + seconds, power_w, power_w, 10))
            at_s += seconds
    assert judge.over == pytest.approx(272 / 250 - 1, abs=0.001)
    assert judge.verdict.held is False


def test_a_long_test_between_short_steps_is_no_long_step() -> None:
    judge, at_s = Judge(), 0.0
    judge.budget(0.0, Bound(250.0))
    for step in range(600):
        judge.step_begins(at_s)
        parts = [(0.1, 240.0 + 20 * (step % 2))] + ([(6.0, 250.0)] if step % 100 == 99 else [])
        for seconds, power_w in parts:
            judge.take(Second(at_s, at_s + seconds, power_w, power_w, 1))
            at_s += seconds
    assert judge.verdict.over_s == 0
    assert judge.verdict.judged_s > at_s - 10.0


def test_a_window_that_begins_within_a_second_counts_what_was_read_since_and_not_an_even_share_of_it() -> None:
    """Steps of 0.4 s with pauses between them, held at 3.45 W, were judged 2 to 4% above 3.5 W every few seconds."""
    judge = Judge()
    judge.budget(0.0, Bound(3.5))
    for _ in range(5):
        judge.steps_take(1.5)
    cycle = [2.2] * 11 + [6.88] * 4
    assert shown(cycle * 200, 0.6, judge).verdict.over_s == 0
    above = Judge()
    above.budget(0.0, Bound(3.3))
    for _ in range(5):
        above.steps_take(1.5)
    verdict = shown(cycle * 200, 0.6, above).verdict
    assert verdict.over_s > 0.95 * verdict.judged_s


@given(st.floats(0.1, 50.0), st.floats(0.1, 50.0), st.floats(0.1, 50.0), st.floats(0.0, 1.0))
def test_the_parts_of_a_second_make_it_up(began_w: float, ended_w: float, mean_w: float, share: float) -> None:
    one = Second(3.0, 4.0, mean_w, mean_w, 10, began_w, ended_w)
    assert math.isclose(one.drawn_j(0.0), mean_w)
    assert abs(one.drawn_j(1.0)) < 1e-9
    assert math.isclose(one.shown_w(0.0), began_w)
    assert math.isclose(one.shown_w(1.0), ended_w)
    slope_w = (one.drawn_j(share) - one.drawn_j(share + 1e-6)) / 1e-6
    assert math.isclose(slope_w, one.shown_w(share), rel_tol=1e-3, abs_tol=1e-2)
    assert math.isclose(Second(3.0, 4.0, mean_w, mean_w, 10).drawn_j(share), (1 - share) * mean_w, abs_tol=1e-9)


def test_a_verdict_goes_on_where_an_earlier_part_left_it() -> None:
    first = judged([11.0] * 50, Bound(10.0)).verdict
    whole = judged([9.0] * 50, Bound(10.0), begin_s=50.0, judge=Judge(first)).verdict
    assert whole.over_s == first.over_s
    assert whole.judged_s > first.judged_s


@given(st.lists(st.tuples(st.floats(0.01, 3.0), st.floats(0.1, 50.0)), min_size=1, max_size=200))
def test_seconds_keep_every_joule_and_the_highest_reading(readings: list[tuple[float, float]]) -> None:
    seconds, at_s, energy_j, found = Seconds(), 0.0, 0.0, []
    for gap_s, power_w in readings:
        at_s += gap_s
        energy_j += gap_s * power_w
        found += seconds.read(at_s, power_w)
    found += seconds.cut()
    assert math.isclose(sum(one.mean_w * one.seconds for one in found), energy_j, rel_tol=1e-9)
    assert math.isclose(sum(one.seconds for one in found), at_s, rel_tol=1e-9)
    assert max(one.max_w for one in found) == max(power_w for _, power_w in readings)
    assert sum(one.readings for one in found) == len(readings)


def test_long_steps_whose_sensor_has_been_silent_since_are_not_judged_yet() -> None:
    judge = judged([9.0] * 8, Bound(10.0))
    for at_s in np.arange(0.0, 16.0, 1.2):
        judge.step_begins(float(at_s))
    assert judge.verdict.judged_s <= 8.0


def test_what_waited_to_be_judged_by_means_is_not_judged_by_peaks() -> None:
    judge = Judge()
    judge.budget(0.0, Bound(10.0))
    for at in range(24):
        if at % 4 == 0:
            judge.step_begins(float(at))
        judge.take(Second(at, at + 1, 9.0, 9.0, 10))
    judge.budget(24.0, Bound(8.0, is_peak=True))
    for at in range(24, 24 + 12):  # after a change of kind nothing is excused
        judge.take(Second(at, at + 1, 8.5, 8.5, 10))
    assert judge.verdict.over_s <= 12.0
    assert judge.verdict.since_s is None or judge.verdict.since_s >= 24.0


def test_after_a_fall_only_what_was_allowed_before_it_is_excused() -> None:
    """A reading of any height was: 25 W after a fall from 10 to 9.9 W."""
    judge = judged([9.0] * 100, Bound(10.0, is_peak=True))
    judge.budget(100.0, Bound(9.9, is_peak=True))
    judge.take(Second(100.0, 101.0, 9.5, 9.95, 10))  # of before
    judge.take(Second(101.0, 102.0, 12.0, 25.0, 10))
    judge.take(Second(102.0, 103.0, 9.0, 9.5, 10))
    assert judge.verdict.peaks == 1
    assert judge.verdict.over_s == 1.0
    assert judge.verdict.worst_over == pytest.approx(25.0 / 9.9 - 1)
