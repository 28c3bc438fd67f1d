from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from underwatt.predict.roofline import Dual, add, smooth_max

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
