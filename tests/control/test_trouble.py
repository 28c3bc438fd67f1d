from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from underwatt.control.faults import SensorGuard, ThrottleGuard
from underwatt.errors import SensorError
from underwatt.records import DeviceState, PowerMode, PowerSample

GONE = SensorError("The sensor is gone.", hint="Plug it in.")


def test_a_silent_sensor_is_news_once_and_an_error_when_it_lasts() -> None:
    guard = SensorGuard(1.0, 10.0)
    assert not guard.is_lost
    assert guard.lost(5.0, GONE)
    assert guard.is_lost
    assert not guard.lost(15.0, GONE)
    with pytest.raises(SensorError, match="could not be read for 10 s") as error:
        guard.lost(15.1, GONE)
    assert error.value.__cause__ is GONE


def test_a_sensor_is_back_with_a_reading_after_it_was_lost() -> None:
    guard = SensorGuard(1.0, 10.0)
    assert not guard.back(PowerSample(1.0, 5.0)), "it was never lost"
    guard.lost(5.0, GONE)
    assert not guard.back(None)
    assert not guard.back(PowerSample(4.9, 5.0)), "that reading is older"
    assert guard.back(PowerSample(5.1, 5.0))
    assert not guard.is_lost
    assert guard.lost(20.0, GONE), "a second loss is news again"


def device(running_mhz: float | None, *reasons: str) -> Any:
    mode = PowerMode(gpu_mhz=running_mhz)
    return SimpleNamespace(read_state=lambda: DeviceState(running=mode, throttle_reasons=reasons))


def test_a_throttled_clock_is_named_once_and_free_after_a_while() -> None:
    guard = ThrottleGuard(60.0)
    asked = PowerMode(gpu_mhz=900.0)
    assert guard.look(0.0, device(900.0), asked) == ""
    assert guard.look(0.5, device(600.0, "heat"), asked) == "", "asked too soon"
    assert guard.look(1.0, device(600.0, "heat"), asked) == "The device slows itself down (heat)."
    assert guard.active
    assert guard.highest_mhz == 600.0
    assert guard.look(2.0, device(600.0, "heat"), asked) == ""
    assert not guard.is_over(61.0)
    assert guard.is_over(61.1)
    assert not guard.active
    assert not guard.is_over(62.0)


@pytest.mark.parametrize(
    ("running", "asked"),
    [(None, PowerMode(gpu_mhz=900.0)), (900.0, PowerMode(gpu_mhz=900.0)), (600.0, PowerMode(power_limit_w=200.0))],
)
def test_only_a_gpu_clock_below_the_one_asked_for_is_throttling(running: float | None, asked: PowerMode) -> None:
    guard = ThrottleGuard(60.0)
    assert guard.look(0.0, device(running, "power cap"), asked) == ""
    assert not guard.active
