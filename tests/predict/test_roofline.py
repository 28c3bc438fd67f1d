from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, strategies as st

from underwatt.predict.base import SettingArray
from underwatt.predict.roofline import (
    CONSTANTS,
    NAMES,
    NO_LIMIT,
    Belief,
    Centre,
    Dual,
    Inputs,
    add,
    evaluate,
    fit_constants,
    level_shift,
    smooth_max,
)

numbers = st.floats(-3, 3)


def _formula(values: dict[str, float]) -> Dual:
    k = {name: Dual.constant(name, value) for name, value in values.items()}
    x = np.array([-0.7, 0.2, 1.1])
    return smooth_max(k["p"], k["a"] - k["b"] * x, add(k["b"] * k["a"], k["c"] + x), -k["c"] * x, k["a"].exp() * x)


@given(numbers, numbers, numbers, st.floats(-1, 1.5))
def test_derivatives_match_finite_differences(a: float, b: float, c: float, p: float) -> None:
    at = {"a": a, "b": b, "c": c, "p": p}
    slopes = _formula(at).jacobian(tuple(at), 3)
    for column, name in enumerate(at):
        high, low = (_formula({**at, name: at[name] + step}).value for step in (1e-5, -1e-5))
        np.testing.assert_allclose(slopes[:, column], (high - low) / 2e-5, rtol=1e-3, atol=1e-4)


def test_smooth_max_is_a_sum_or_a_maximum() -> None:
    terms = [Dual(np.log(np.array([2.0]))), Dual(np.log(np.array([3.0])))]
    assert np.isclose(np.exp(add(*terms).value), 5.0)
    sharp = Dual(np.asarray(np.log(200.0)))
    assert np.isclose(np.exp(smooth_max(sharp, *terms).value), 3.0)


def test_large_numbers_do_not_overflow() -> None:
    value = smooth_max(Dual(np.asarray(2.0)), Dual(np.array([900.0])), Dual(np.array([-900.0]))).value
    assert np.isclose(value, 900.0)


RNG = np.random.default_rng(0)


def _inputs(rows: int, *, limit_w: float | None = None) -> Inputs:
    columns = RNG.uniform(-1.5, 0.5, size=(6, rows))
    log_limit = np.full(rows, NO_LIMIT) if limit_w is None else np.log(limit_w) + columns[5]
    return Inputs(*columns, log_limit)


@given(st.integers(0, 10_000))
def test_a_higher_clock_is_never_slower(seed: int) -> None:
    belief = Belief.general(level_shift(0.0, 3.0))
    theta = np.random.default_rng(seed).multivariate_normal(belief.mean, belief.cov)
    x = _inputs(20, limit_w=30.0)
    now = evaluate(theta, x)[0].value
    for name in ("cores", "cpu", "gpu", "mem", "limit"):
        faster = evaluate(theta, replace(x, **{name: getattr(x, name) + 0.3}))[0].value
        assert np.all(faster <= now + 1e-12), name


def test_a_larger_batch_takes_longer() -> None:
    theta = Belief.general(level_shift(0.0, 3.0)).mean
    x = _inputs(20)
    assert np.all(evaluate(theta, replace(x, batch=x.batch + 0.5))[0].value > evaluate(theta, x)[0].value)


def test_the_draw_keeps_to_a_tight_limit() -> None:
    theta = Belief.general(level_shift(0.0, np.log(100.0))).mean
    x = _inputs(20, limit_w=5.0)
    power = evaluate(theta, x)[1].value
    assert np.all(power <= x.log_limit_w + 0.01)


@pytest.mark.parametrize("limit_w", [None, 30.0])
def test_slopes_match_finite_differences(limit_w: float | None) -> None:
    theta = Belief.general(level_shift(-1.0, 3.0)).mean
    x = _inputs(5, limit_w=limit_w)
    for which in (0, 1):
        slopes = evaluate(theta, x)[which].jacobian(NAMES, 5)
        for at, name in enumerate(NAMES):
            step = np.zeros(len(theta))
            step[at] = 1e-5
            high, low = (evaluate(theta + sign * step, x)[which].value for sign in (1, -1))
            np.testing.assert_allclose(slopes[:, at], (high - low) / 2e-5, atol=1e-5, err_msg=name)


def test_every_constant_is_believed_to_be_something() -> None:
    for name, constant in CONSTANTS.items():
        assert constant.std > constant.of_workload > 0, name


MODES = np.array([[c, f, g] for c in (2.0, 4.0, 8.0) for f in (500.0, 1000.0, 2000.0) for g in (200.0, 600.0, 1200.0)])
SETTINGS = SettingArray.product(("cpu_cores", "cpu_mhz", "gpu_mhz"), MODES, [8, 32])


def test_centre_is_the_highest_clocks_and_the_middle_batch() -> None:
    centre = Centre.of(SETTINGS)
    x = centre.inputs(SETTINGS)
    assert x.cpu.max() == x.gpu.max() == 0.0
    assert np.isclose(x.batch.min(), -x.batch.max())
    assert np.all(x.mem == 0.0)
    assert np.all(x.log_limit_w == NO_LIMIT)
    assert np.isclose(x.cores[SETTINGS.values[:, 0] == 4.0], 0.0).all()


def test_constants_of_a_made_up_device_are_found_again() -> None:
    belief = Belief.general(level_shift(-1.0, 2.5))
    truth = np.random.default_rng(3).multivariate_normal(belief.mean, belief.cov / 4)
    x = Centre.of(SETTINGS).inputs(SETTINGS)
    time, power = evaluate(truth, x)
    fitted = evaluate(fit_constants(x, time.value, power.value, belief), x)
    assert np.abs(fitted[0].value - time.value).max() < 0.02
    assert np.abs(fitted[1].value - power.value).max() < 0.02


def test_one_wild_reading_does_not_bend_the_fit() -> None:
    belief = Belief.general(level_shift(-1.0, 2.5))
    x = Centre.of(SETTINGS).inputs(SETTINGS)
    time, power = evaluate(belief.mean, x)
    wild = time.value.copy()
    wild[5] += 1.0
    fitted = evaluate(fit_constants(x, wild, power.value, belief), x)
    assert np.median(np.abs(fitted[0].value - time.value)) < 0.01


def test_a_belief_near_another_workload_moves_with_the_level() -> None:
    general = Belief.general(level_shift(0.0, 0.0))
    near = Belief.near(general.mean, level_shift(2.0, 1.0), closeness=0.5)
    shift = near.mean - general.mean
    assert set(np.round(shift, 9)) == {0.0, 1.0, 2.0}
    assert np.all(np.diag(near.cov) <= np.diag(general.cov))
