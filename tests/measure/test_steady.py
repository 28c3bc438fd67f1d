from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, strategies as st
from hypothesis.extra.numpy import arrays

from underwatt.measure.steady import (
    SETTLING_TIMES_S,
    Settling,
    independent_share,
    jump,
    mean_after_warmup,
    mean_while_settling,
    warm_from,
)

finite = st.floats(0.01, 1e4, allow_nan=False)


def settling_signal(rng: np.random.Generator, tau_s: float, count: int) -> tuple[np.ndarray, np.ndarray]:
    at_s = 5 + 0.1 * np.arange(count)
    return at_s, 10 - 5 * np.exp(-(at_s - 5) / tau_s) + rng.normal(0, 0.1, count)


def test_slow_first_steps_are_dropped() -> None:
    values = np.array([5.0, 3.0, *np.tile([1.0, 1.01, 0.99], 6)])
    assert warm_from(values) == 2
    found = mean_after_warmup(values)
    assert found.mean == pytest.approx(1.0, abs=0.002)
    assert found.count == 18


@given(arrays(float, st.integers(0, 60), elements=finite))
def test_any_values_give_a_number_and_keep_at_least_half(values: np.ndarray) -> None:
    found = mean_after_warmup(values)
    assert found.first <= len(values) // 2
    assert found.first + found.count == len(values)
    if len(values) >= 4:
        assert values.min() - 1e-6 <= found.mean <= values.max() + 1e-6
        assert found.ci95 >= 0


def test_too_few_values_are_not_trusted() -> None:
    assert math.isnan(mean_after_warmup(np.empty(0)).mean)
    assert mean_after_warmup(np.array([1.0, 1.0])).ci95 == math.inf
    few, _ = mean_while_settling(np.arange(3.0), np.ones(3), Settling())
    assert few.ci95 == math.inf


def test_constant_values_are_known_exactly() -> None:
    assert mean_after_warmup(np.full(10, 2.0)).ci95 == 0
    found, _ = mean_while_settling(np.arange(20) / 10, np.full(20, 3.0), Settling())
    assert found.mean == pytest.approx(3.0)
    assert found.ci95 < 0.01


@pytest.mark.parametrize("tau_s", [0.2, 0.6, 1.2])
def test_the_level_is_known_before_it_is_reached_and_the_interval_is_honest(tau_s: float) -> None:
    rng = np.random.default_rng(0)
    found = [mean_while_settling(*settling_signal(rng, tau_s, 30), Settling())[0] for _ in range(200)]
    plain = np.mean(settling_signal(rng, tau_s, 30)[1])
    errors = np.array([estimate.mean - 10 for estimate in found])
    covered = np.mean([abs(e.mean - 10) <= e.ci95 for e in found])
    assert np.median(np.abs(errors)) < abs(plain - 10) / 4
    assert 0.88 <= covered <= 1.0


def test_what_was_learned_of_the_sensor_narrows_the_next_interval() -> None:
    rng = np.random.default_rng(1)
    settling = Settling()

    def typical_ci95() -> float:
        found = [mean_while_settling(*settling_signal(rng, 0.6, 18), settling)[0].ci95 for _ in range(60)]
        return float(np.median(found))

    fresh = typical_ci95()
    for _ in range(5):
        settling.learn(mean_while_settling(*settling_signal(rng, 0.6, 40), settling)[1])
    likeliest_s = SETTLING_TIMES_S[int(np.argmax(settling.log_prior))]
    assert 0.45 < likeliest_s < 0.8
    assert typical_ci95() < 0.7 * fresh
    assert np.exp(settling.log_prior).sum() == pytest.approx(1.0)
    assert settling.log_prior.min() > -20, "nothing is ruled out for good"


def test_long_steps_that_differ_widen_the_interval() -> None:
    rng = np.random.default_rng(2)
    at_s = 0.1 * np.arange(100)
    per_step = np.repeat(rng.normal(10, 0.5, 10), 10) + rng.normal(0, 0.05, 100)
    unaware, _ = mean_while_settling(at_s, per_step, Settling())
    aware, _ = mean_while_settling(at_s, per_step, Settling(), block_s=1.0)
    assert aware.ci95 >= unaware.ci95
    assert aware.ci95 > 0.2
    assert mean_while_settling(at_s[:30], per_step[:30], Settling(), block_s=1.0)[0].ci95 == math.inf


def test_correlated_readings_count_for_less() -> None:
    rng = np.random.default_rng(3)
    white = rng.normal(size=2000)
    slow = np.convolve(white, np.ones(20) / 20, mode="valid")
    assert independent_share(white) > 0.8
    assert independent_share(slow - slow.mean()) < 0.15
    assert independent_share(np.zeros(5)) == 1.0


def test_a_leap_within_a_steady_signal_is_found_and_no_other() -> None:
    rng = np.random.default_rng(0)
    at_s = np.arange(0, 6, 0.1)
    steady = 3.0 + 0.02 * rng.standard_normal(len(at_s))
    assert jump(at_s, steady) is None
    assert jump(at_s, np.linspace(3.0, 3.6, len(at_s))) is None  # heat
    assert jump(at_s[:15], steady[:15]) is None
    found = jump(at_s, steady + 1.5 * np.clip((at_s - 3) / 0.8, 0, 1))
    assert found is not None
    assert found == pytest.approx((3.0, 4.5), rel=0.05)
    waves = steady + np.where((at_s % 1.0) < 0.5, 0.0, 1.0)  # steps of a second with two phases
    assert jump(at_s, waves) is None


def test_warmth_is_not_taken_for_the_sensors_lag() -> None:
    """A board that warms up rises slowly, by little: measuring that made a sensor that lags 0.6 s seem to lag 1.2 s."""
    rng, settling = np.random.default_rng(2), Settling()
    settling.learn(mean_while_settling(*settling_signal(rng, 0.6, 30), settling)[1])
    learned_s = settling.typical_s
    assert learned_s == pytest.approx(0.6, abs=0.15)
    for _ in range(10):
        at_s = 0.1 * np.arange(40)
        warming = 6.0 - 0.4 * np.exp(-at_s / 8.0) + rng.normal(0, 0.03, 40)
        settling.learn(mean_while_settling(at_s, warming, settling)[1])
    assert settling.typical_s == pytest.approx(learned_s, abs=0.1)
