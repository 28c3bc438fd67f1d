from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from underwatt.errors import InputError
from underwatt.fleet.rounds import (
    AIM,
    FIRST_TIMES,
    MOST_CHANGE,
    MOST_TIMES,
    Course,
    FrontPoint,
    Fronts,
    course_of,
    growth_of,
    next_times,
    plan_round,
    round_length_s,
    scales,
)


def _front(*points: tuple[int, float, float]) -> list[FrontPoint]:
    return [FrontPoint(size, watts, sample_s, 1.1 * sample_s) for size, watts, sample_s in points]


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_course_is_how_far_sgd_goes(momentum: float, nesterov: bool) -> None:
    weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=momentum, nesterov=nesterov and momentum > 0)
    course = course_of(optimizer)
    for step in range(7):
        optimizer.param_groups[0]["lr"] = lr = 0.1 / (1 + step)  # a schedule
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        course.step(lr)
    assert course.progress == pytest.approx(-weight.item())


def test_course_of_momentum_is_fednovas() -> None:
    lr, momentum, steps = 0.05, 0.9, 12
    course = Course(momentum)
    for _ in range(steps):
        course.step(lr)
    expected = lr * (steps - momentum * (1 - momentum**steps) / (1 - momentum)) / (1 - momentum)
    assert course.progress == pytest.approx(expected)


def test_optimizers_whose_steps_have_no_common_measure_are_refused() -> None:
    weights = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    assert course_of(torch.optim.AdamW(weights)).progress == 0
    with pytest.raises(InputError, match="Rprop"):
        course_of(torch.optim.Rprop(weights))
    groups = [{"params": weights[:1], "momentum": 0.9}, {"params": weights[1:], "momentum": 0.5}]
    with pytest.raises(InputError, match="different momenta"):
        course_of(torch.optim.SGD(groups, lr=0.1))


def test_growth_is_found_in_updates_that_follow_a_power() -> None:
    progress = [1.0, 3.0, 10.0, 40.0]
    for power in (0.0, 0.4, 1.0):
        assert growth_of(progress, [2.0 * a**power for a in progress]) == pytest.approx(power, abs=1e-9)
    assert growth_of(progress, [a**-0.5 for a in progress]) == 0  # more work never counts as less
    assert growth_of([2.0, 2.0, 2.0], [1.0, 5.0, 3.0]) is None  # nothing to see it from
    assert growth_of([1.0, 8.0], [1.0, 1.0]) is None


@given(
    st.lists(st.tuples(st.floats(0.01, 100), st.floats(1, 1000)), min_size=1, max_size=8),
    st.floats(0, 1),
)
def test_scaled_updates_are_alike_and_sum_up_to_what_they_were(rows: list[tuple[float, float]], growth: float) -> None:
    progress, weights = [list(column) for column in zip(*rows, strict=True)]
    factors = scales(progress, weights, growth)
    sizes = [factor * a**growth for factor, a in zip(factors, progress, strict=True)]
    assert sizes == pytest.approx([sizes[0]] * len(sizes))
    before = math.fsum(w * a**growth for a, w in zip(progress, weights, strict=True))
    assert math.fsum(w * one for w, one in zip(weights, sizes, strict=True)) == pytest.approx(before)


def test_a_board_without_progress_counts_nothing_and_without_data_there_is_no_mean() -> None:
    assert scales([0.0, 2.0], [1.0, 1.0]) == [0.0, 0.5]
    with pytest.raises(InputError, match="No board has data"):
        scales([1.0], [0.0])


@given(st.floats(1.0, 30.0), st.floats(3.0, 12.0), st.floats(0.0, 5.0))
def test_planned_steps_are_done_in_time_even_at_the_upper_bound(
    length_s: float, limit_w: float, overhead_s: float
) -> None:
    front = _front((8, 5.0, 0.01), (32, 8.0, 0.004), (32, 4.0, 0.02), (64, 10.0, 0.003))
    fronts = Fronts.of([front, []], [2.0, 2.0])
    plan = plan_round(fronts, np.array([limit_w, limit_w]), np.array([overhead_s] * 2), length_s)
    share = fronts.busy_share(np.array([limit_w] * 2))[0]
    at = [k for k, point in enumerate(front) if point.batch_size == plan.batch_size[0]]
    quickest_s = min((front[k].sample_s_high * front[k].batch_size / share[k] for k in at if share[k] > 0), default=0.0)
    assert plan.steps[0] * quickest_s <= max(length_s - overhead_s, 0.0) + 1e-6
    assert plan.batch_size[1] == plan.steps[1] == 0  # of which nothing is known


def test_less_watts_are_less_work_and_a_short_round_smaller_batches() -> None:
    fronts = Fronts.of([_front((8, 4.0, 0.01), (128, 4.0, 0.009))], [1.0])
    full = plan_round(fronts, np.array([4.0]), np.zeros(1), 20.0, noise_batch=1e9)
    half = plan_round(fronts, np.array([2.5]), np.zeros(1), 20.0, noise_batch=1e9)
    assert full.batch_size[0] == 128
    assert half.steps[0] * half.batch_size[0] == pytest.approx(full.steps[0] * full.batch_size[0] / 2, rel=0.1)
    assert plan_round(fronts, np.array([4.0]), np.zeros(1), 1.5, noise_batch=1e9).batch_size[0] == 8


def test_a_step_that_draws_much_of_a_window_is_not_evened_out_by_pauses() -> None:
    fronts = Fronts.of([_front((8, 8.0, 0.001)), _front((8, 8.0, 0.5))], [1.0, 1.0])
    assert (fronts.rate_at(np.array([8.0, 8.0]), 256.0) > 0).all()
    rates = fronts.rate_at(np.array([4.0, 4.0]), 256.0)
    assert rates[0] > 0 == rates[1]


def test_rounds_grow_with_communication_and_never_shorter_than_the_slowest_steps() -> None:
    overhead_s, step_s = np.array([1.0, 2.0]), np.array([0.1, math.nan])
    lengths = [round_length_s(times, overhead_s, step_s, searching=False) for times in (1.5, 3.0, 10.0)]
    assert lengths == sorted(lengths)
    assert lengths[-1] > lengths[0] > 2.0
    assert round_length_s(1.5, 3 * overhead_s, step_s, searching=False) > lengths[0]
    assert round_length_s(1.5, overhead_s, np.array([30.0, 30.0]), searching=False) >= 60.0


def test_rounds_are_longer_while_updates_grow_with_work_and_shorter_where_they_hardly_do() -> None:
    def after(rounds: int, growth: float | None, times: float = FIRST_TIMES) -> float:
        for _ in range(rounds):
            times = next_times(times, growth)
        return times

    assert after(1, 1.0) == FIRST_TIMES * MOST_CHANGE
    assert after(100, 1.0) == MOST_TIMES
    assert after(100, 0.2, MOST_TIMES) == FIRST_TIMES
    assert after(10, AIM, 4.0) == pytest.approx(4.0)
    assert FIRST_TIMES < after(5, None) < after(100, None) < MOST_TIMES  # not seen: slowly, and not so far
    assert after(1, None, MOST_TIMES) == MOST_TIMES
