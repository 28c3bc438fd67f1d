from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from underwatt.predict.base import SettingArray
from underwatt.predict.fewshot import never_slower

GRID = np.array([[f, g] for f in (500.0, 1000.0, 2000.0) for g in (200.0, 400.0, 800.0, 1200.0)])
SETTINGS = SettingArray.product(("cpu_mhz", "gpu_mhz"), GRID, [8, 32])


def _violations(log_step_s: np.ndarray, settings: SettingArray) -> int:
    rows = settings.matrix()
    count = 0
    for a, t in zip(rows, log_step_s, strict=True):
        for b, u in zip(rows, log_step_s, strict=True):
            differs = np.flatnonzero(a != b)
            if len(differs) == 1 and differs[0] < len(settings.knobs) and b[differs[0]] > a[differs[0]]:
                count += u > t + 1e-7
    return count


@given(st.lists(st.floats(-5, 5), min_size=24, max_size=24), st.integers(2, 24), st.randoms())
def test_no_single_knob_raised_makes_it_slower(values: list[float], count: int, random) -> None:
    rows = np.array(random.sample(range(24), count))
    some = SettingArray(SETTINGS.knobs, SETTINGS.values[rows], SETTINGS.batch_size[rows])
    out = never_slower(np.array(values)[rows], some)
    assert _violations(out, some) == 0


def test_times_in_order_stay_as_they_are() -> None:
    times = -np.log(SETTINGS.values).sum(axis=1) + np.log(SETTINGS.batch_size)
    np.testing.assert_allclose(never_slower(times, SETTINGS), times, atol=1e-9)


def test_a_pair_out_of_order_meets_in_the_middle() -> None:
    pair = SettingArray(("gpu_mhz",), np.array([[800.0], [400.0]]), np.array([8.0, 8.0]))
    np.testing.assert_allclose(never_slower(np.array([2.0, 1.0]), pair), [1.5, 1.5])


def test_nothing_in_nothing_out() -> None:
    assert len(never_slower(np.empty(0), SETTINGS.take(slice(0, 0)))) == 0
