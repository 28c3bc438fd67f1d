from __future__ import annotations

import itertools
import math
import time

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from scipy.optimize import linprog

from underwatt.budget import DAY_S, Schedule, parse_budget
from underwatt.errors import InputError
from underwatt.planning.ahead import HORIZON_S, Ahead, look_ahead

SLACK = 1 + 1e-6
# Slow and thrifty, the most efficient, fast; drawn is what the budget bounds, power what the energy counts.
TIME_S, DRAWN_W, POWER_W = [900.0, 300.0, 200.0], [4.0, 8.0, 14.0], [3.5, 7.0, 13.0]


def rows(count: int) -> st.SearchStrategy[tuple[list[float], list[float], list[float]]]:
    row = st.tuples(st.floats(50, 1000), st.floats(3, 15), st.floats(0.5, 1))
    return st.lists(row, min_size=1, max_size=count).map(
        lambda found: ([t for t, _, _ in found], [d for _, d, _ in found], [d * m for _, d, m in found])
    )


levels = st.lists(st.sampled_from([4.0, 6.0, 9.0, 13.0, 16.0]), min_size=1, max_size=4)


def stepped(watts: list[float]) -> Schedule:
    return Schedule.of((60.0 * at, level_w) for at, level_w in enumerate(watts))


def check(
    found: Ahead, table: tuple[list[float], list[float], list[float]], schedule: Schedule, idle_w: float
) -> float:
    """Judge a course by its pieces alone; gives the share that it trains."""
    time_s, drawn_w, power_w = table
    share = energy_j = at_s = 0.0
    for begin_s, end_s, row in found.pieces:
        assert begin_s == at_s < end_s
        at_s = end_s
        for _, _, level_w in schedule.pieces(begin_s, end_s):
            assert row is None or drawn_w[row] <= level_w
        share += 0 if row is None else (end_s - begin_s) / time_s[row]
        energy_j += (end_s - begin_s) * (idle_w if row is None else power_w[row])
    assert found.energy_j == pytest.approx(energy_j)
    return share


def test_without_an_energy_bound_each_level_has_its_fastest_row() -> None:
    schedule = parse_budget("00:00-00:01=5W,00:01-00:02=15W,else=9W").schedule
    assert schedule is not None
    found = look_ahead(TIME_S, DRAWN_W, POWER_W, schedule)
    assert [row for _, _, row in found.pieces] == [0, 2, 1]
    assert found.finish_s == pytest.approx(120 + 300 * (1 - 60 / 900 - 60 / 200))
    later = look_ahead(TIME_S, DRAWN_W, POWER_W, schedule, begin_s=90.0, share=0.1)
    assert later.pieces == ((90.0, pytest.approx(110.0), 2),)


def finish_s(schedule: Schedule, rate: dict[float, float]) -> float:
    """When a training is done that goes at so much a second at each level."""
    done = 0.0
    for begin_s, end_s, level_w in schedule.pieces(0.0, HORIZON_S):
        if done + rate[level_w] * (end_s - begin_s) >= 1:
            return begin_s + (1 - done) / rate[level_w]
        done += rate[level_w] * (end_s - begin_s)
    return math.inf


@settings(max_examples=60, deadline=None)
@given(rows(5), levels)
def test_the_fastest_agrees_with_trying_every_choice(
    table: tuple[list[float], list[float], list[float]], watts: list[float]
) -> None:
    schedule = stepped(watts)
    found = look_ahead(*table, schedule)
    best_s = math.inf
    distinct = sorted(set(watts))
    for choice in itertools.product(range(-1, len(table[0])), repeat=len(distinct)):
        chosen = dict(zip(distinct, choice, strict=True))
        if all(row < 0 or table[1][row] <= level_w for level_w, row in chosen.items()):
            rate = {level_w: 0 if row < 0 else 1 / table[0][row] for level_w, row in chosen.items()}
            best_s = min(best_s, finish_s(schedule, rate))
    assert found.finish_s == pytest.approx(best_s)
    if math.isfinite(best_s):
        assert check(found, table, schedule, 0.0) == pytest.approx(1.0)


@pytest.mark.parametrize("stretches", range(1, 40))
def test_what_is_done_at_the_end_of_a_stretch_does_not_wait_for_the_next(stretches: int) -> None:
    schedule = Schedule((0.0, 60.0), (13.0, 4.0), 300.0)
    found = look_ahead([60.0 * stretches], [10.0], [10.0], schedule)
    assert found.finish_s == pytest.approx(300.0 * (stretches - 1) + 60.0)


def most_share(
    table: tuple[list[float], list[float], list[float]],
    schedule: Schedule,
    end_s: float,
    energy_j: float,
    idle_w: float | None,
) -> float:
    """What a linear program can train until a moment: an independent judge."""
    gain: list[float] = []
    cost: list[float] = []
    where: list[int] = []
    spans = schedule.pieces(0.0, end_s)
    for at, (_, _, level_w) in enumerate(spans):
        fitting = [(1 / t, p) for t, d, p in zip(*table, strict=True) if d <= level_w]
        if idle_w is not None or not fitting:
            fitting.append((0.0, idle_w or 0.0))
        gain += [rate for rate, _ in fitting]
        cost += [power_w for _, power_w in fitting]
        where += [at] * len(fitting)
    used = np.array([[float(at == piece) for at in where] for piece in range(len(spans))])
    solved = linprog(
        -np.array(gain), A_ub=[cost], b_ub=[energy_j], A_eq=used, b_eq=[end - begin for begin, end, _ in spans]
    )
    return float(-solved.fun) if solved.success else -math.inf


