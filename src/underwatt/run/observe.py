"""What the meter has seen of the steps lately."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from underwatt.profile.meter import Meter

FEWEST_READINGS = FEWEST_STEPS = 3
MOST_PAUSED = 0.5  # mostly idle, readings say little about steps


def mean_reading_w(meter: Meter, since_s: float) -> float:
    """Mean of the newest readings; NaN where there are none. Cheap: it is asked a few times a second."""
    watts = [reading.power_w for reading in meter.readings_after(since_s)]
    return sum(watts) / len(watts) if watts else math.nan


def seen_steps(meter: Meter, since_s: float, idle_w: float) -> tuple[float, float, bool]:
    """Mean power of the steps, their mean time, each NaN where too little was seen, and whether there were pauses."""
    trace = meter.trace(since_s)
    if len(trace) < FEWEST_READINGS:
        return math.nan, math.nan, False
    paused_s = float(meter.paused_s(trace.at_s)[-1])
    seconds = float(trace.at_s[-1] - trace.at_s[0])
    power_w = (trace.energy_j - idle_w * paused_s) / max(seconds - paused_s, 1e-9)
    if paused_s > MOST_PAUSED * seconds:
        power_w = math.nan
    times_s = meter.step_times(since_s)
    return power_w, float(np.mean(times_s)) if len(times_s) >= FEWEST_STEPS else math.nan, paused_s > 0
