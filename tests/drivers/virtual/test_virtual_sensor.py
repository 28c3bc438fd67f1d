from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from underwatt.drivers.virtual.board import AveragingSensor
from underwatt.drivers.virtual.boards import SensorRail, SensorSpec

RAIL = SensorRail("IN", 1, 1, 1, 1, in_total=True, volts=5.0)
EXACT = SensorSpec(window_s=0.1, lag_s=0.6, step_ma=1e-3, noise=0.0)


class Quiet(Random):
    """No noise."""

    def gauss(self, mu: float = 0.0, sigma: float = 1.0) -> float:
        return mu


def sensor(spec: SensorSpec = EXACT, watts: float = 2.0, random: Random | None = None) -> AveragingSensor:
    return AveragingSensor(spec, (RAIL,), random or Quiet(), (watts,))


def test_follows_a_change_within_two_seconds_but_not_at_once() -> None:
    meter = sensor()
    meter.live(0.05, (10.0,))
    assert meter.watts()["IN"] == pytest.approx(2.0, abs=0.01)
    meter.live(0.45, (10.0,))
    assert 4.0 < meter.watts()["IN"] < 8.0
    meter.live(2.0, (10.0,))
    assert meter.watts()["IN"] == pytest.approx(10.0, rel=0.03)


@given(st.lists(st.floats(1e-4, 3.0), min_size=1, max_size=20))
def test_any_cutting_of_time_reads_the_same(cuts: list[float]) -> None:
    whole, cut = sensor(), sensor()
    for seconds in cuts:
        cut.live(seconds, (8.0,))
    whole.live(sum(cuts), (8.0,))
    # Rounding may put a window's end on either side of a cut: one window's worth of difference at most.
    assert cut.watts()["IN"] == pytest.approx(whole.watts()["IN"], abs=6.0 * (0.1 / 0.6) + 0.02)
    whole.live(20, (8.0,))
    cut.live(20, (8.0,))
    assert cut.watts()["IN"] == pytest.approx(whole.watts()["IN"], abs=1e-3)


def test_reads_whole_steps_of_current() -> None:
    meter = sensor(SensorSpec(0.1, 0.6, step_ma=8.0, noise=0.01), random=Random(1))
    readings = set()
    for _ in range(200):
        meter.live(0.1, (7.3,))
        mv, ma = meter.readings()["IN"]
        assert mv == 5000
        assert ma % 8 == 0
        readings.add(ma)
    assert len(readings) > 3


def test_a_load_that_switches_faster_than_the_window_reads_as_its_mean() -> None:
    meter = sensor()
    for _ in range(2000):
        meter.live(0.004, (12.0,))
        meter.live(0.006, (2.0,))
    assert meter.watts()["IN"] == pytest.approx(6.0, rel=0.02)


def test_never_reads_below_zero() -> None:
    meter = sensor(SensorSpec(0.1, 0.6, step_ma=20.0, noise=0.01), watts=0.001, random=Random(3))
    for _ in range(500):
        meter.live(0.1, (0.001,))
        assert meter.watts()["IN"] >= 0
