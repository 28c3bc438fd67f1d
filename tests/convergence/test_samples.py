from __future__ import annotations

import math

import numpy as np
import pytest

from underwatt.convergence.curve import samples_to_target
from underwatt.errors import InputError
from underwatt.records import ConvergenceRun


def test_a_table_says_what_it_was_told_and_nothing_more() -> None:
    found = samples_to_target({8: 1000, 16: 1500.0})
    assert found is not None
    mean, std = found.predict([8, 16, 32])
    assert np.exp(mean[:2]) == pytest.approx([1000, 1500])
    assert mean[2] == math.inf
    assert not std.any()


@pytest.mark.parametrize("count", [0, -1, math.nan, math.inf])
def test_nonsense_is_refused(count: float) -> None:
    with pytest.raises(InputError, match="make no sense"):
        samples_to_target({8: count})


def test_curves_pass_through_and_runs_become_one() -> None:
    assert samples_to_target(None) is None
    runs = [ConvergenceRun(size, 0.9, 1000.0 * (1 + size / 32), seed) for size in (8, 16, 32, 64) for seed in range(2)]
    curve = samples_to_target(runs)
    assert curve is not None
    assert samples_to_target(curve) is curve
    mean, _ = curve.predict([16])
    assert math.exp(mean[0]) == pytest.approx(1500, rel=0.1)
