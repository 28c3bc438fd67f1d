from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from underwatt.live.view import RECENT_S, WHOLE_BINS, PowerTrace


def filled(seconds: int, power_w: float = 9.0) -> PowerTrace:
    trace = PowerTrace()
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
    one_by_one, at_once = PowerTrace(), PowerTrace()
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
    trace = PowerTrace()
    trace.add_budget(5.5, 7.0)  # written before the readings that came earlier, as a log does
    trace.add_budget(0.0, 10.0)
    for second in range(12):
        trace.add([second, second + 0.5], [10.1 if second < 5 else 7.5, 10.1 if second < 5 else 7.5])
    assert trace.over_s == 5.0  # seconds 6 to 10: 5 has both budgets, 11 is not over yet
    assert trace.recent()[5][4] == 10.0
    assert trace.recent()[6][4] == 7.0


def test_no_limit_and_lost_readings_are_not_zero() -> None:
    trace = PowerTrace()
    trace.add([0.0, 0.1], [math.nan, math.nan])
    assert trace.latest() is None
    assert trace.recent() == []
    trace.add([0.2, 0.3], [math.nan, 50.0])
    trace.add_budget(1.0, None)
    trace.add([1.0, 2.0], [60.0, 60.0])
    assert trace.recent()[0] == [0.0, 50.0, 50.0, 50.0, None]
    assert trace.over_s == 0.0


def test_many_budgets_do_not_pile_up() -> None:
    trace = PowerTrace()
    for second in range(10_000):
        trace.add_budget(second, 5.0 + second % 2)
        trace.add([second, second + 0.9], [1.0, 1.0])
    assert trace.recent()[-1][4] == 6.0
    assert len(trace._budget_w) <= 2001


@given(st.lists(st.tuples(st.floats(0, 5000), st.floats(0, 500)), min_size=1, max_size=60))
def test_no_reading_in_order_is_lost(readings: list[tuple[float, float]]) -> None:
    readings.sort()
    trace = PowerTrace()
    trace.add([at_s for at_s, _ in readings], [power_w for _, power_w in readings])
    trace.add([9000.0], [1.0])
    total = sum(one.readings for one in trace._whole)
    assert total == len(readings)
    assert sum(one.mean_w * one.readings for one in trace._whole) == pytest.approx(sum(w for _, w in readings))