@settings(max_examples=80, deadline=None)
@given(rows(5), levels, st.floats(0.3, 1.0), st.sampled_from([None, 0.0, 1.0, 2.5]))
def test_energy_is_kept_and_no_linear_program_ends_sooner(
    table: tuple[list[float], list[float], list[float]], watts: list[float], part: float, idle_w: float | None
) -> None:
    schedule = stepped(watts)
    unbound = look_ahead(*table, schedule, idle_w=idle_w, horizon_s=5000)
    energy_j = part * unbound.energy_j
    found = look_ahead(*table, schedule, energy_j=energy_j, idle_w=idle_w, horizon_s=5000)
    assert found.energy_j <= energy_j * SLACK
    share = check(found, table, schedule, idle_w or 0.0)
    assert found.finish_s >= unbound.finish_s / SLACK
    if math.isfinite(found.finish_s):
        assert share == pytest.approx(1.0)
        judged = [found.finish_s * early for early in (0.6, 0.8, 0.9, 0.99, 0.999)]
    else:
        judged = [100.0, 300.0, 1000.0, 2000.0, 4999.0]
    for end_s in judged:
        assert most_share(table, schedule, end_s, energy_j, idle_w) < SLACK


def test_a_battery_that_lasts_for_something_in_between_is_used_up() -> None:
    fast_j, thrifty_j = 200 * 13.0, 300 * 7.0
    found = look_ahead(TIME_S, DRAWN_W, POWER_W, Schedule.constant(15), energy_j=(fast_j + thrifty_j) / 2)
    assert found.energy_j == pytest.approx((fast_j + thrifty_j) / 2)
    assert found.finish_s == pytest.approx(250)
    assert [row for _, _, row in found.pieces] == [2, 1]


def test_too_little_energy_never_finishes_and_goes_as_far_as_it_can() -> None:
    found = look_ahead(TIME_S, DRAWN_W, POWER_W, Schedule.constant(15), energy_j=700.0)
    assert found.finish_s == math.inf
    assert found.energy_j == pytest.approx(700)
    assert found.pieces == ((0.0, pytest.approx(100.0), 1),)  # the most efficient row


def test_pausing_waits_for_the_level_with_the_efficient_row() -> None:
    schedule = Schedule.of([(0.0, 5.0), (600.0, 9.0)])
    energy_j = 300 * 7.0 + 600 * 0.1 + 5
    found = look_ahead(TIME_S, DRAWN_W, POWER_W, schedule, energy_j=energy_j, idle_w=0.1)
    assert math.isfinite(found.finish_s)
    assert [row for _, _, row in found.pieces][-2:] == [None, 1]
    without = look_ahead(TIME_S, DRAWN_W, POWER_W, schedule, energy_j=energy_j)
    assert without.finish_s == math.inf


def test_a_level_that_nothing_keeps_is_a_pause() -> None:
    found = look_ahead(TIME_S, DRAWN_W, POWER_W, Schedule.of([(0.0, 2.0), (50.0, 9.0)]), idle_w=1.0)
    assert found.pieces == ((0.0, 50.0, None), (50.0, pytest.approx(350.0), 1))
    assert look_ahead(TIME_S, DRAWN_W, POWER_W, Schedule.constant(2.0)).finish_s == math.inf
    assert look_ahead([], [], [], Schedule.constant(2.0)).finish_s == math.inf


def test_rows_that_never_reach_the_target_are_left_out() -> None:
    found = look_ahead([math.inf, math.nan, 300.0], [1, 1, 8], [1, 1, 7], Schedule.constant(9))
    assert found.pieces == ((0.0, pytest.approx(300.0), 2),)


def test_nothing_left_is_done_at_once() -> None:
    found = look_ahead(TIME_S, DRAWN_W, POWER_W, Schedule.constant(9), share=0.0, begin_s=7.0, energy_j=0.0)
    assert (found.pieces, found.finish_s, found.energy_j) == ((), 7.0, 0.0)


@pytest.mark.parametrize(
    "wrong", [{"share": 1.5}, {"share": math.nan}, {"energy_j": -1.0}, {"energy_j": math.nan}, {"idle_w": -1.0}]
)
def test_nonsense_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(InputError):
        look_ahead(TIME_S, DRAWN_W, POWER_W, Schedule.constant(9), **wrong)
    with pytest.raises(InputError, match="same settings"):
        look_ahead(TIME_S, DRAWN_W[:2], POWER_W, Schedule.constant(9))


