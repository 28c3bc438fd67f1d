"""What a device draws while no step is under way: what pauses are reckoned with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from underwatt.errors import SensorError
from underwatt.profile.meter import SAMPLE_PERIOD_S, Meter

if TYPE_CHECKING:
    from underwatt.device.base import Device

SETTLE_S = 1.0
WATCH_S = 1.0


def measure_idle(device: Device, watch_s: float = WATCH_S) -> float:
    """Mean power over a moment in which nothing is trained; whoever calls sees to that."""
    with Meter(device, SAMPLE_PERIOD_S) as meter:
        device.clock.sleep(SETTLE_S + watch_s)
        trace = meter.trace(device.clock.now_s() - watch_s)
    if len(trace) < 2:
        raise SensorError(f"{device.info.name} gave no power reading in {watch_s:g} s.")
    return trace.energy_j / float(trace.at_s[-1] - trace.at_s[0])
