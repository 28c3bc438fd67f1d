"""How a power sensor behaves: what a reading takes, how often a new value comes, how slowly it follows a change."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from underwatt.measure.steady import Settling, mean_while_settling

if TYPE_CHECKING:
    from underwatt.device.base import Device
    from underwatt.measure.meter import Trace

READINGS = 20
FEWEST_CHANGES = 8  # of the value, to tell how often it changes
CLEAR_STEP = 0.05  # a change of power that is smaller tells nothing of how it is followed
AT_ONCE = 0.1  # a first reading so close to where a step ends, as a share of it, has followed at once


def reading_time_s(device: Device) -> float:
    """What one reading of power takes, in the device's time: the median of some."""
    taken = []
    for _ in range(READINGS):
        begin_s = device.clock.now_s()
        device.read_power()
        taken.append(device.clock.now_s() - begin_s)
    return float(np.median(taken))


def new_value_period_s(trace: Trace) -> float:
    """How often the sensor gives a new value; NaN where too few were seen. Chance repeats one, so the quicker count."""
    moments_s = trace.at_s[1:][np.diff(trace.power_w) != 0]
    return float(np.quantile(np.diff(moments_s), 0.25)) if len(moments_s) >= FEWEST_CHANGES else math.nan


def followed(before_w: float, changed_s: float, after: Trace) -> tuple[float, float]:
    """The time constant with which readings followed a change of power, and its watts; NaN where it was too small.

    ``after`` begins with the first reading after the change.
    """
    if len(after) < 2:
        return math.nan, math.nan
    settled, log_likelihood = mean_while_settling(after.at_s, after.power_w, Settling())
    step_w = settled.mean - before_w
    if not abs(step_w) >= CLEAR_STEP * max(before_w, settled.mean):
        return math.nan, step_w
    if abs(float(after.power_w[0]) - settled.mean) <= AT_ONCE * abs(step_w):
        return float(after.at_s[0]) - changed_s, step_w
    settling = Settling()
    settling.learn(log_likelihood)
    return settling.typical_s, step_w
