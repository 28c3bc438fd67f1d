from __future__ import annotations

import json
import math
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from log_world import recorded, started

from underwatt.events import BudgetChanged, Ended, Progressed, SettingChanged, Verdict
from underwatt.records import PowerMode, Setting
from underwatt.runlog.log import RunLog, read_log


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "log.jsonl"


def test_energy_and_time_over_the_budget(path: Path) -> None:
    record = recorded(path, [9.0] * 100 + [12.0] * 50 + [9.0] * 100)
    assert record.energy_over_j() == pytest.approx(10.0)
    # The mean over a second lies above 10.2 W from the fifth high reading on, and until the sixth low one.
    assert record.time_over_s() == pytest.approx(5.0 - 0.4 + 0.5)
    assert record.time_over_s(window_s=0.0) == pytest.approx(5.0)
    assert record.time_over_s(tolerance=0.21) == 0
    assert record.energy_over_j(window_s=30.0) == 0


def test_a_rise_is_no_offence_and_a_drop_counts_from_its_moment(path: Path) -> None:
    budgets = ((0.0, 15.0), (10.0, 7.0), (20.0, 12.0))
    watts = [14.0] * 100 + [6.9] * 100 + [11.9] * 100
    assert recorded(path, watts, budgets=budgets).time_over_s() == 0
    assert read_log(path).energy_over_j() == 0
    late = recorded(path.with_name("late.jsonl"), [14.0] * 105 + [6.9] * 95 + [11.9] * 100, budgets=budgets)
    assert late.time_over_s(lag_s=0.6) == 0
    assert 0.5 <= late.time_over_s() <= 1.5  # the mean over a second remembers
    assert late.energy_over_j() == pytest.approx(0.5 * 7.0)
    assert late.energy_over_j(lag_s=0.6) == 0


def test_lag_is_granted_for_another_setting_and_not_for_another_state(path: Path) -> None:
    with RunLog(path) as log:
        log.write(started())
        log.write(BudgetChanged(at_s=0.0, power_w=10.0))
        for at_s, state in ((0.0, "searching"), (1.0, "holding"), (2.0, "correcting"), (3.0, "holding")):
            log.write(SettingChanged(at_s=at_s, setting=Setting(PowerMode(), 8), state=state, why=""))
        log.write(SettingChanged(at_s=4.0, setting=Setting(PowerMode(), 16), state="holding", why=""))
        for number in range(1, 51):
            log.power(number / 10, 11.0 if (number - 1) % 10 < 4 else 9.0)  # for 0.4 s after each of them
    record = read_log(path)
    assert record.time_over_s(window_s=0.0) == pytest.approx(5 * 0.4)
    assert record.time_over_s(window_s=0.0, lag_s=0.6) == pytest.approx(3 * 0.4)
    assert record.time_over_s(window_s=0.0, lag_s=0.35) == pytest.approx(5 * 0.4), "it took longer than that"


def test_no_lag_is_granted_to_what_stays_above(path: Path) -> None:
    record = recorded(path, [11.0] * 60, settings=[0.02, 1.02, 1.52, 2.02])
    assert record.time_over_s(lag_s=2.0) == pytest.approx(6.0)
    found = record.verdict()
    assert (found.bounded_s, found.judged_s, found.over_s) == pytest.approx((6.0, 6.0, 6.0))


def test_a_verdict_says_how_much_it_is_made_on(path: Path) -> None:
    lagging = recorded(path, [12.0] * 15 + [9.0] * 85, settings=[0.0])
    found = lagging.verdict()
    assert (found.bounded_s, found.judged_s, found.over_s) == pytest.approx((10.0, 8.5, 0.0))
    assert found.is_enough
    assert not recorded(path.with_name("short.jsonl"), [9.0] * 30).verdict().is_enough
    unbounded = recorded(path.with_name("none.jsonl"), [9.0] * 90, budgets=((0.0, None),)).verdict()
    assert (unbounded.bounded_s, unbounded.is_enough) == (0.0, False)


def test_each_reading_is_judged_as_the_budget_then_in_force_says(path: Path) -> None:
    with RunLog(path) as log:
        log.write(started())
        for at_s, watts, window_s in ((0.0, "mean", None), (10.0, "peak", None), (20.0, "mean", 5.0)):
            log.write(BudgetChanged(at_s=at_s, power_w=10.0, watts=watts, window_s=window_s, why="changed"))
        for number in range(1, 301):
            log.power(number / 10, 15.0 if number % 10 == 5 else 9.0)  # once a second
    record = read_log(path)
    assert record.windows_s.tolist() == [1.0, 0.0, 5.0]
    assert record.verdict().over_s == pytest.approx(10 * 0.1), "peaks while these are bounded"


def test_exactly_the_budget_is_not_over_it(path: Path) -> None:
    record = recorded(path, [0.1, 7.3, 10.0, 3.7] * 500)
    assert record.energy_over_j() == record.time_over_s() == 0


def test_a_budget_without_watts_cannot_be_exceeded(path: Path) -> None:
    record = recorded(path, [50.0] * 20, budgets=((0.0, None), (1.0, None), (1.5, 60.0)))
    assert record.time_over_s() == record.energy_over_j() == 0
    assert record.budget_at(1.2) == math.inf


