from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from underwatt.predict.expert import leave_out
from underwatt.predict.fewshot import width_factor

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("truth", [0.6, 1.0, 1.8])
def test_many_readings_say_how_wide_intervals_must_be(truth: float) -> None:
    errors = RNG.normal(0, truth * 0.05, size=5000)
    assert width_factor(errors, np.full(5000, 0.05**2)) == pytest.approx(truth, rel=0.05)


def test_heavy_tails_are_judged_by_the_interval_and_not_by_the_outliers() -> None:
    errors = RNG.normal(size=2000)
    errors[:40] = 100.0
    assert width_factor(errors, np.ones(2000)) < 1.2


def test_few_readings_move_it_less_than_many() -> None:
    errors = np.array([0.5, -1.0, 1.5, -3.0])
    few, many = (width_factor(np.tile(errors, times), np.ones(4 * times)) for times in (1, 100))
    assert 1.0 < few < 0.8 * many


@given(st.lists(st.floats(-1e6, 1e6), min_size=3, max_size=30))
def test_the_factor_stays_within_reason(errors: list[float]) -> None:
    assert 0.3 <= width_factor(np.array(errors), np.ones(len(errors))) <= 4.0


def test_left_out_readings_are_those_of_a_fit_without_them() -> None:
    rows = 5
    root = RNG.normal(size=(2 * rows, 2 * rows))
    total = root @ root.T + np.eye(2 * rows)
    residual = RNG.normal(size=2 * rows)
    inverse = np.linalg.inv(total)
    errors, variances = leave_out(inverse, inverse @ residual)
    for row in range(rows):
        out = np.array([row, row + rows])
        rest = np.setdiff1d(np.arange(2 * rows), out)
        gain = total[np.ix_(out, rest)] @ np.linalg.inv(total[np.ix_(rest, rest)])
        np.testing.assert_allclose(errors[out], residual[out] - gain @ residual[rest])
        np.testing.assert_allclose(variances[out], np.diag(total[np.ix_(out, out)] - gain @ total[np.ix_(rest, out)]))
