from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from underwatt.predict.roofline import CONSTANTS, NAMES, NO_LIMIT, Belief, Inputs, Levels, evaluate

RNG = np.random.default_rng(0)


def _inputs(rows: int, *, limit_w: float | None = None) -> Inputs:
    columns = RNG.uniform(-1.5, 0.5, size=(6, rows))
    log_limit = np.full(rows, NO_LIMIT) if limit_w is None else np.log(limit_w) + columns[5]
    return Inputs(*columns, log_limit)


@given(st.integers(0, 10_000))
def test_a_higher_clock_is_never_slower(seed: int) -> None:
    belief = Belief.general(Levels(0.0, 3.0))
    theta = np.random.default_rng(seed).multivariate_normal(belief.mean, belief.cov)
    x = _inputs(20, limit_w=30.0)
    now = evaluate(theta, x)[0].value
    for name in ("cores", "cpu", "gpu", "mem", "limit"):
        faster = evaluate(theta, replace(x, **{name: getattr(x, name) + 0.3}))[0].value
        assert np.all(faster <= now + 1e-12), name


def test_a_larger_batch_takes_longer() -> None:
    theta = Belief.general(Levels(0.0, 3.0)).mean
    x = _inputs(20)
    assert np.all(evaluate(theta, replace(x, batch=x.batch + 0.5))[0].value > evaluate(theta, x)[0].value)


def test_the_draw_keeps_to_a_tight_limit() -> None:
    theta = Belief.general(Levels(0.0, np.log(100.0))).mean
    x = _inputs(20, limit_w=5.0)
    power = evaluate(theta, x)[1].value
    assert np.all(power <= x.log_limit_w + 0.01)


@pytest.mark.parametrize("limit_w", [None, 30.0])
def test_slopes_match_finite_differences(limit_w: float | None) -> None:
    theta = Belief.general(Levels(-1.0, 3.0)).mean
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