def test_a_run_without_readings_proves_nothing_and_breaks_nothing(path: Path) -> None:
    record = recorded(path, [], budgets=())
    assert record.energy_j() == record.energy_over_j() == record.time_over_s() == 0
    assert record.budget_at(3.0) == math.inf


@settings(max_examples=40, deadline=None)
@given(
    watts=st.lists(st.floats(1, 20), min_size=1, max_size=60),
    steps=st.lists(st.tuples(st.integers(1, 60), st.floats(2, 18)), max_size=4, unique_by=lambda step: step[0]),
    changes=st.lists(st.integers(0, 60), max_size=3),
    window=st.integers(0, 15),
    lag=st.integers(0, 8),
)
def test_time_over_agrees_with_the_words(
    tmp_path_factory: pytest.TempPathFactory,
    watts: list[float],
    steps: list[tuple[int, float]],
    changes: list[int],
    window: int,
    lag: int,
) -> None:
    # Times off the grid of readings, so that rounding decides nothing.
    budgets = [(0.0, 10.0), *((at / 10 - 0.03, round(level_w, 4)) for at, level_w in sorted(steps))]
    moved = [at / 10 + 0.02 for at in sorted(changes)]
    watts = [round(power_w, 4) for power_w in watts]
    path = tmp_path_factory.mktemp("words") / "log.jsonl"
    record = recorded(path, watts, budgets=tuple(budgets), settings=moved)
    drops = [now[0] for before, now in pairwise(budgets) if now[1] < before[1]]
    window_s, lag_s, over_s, over_j = window / 10 + 0.05, lag / 10, 0.0, 0.0
    times = [number / 10 for number in range(1, len(watts) + 1)]

    def counted(at_s: float) -> bool:
        """Not where it is above, since a change and until it is back within the budget in time."""
        changes = sorted({*drops, *moved})
        before = [change for change in changes if change <= at_s]
        if not before or lag_s == 0:
            return True
        until_s = min([before[-1] + lag_s, *(change for change in changes if change > at_s)])
        back = [t for t, w in zip(times, watts, strict=True) if before[-1] < t <= until_s and w <= 1.02 * level(t)]
        return not back or at_s >= back[0]

    def level(at_s: float) -> float:
        return [budget_w for begin_s, budget_w in budgets if begin_s <= at_s][-1]

    for at_s in times:
        begin_s, budget_w = [budget for budget in budgets if budget[0] <= at_s][-1]
        since = max([at_s - window_s, *(drop for drop in drops if drop <= at_s)])
        readings = [w for t, w in zip(times, watts, strict=True) if since < t <= at_s and counted(t)]
        if counted(at_s):
            over_w = sum(readings) / len(readings) - budget_w
            if abs(over_w - 0.02 * budget_w) < 1e-6:
                return  # a tie
            over_s += min(0.1, at_s - begin_s) * (over_w > 0.02 * budget_w)
            over_j += min(0.1, at_s - begin_s) * max(0.0, over_w)
    assert record.time_over_s(window_s=window_s, lag_s=lag_s) == pytest.approx(over_s, abs=1e-6)
    assert record.energy_over_j(window_s=window_s, lag_s=lag_s) == pytest.approx(over_j, abs=1e-6)


@pytest.mark.slow
def test_a_day_is_read_in_seconds(path: Path) -> None:
    recorded(path, [])
    with path.open("a") as file:
        watts = json.dumps([9.8765] * 10)
        for second in range(86_400):
            times = ",".join(f"{second + tenth / 10:.4f}" for tenth in range(10))
            file.write(f'{{"kind":"power","at_s":[{times}],"power_w":{watts}}}\n')
    begin = time.perf_counter()
    record = read_log(path)
    assert record.time_over_s() == record.energy_over_j() == 0
    assert time.perf_counter() - begin < 15  # about two on an idle desktop
    assert len(record.power) == 864_000


def test_the_verdict_is_what_the_run_itself_said_last(path: Path) -> None:
    """It knows how long its steps take; a killed run said so with its progress."""
    on_the_way = Verdict(bounded_s=20.0, judged_s=18.0, over_s=0.5)
    at_the_end = Verdict(bounded_s=30.0, judged_s=28.0, over_s=3.0, worst_over=0.1, since_s=21.0, why="It was hot.")
    with RunLog(path) as log:
        log.write(started())
        log.write(BudgetChanged(at_s=0.0, power_w=10.0))
        for tenth in range(1, 301):
            log.power(tenth / 10, 12.0)
        log.flush()
        assert read_log(path).verdict().over_s == pytest.approx(30.0), "nobody said anything yet"
        for at_s, verdict in ((19.0, None), (20.0, on_the_way)):
            told: dict[str, Any] = {"steps": 1, "samples": 8, "batch_size": 8, "state": "holding"}
            log.write(Progressed(at_s=at_s, verdict=verdict, **told))
        log.flush()
        assert read_log(path).verdict() == on_the_way
        log.write(Ended(at_s=30.0, outcome="reached", restored=True, verdict=at_the_end))
    assert read_log(path).verdict() == at_the_end
    assert read_log(path).verdict().held is False


def test_a_budget_smaller_than_a_log_can_write_is_judged_all_the_same(tmp_path: Path) -> None:
    record = recorded(tmp_path / "log.jsonl", [1.0] * 100, budgets=((0.0, 1e-9),))
    assert record.verdict().held is False
    assert 0 < record.verdict().worst_over < math.inf
