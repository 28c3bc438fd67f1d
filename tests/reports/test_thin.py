from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from underwatt.reports.run_figures import stretches, thin


@given(
    power_w=st.lists(st.floats(0, 100), min_size=1, max_size=400),
    bound_w=st.floats(0, 100),
    most=st.integers(8, 60),
)
def test_no_excess_and_no_extreme_is_hidden(power_w: list[float], bound_w: float, most: int) -> None:
    power, bound = np.array(power_w), np.full(len(power_w), bound_w)
    rows = thin(power, bound, most)
    assert len(rows) <= most
    assert list(rows) == sorted(set(rows.tolist()))
    assert power[rows].max() == power.max()
    assert power[rows].min() == power.min()
    assert (power[rows] > bound[rows]).any() == (power > bound).any()
    assert {0, len(power) - 1} <= set(rows.tolist())


def test_an_excess_below_the_highest_reading_stays_where_the_budget_dropped() -> None:
    power, bound = np.full(10_000, 9.0), np.full(10_000, 10.0)
    bound[5000:] = 5.0
    power[5000:] = 4.0
    power[5003] = 6.0  # over its budget, though 9 W were fine a moment before
    rows = thin(power, bound, 300)
    assert 5003 in rows
    assert (power[rows] > bound[rows]).sum() == 1


def test_every_stretch_with_an_excess_shows_one() -> None:
    rng = np.random.default_rng(0)
    power, bound = rng.normal(9, 0.2, 864_000), np.full(864_000, 10.0)
    spikes = rng.choice(864_000, 40, replace=False)
    power[spikes] = 10.001
    rows = thin(power, bound)
    shown = rows[power[rows] > bound[rows]]
    assert len(rows) <= 4000
    stretch = 864_000 / ((4000 - 2) // 3)
    assert all(np.abs(shown - spike).min() <= stretch for spike in spikes)


def test_a_short_trace_is_shown_whole() -> None:
    power = np.array([3.0, 1.0, 2.0])
    assert thin(power, np.full(3, 2.5)).tolist() == [0, 1, 2]


@settings(max_examples=50)
@given(st.lists(st.floats(0.1, 100), max_size=300), st.integers(1, 50))
def test_stretches_bound_what_they_average(power_w: list[float], most: int) -> None:
    power = np.array(power_w, dtype=float)
    middle, low, mean, high = stretches(np.arange(len(power), dtype=float), power, most)
    assert len(middle) <= most
    assert np.all(low <= mean + 1e-9)
    assert np.all(mean <= high + 1e-9)
    if len(power):
        assert high.max() == pytest.approx(power.max())
