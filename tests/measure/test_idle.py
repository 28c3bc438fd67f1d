from __future__ import annotations

from typing import Any

import pytest
from run_world import NET, Hurt, virtual

from underwatt.errors import SensorError
from underwatt.measure.meter import IDLE_WATCH_S, measure_idle
from underwatt.measure.steady import SETTLING_WAIT_S


@pytest.mark.parametrize("board", ["nano", "tx2-nx", "orin-nano"])
def test_idle_power_is_true_even_right_after_work(board: str) -> None:
    device = virtual(board)
    begun_s = device.clock.now_s()
    for _ in range(20):
        device.run_step(NET, 32)
    worked_s = device.clock.now_s() - begun_s
    found_w = measure_idle(device, watch_s=4.0)
    assert device.clock.now_s() - begun_s - worked_s == pytest.approx(SETTLING_WAIT_S + 4.0)
    lag = 0.08 if device.board.spec.sensor.lag_s > 0.3 else 0.03  # the sensor still remembers the work
    assert found_w == pytest.approx(device.board.power_w, rel=lag)


def test_it_takes_two_seconds() -> None:
    device = virtual()
    measure_idle(device)
    assert device.clock.now_s() == pytest.approx(SETTLING_WAIT_S + IDLE_WATCH_S)


def test_a_sensor_that_fails_meanwhile_is_an_error() -> None:
    device: Any = Hurt(virtual())
    device.silent = lambda: device.clock.now_s() > 0.5
    with pytest.raises(SensorError):
        measure_idle(device)
