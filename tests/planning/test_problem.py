from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import planning_world as world
import pytest
from hypothesis import given, strategies as st

from underwatt.budget import Budget, parse_budget
from underwatt.errors import InputError
from underwatt.planning.problem import (
    DEFAULT_WINDOW_S,
    LARGEST_SWING,
    Goal,
    Outlook,
    Problem,
    allows_pauses,
    busy_share,
    can_pause,
    keeps,
    project,
)
from underwatt.predict.base import SettingArray
from underwatt.records import Prediction


@given(st.floats(0.5, 400.0), st.floats(0.0, 1.0), st.floats(0.01, 2.0))
def test_training_for_the_share_draws_exactly_the_budget(power_w: float, idle: float, budget: float) -> None:
    idle_w, budget_w = idle * power_w, budget * power_w
    share = float(busy_share(power_w, idle_w, budget_w))
    assert 0 <= share <= 1
    mean_w = share * power_w + (1 - share) * idle_w
    if budget_w >= power_w:
        assert share == 1
    elif budget_w > idle_w:
        assert mean_w == pytest.approx(budget_w, rel=1e-6)
    else:
        assert share == 0


def test_many_settings_at_once() -> None:
    shares = busy_share(np.array([5.0, 10.0, 16.0]), 4.0, 10.0)
    assert shares == pytest.approx([1.0, 1.0, 0.5])


@pytest.mark.parametrize(
    ("text", "allowed"), [("10W", True), ("10W mean over 60s", True), ("10W peak", False), ("5Wh", False)]
)
def test_only_a_mean_can_be_kept_by_pauses(text: str, allowed: bool) -> None:
    assert allows_pauses(parse_budget(text)) is allowed


@given(st.floats(1.0, 100.0), st.floats(1.01, 5.0), st.floats(0.001, 2.0), st.one_of(st.none(), st.floats(1.0, 60.0)))
def test_one_step_must_not_draw_much_of_what_a_window_allows(
    budget_w: float, times: float, step_s: float, window_s: float | None
) -> None:
    budget = Budget(power_w=budget_w, window_s=window_s)
    beyond_j = (times - 1) * budget_w * step_s
    allowed_j = LARGEST_SWING * budget_w * (window_s or DEFAULT_WINDOW_S)
    if abs(beyond_j / allowed_j - 1) > 1e-6:
        assert bool(can_pause(times * budget_w, step_s, budget)) == (beyond_j < allowed_j)
    assert can_pause(0.9 * budget_w, step_s, budget), "where nothing is beyond the budget, any step will do"


def _exact(problem: Problem, std: float = 0.01) -> Prediction:
    measured = [world.truth(problem.candidates[row]) for row in range(len(problem))]
    stds = np.full(len(problem), std)
    return Prediction(np.log([m.step_s for m in measured]), stds, np.log([m.power_w for m in measured]), stds)


def test_time_to_target_is_time_per_sample_times_samples() -> None:
    problem = world.problem(Budget(power_w=10.0))
    row = 17
    setting = problem.candidates[row]
    samples = math.exp(world.Curve().predict([setting.batch_size])[0][0])
    found = project(problem, row, world.truth(setting))
    assert found.time_s == pytest.approx(world.truth(setting).step_s / setting.batch_size * samples)
    assert found.energy_j == pytest.approx(found.time_s * world.truth(setting).power_w)
    outlook = Outlook.of(problem, _exact(problem))
    assert math.exp(outlook.log_time_s[row]) == pytest.approx(found.time_s)
    assert math.exp(outlook.log_energy_j[row]) == pytest.approx(found.energy_j)


def test_an_outcome_fits_only_if_every_bound_is_kept() -> None:
    row = 17
    measured = world.truth(world.candidates()[row])
    free = project(world.problem(Budget(power_w=1000.0)), row, measured)
    for bound, value in (
        ("power_w", measured.power_w),
        ("deadline_s", free.time_s),
        ("energy_j", free.energy_j),
    ):
        assert project(world.problem(Budget(**{bound: 1.01 * value})), row, measured).fits
        assert not project(world.problem(Budget(**{bound: 0.99 * value})), row, measured).fits


def test_unsure_convergence_makes_the_expected_time_longer() -> None:
    sure = world.problem(Budget(power_w=10.0))
    unsure = world.problem(Budget(power_w=10.0), curve=world.Curve(std=0.5))
    assert np.all(unsure.log_steps > sure.log_steps)


def test_a_batch_size_that_never_gets_there_has_no_chance() -> None:
    problem = world.problem(Budget(power_w=1000.0), curve=world.Curve(hopeless=True))
    chance = Outlook.of(problem, _exact(problem)).chance_to_fit(problem.budget)
    assert np.all(chance[problem.candidates.batch_size == 64] == 0)
    assert np.all(chance[problem.candidates.batch_size < 64] == 1)


def test_chance_to_fit_is_half_at_the_bound_and_falls_with_each_bound() -> None:
    problem = world.problem(Budget(power_w=10.0))
    outlook = Outlook.of(problem, _exact(problem))
    row = 3
    at_bound = Budget(power_w=math.exp(outlook.log_drawn_w[row]))
    assert outlook.chance_to_fit(at_bound)[row] == pytest.approx(0.5)
    both = Budget(power_w=at_bound.power_w, deadline_s=math.exp(outlook.log_time_s[row]))
    assert outlook.chance_to_fit(both)[row] == pytest.approx(0.25)


