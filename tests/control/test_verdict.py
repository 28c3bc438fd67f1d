from __future__ import annotations

import math

from hypothesis import given, strategies as st

from underwatt.control.verdict import Bound, Judge, Second, Seconds
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


def test_the_lag_of_a_sensor_after_a_drop_is_excused_only_where_it_ends() -> None:
    back = judged([5.0] * 300, Bound(6.0), begin_s=102.0, judge=judged([9.0] * 100, Bound(10.0)))
    assert back.verdict.held is True
    late = judged([9.0] * 100, Bound(10.0))
    late.budget(100.0, Bound(6.0))
    for at in (100.0, 101.0):
        late.take(Second(at, at + 1, 8.5, 9.0, 10))
    assert late.verdict.over_s == 0
    for at in range(102, 400):
        late.take(Second(at, at + 1, 5.9, 6.0, 10))
    assert late.verdict.held is True
    stays = judged([8.0] * 60, Bound(6.0), begin_s=100.0, judge=judged([9.0] * 100, Bound(10.0)))
    assert stays.verdict.over_s >= 55


def test_five_steps_are_a_window_where_they_take_longer() -> None:
    watts = [14.0, 14.0, 5.0, 5.0] * 30  # steps of two seconds with pauses of two
    assert judged(watts, Bound(9.7)).verdict.held is False
    slow = Judge()
    for _ in range(5):
        slow.steps_take(4.0)
    assert judged(watts, Bound(9.7), judge=slow).verdict.held is True


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