def test_thousands_of_levels_take_moments() -> None:
    rng = np.random.default_rng(0)
    solar_w = 5 + 10 * np.clip(np.sin(np.arange(8640) / 8640 * 2 * np.pi), 0, 1) + rng.uniform(0, 1, 8640)
    schedule = Schedule.of(((10.0 * at, float(level_w)) for at, level_w in enumerate(solar_w)), DAY_S)
    drawn_w = rng.uniform(3, 15, 2000)
    time_s = 2 * DAY_S * (drawn_w / 5) ** -0.6 * rng.uniform(1, 1.5, 2000)
    begin = time.perf_counter()
    free = look_ahead(time_s, drawn_w, drawn_w, schedule)
    bound = look_ahead(time_s, drawn_w, drawn_w, schedule, energy_j=0.97 * free.energy_j, idle_w=1.0)
    assert time.perf_counter() - begin < 10
    assert free.finish_s < bound.finish_s < math.inf
    assert bound.energy_j == pytest.approx(0.97 * free.energy_j, rel=1e-6)


# Deadlines


def least_energy_j(
    table: tuple[list[float], list[float], list[float]], schedule: Schedule, end_s: float, share: float
) -> float:
    """What a linear program, for which waiting costs nothing, needs to train a share until a moment."""
    gain, cost, where, spans = [], [], [], schedule.pieces(0.0, end_s)
    for at, (_, _, level_w) in enumerate(spans):
        fitting = [(1 / t, p) for t, d, p in zip(*table, strict=True) if d <= level_w]
        gain += [rate for rate, _ in fitting]
        cost += [power_w for _, power_w in fitting]
        where += [at] * len(fitting)
    used = np.array([[float(at == piece) for at in where] for piece in range(len(spans))])
    solved = linprog(cost, A_ub=used, b_ub=[end - begin for begin, end, _ in spans], A_eq=[gain], b_eq=[share])
    assert solved.success
    return float(solved.fun)


@settings(max_examples=80, deadline=None)
@given(rows(5), levels, st.floats(1.0, 4.0), st.sampled_from([None, 0.0]))
def test_a_deadline_is_met_with_no_more_energy_than_a_linear_program_needs(
    table: tuple[list[float], list[float], list[float]], watts: list[float], slack: float, idle_w: float | None
) -> None:
    schedule = stepped(watts)
    soonest = look_ahead(*table, schedule, idle_w=idle_w, horizon_s=20_000)
    if not math.isfinite(soonest.finish_s):
        return
    deadline_s = slack * soonest.finish_s * SLACK
    found = look_ahead(*table, schedule, deadline_s=deadline_s, idle_w=idle_w, horizon_s=20_000)
    assert found.finish_s <= deadline_s * SLACK
    assert found.energy_j <= soonest.energy_j * SLACK
    assert check(found, table, schedule, idle_w or 0.0) == pytest.approx(1.0, rel=1e-5)
    least_j = least_energy_j(table, schedule, deadline_s, 1.0)
    assert found.energy_j >= least_j / SLACK
    if idle_w == 0.0 or len(set(watts)) == 1:  # else waiting for a better level is no choice
        assert found.energy_j == pytest.approx(least_j, rel=1e-4)


def test_a_deadline_at_the_soonest_finish_is_met_too() -> None:
    table, schedule = ([61.0, 77.0], [5.0, 4.0], [5.0, 4.0]), stepped([6.0, 4.0])
    soonest = look_ahead(*table, schedule, idle_w=0.0, horizon_s=20_000)
    found = look_ahead(*table, schedule, deadline_s=soonest.finish_s * SLACK, idle_w=0.0, horizon_s=20_000)
    assert check(found, table, schedule, 0.0) == pytest.approx(1.0, rel=1e-5)


def test_a_deadline_in_between_is_met_by_two_settings_one_after_the_other() -> None:
    found = look_ahead(TIME_S, DRAWN_W, POWER_W, Schedule.constant(15), deadline_s=250.0)
    assert [row for _, _, row in found.pieces] == [2, 1]
    assert found.finish_s == pytest.approx(250.0)


def test_a_far_deadline_is_no_reason_to_dawdle() -> None:
    found = look_ahead(TIME_S, DRAWN_W, POWER_W, Schedule.constant(15), deadline_s=1e6)
    assert [row for _, _, row in found.pieces] == [1], "the slowest row needs more energy"


def test_a_deadline_that_cannot_be_made_takes_the_soonest() -> None:
    late = look_ahead(TIME_S, DRAWN_W, POWER_W, Schedule.constant(9), deadline_s=200.0)
    assert late == look_ahead(TIME_S, DRAWN_W, POWER_W, Schedule.constant(9))
    assert look_ahead(TIME_S, DRAWN_W, POWER_W, Schedule.constant(2), deadline_s=200.0).finish_s == math.inf


def test_joules_come_before_a_deadline() -> None:
    energy_j = 300 * 7.0 + 1
    found = look_ahead(TIME_S, DRAWN_W, POWER_W, Schedule.constant(15), energy_j=energy_j, deadline_s=210.0)
    assert found.energy_j <= energy_j * SLACK
    assert found.finish_s > 210.0