def test_peak_watts_are_predicted_from_how_far_measured_peaks_lie_above_means() -> None:
    problem = world.problem(parse_budget("10W peak"))
    outlook = Outlook.of(problem, _exact(problem), world.everything()[:5])
    assert np.allclose(outlook.log_drawn_w - outlook.log_power_w, math.log(1.2))
    with pytest.raises(InputError, match="peak"):
        Outlook.of(problem, _exact(problem))


def test_the_goal_decides_what_is_small() -> None:
    problem = world.problem(Budget(power_w=10.0))
    outlook = Outlook.of(problem, _exact(problem))
    assert outlook.log_score(Goal.SOONEST)[0] is outlook.log_time_s
    assert np.allclose(outlook.log_score(Goal.LEAST_ENERGY)[0], outlook.log_time_s + outlook.log_power_w)


def test_without_convergence_it_is_throughput() -> None:
    problem = Problem.of(world.candidates(), Budget(power_w=10.0))
    assert np.allclose(problem.log_steps, -np.log(problem.candidates.batch_size))


def test_nothing_to_choose_from_is_an_error() -> None:
    nothing = SettingArray(("gpu_mhz",), np.empty((0, 1)), np.empty(0))
    with pytest.raises(InputError, match="no setting"):
        Problem.of(nothing, Budget(power_w=10.0))
    only_large = SettingArray(("gpu_mhz",), np.array([[600.0]]), np.array([64.0]))
    with pytest.raises(InputError, match="not reached"):
        Problem.of(only_large, Budget(power_w=10.0), world.Curve(hopeless=True))


# Pauses


def paused(budget: str = "8W", idle_w: float | None = 4.0) -> Problem:
    return replace(world.problem(parse_budget(budget)), idle_w=idle_w)


def test_a_setting_above_the_budget_fits_with_pauses_and_takes_longer() -> None:
    problem, tried = paused(), 0
    settings = [problem.candidates[row] for row in range(len(problem))]
    for row, setting in enumerate(settings):
        measured = world.truth(setting)
        found, plain = project(problem, row, measured), project(replace(problem, idle_w=None), row, measured)
        if measured.power_w <= 8.0:
            assert found == plain
        elif can_pause(measured.power_w, measured.step_s, problem.budget):
            tried += 1
            share = (8.0 - 4.0) / (measured.power_w - 4.0)
            assert found.fits
            assert not plain.fits
            assert found.time_s == pytest.approx(plain.time_s / share)
            assert found.energy_j == pytest.approx(8.0 * found.time_s)
        else:
            assert not found.fits
    assert tried > 5


def test_the_outlook_with_pauses_is_what_outcomes_will_say() -> None:
    problem = paused()
    outlook = Outlook.of(problem, _exact(problem))
    for row in range(0, len(problem), 7):
        found = project(problem, row, world.truth(problem.candidates[row]))
        assert math.exp(outlook.log_time_s[row]) == pytest.approx(found.time_s, rel=1e-9)
        assert math.exp(outlook.log_energy_j[row]) == pytest.approx(found.energy_j, rel=1e-9)
        assert bool(outlook.keeps(problem.budget)[row]) == found.fits


def test_watts_that_are_not_known_well_become_time_that_is_not() -> None:
    problem = paused()
    plain = Outlook.without_pauses(problem, _exact(problem, std=0.05))
    outlook = plain.with_pauses(problem)
    power_w, step_s = np.exp(plain.log_power_w), np.exp(plain.log_time_s - problem.log_steps)
    above = (power_w > 8.0) & can_pause(power_w, step_s, problem.budget)
    assert above.any()
    assert np.all(outlook.step_std[above] > plain.step_std[above])
    below = power_w < 8.0
    assert np.array_equal(outlook.step_std[below], plain.step_std[below])


@pytest.mark.parametrize(("budget", "idle_w"), [("8W peak", 4.0), ("8W", None), ("5Wh", 4.0)])
def test_without_mean_watts_or_idle_power_there_are_no_pauses(budget: str, idle_w: float | None) -> None:
    problem = paused(budget, idle_w)
    assert np.all(problem.busy_share(np.full(3, 20.0), np.full(3, 0.1)) == 1)
    plain = Outlook.without_pauses(problem, _exact(problem), world.everything()[:5])
    assert plain.with_pauses(problem) is plain


def test_nobody_trains_a_twentieth_of_the_time() -> None:
    problem = paused("4.1W")
    assert problem.busy_share(np.array([12.0]), np.array([0.1]))[0] == 1
    assert not project(problem, len(problem) - 1, world.truth(problem.candidates[len(problem) - 1])).fits


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("10W", [True, True, False]),
        ("2h", [True, False, True]),
        ("10Wh", [False, True, True]),
        ("10W, 2h", [True, False, False]),
        ("10W, 2h, 10Wh", [False, False, False]),
    ],
)
def test_a_budget_is_kept_where_every_bound_of_it_is(text: str, expected: list[bool]) -> None:
    hours = np.array([2.0, 2.5, 0.5])  # the first meets its bound exactly, which keeps it
    watts = np.array([10.0, 4.0, 12.0])
    assert keeps(parse_budget(text), watts, 3600 * hours, 3600 * hours * watts).tolist() == expected
    assert bool(keeps(parse_budget(text), watts[0], 3600 * hours[0], 3600 * hours[0] * watts[0])) is expected[0]
