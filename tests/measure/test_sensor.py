from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, strategies as st

from underwatt.device.registry import open_device
from underwatt.measure.meter import Trace
from underwatt.measure.sensor import followed, new_value_period_s, reading_time_s

AT_S = np.arange(0, 3, 0.02)


def trace(power_w: object) -> Trace:
    return Trace(AT_S, np.broadcast_to(np.asarray(power_w, float), AT_S.shape), None, 0)


@pytest.mark.parametrize("lag_s", [0.2, 0.6, 1.0])
def test_the_lag_of_an_averaging_sensor_is_found(lag_s: float) -> None:
    noise = np.random.default_rng(0).normal(0, 0.02, len(AT_S))
    found_s, step_w = followed(10.0, 0.0, trace(4 + 6 * np.exp(-AT_S / lag_s) + noise))
    assert found_s == pytest.approx(lag_s, rel=0.25)
    assert step_w == pytest.approx(-6, rel=0.05)


def test_a_sensor_that_follows_at_once_is_as_quick_as_it_is_read() -> None:
    found_s, step_w = followed(10.0, -0.02, trace(4.0))
    assert (found_s, step_w) == (pytest.approx(0.02), pytest.approx(-6))


@given(st.floats(0.5, 100), st.floats(-0.03, 0.03))
def test_a_change_that_is_too_small_tells_nothing(power_w: float, share: float) -> None:
    found_s, _ = followed(power_w, 0.0, trace(power_w * (1 + share)))
    assert math.isnan(found_s)


def test_no_readings_tell_nothing() -> None:
    empty = Trace(np.empty(0), np.empty(0), None, 0)
    assert all(math.isnan(value) for value in followed(5.0, 0.0, empty))
    assert math.isnan(new_value_period_s(empty))


def test_new_values_are_counted_where_there_are_some() -> None:
    assert new_value_period_s(trace(np.floor(AT_S / 0.2 + 1e-9))) == pytest.approx(0.2)
    assert math.isnan(new_value_period_s(trace(5.0)))


def test_a_reading_of_a_simulated_board_takes_no_time() -> None:
    assert reading_time_s(open_device("virtual:nano")) == 0
