"""What the meter has seen of the steps lately."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from underwatt.profile.meter import Meter

FEWEST_READINGS = FEWEST_STEPS = 3
MOST_PAUSED = 0.5  # mostly idle, readings say little about steps
IDLE_DOUBT = 0.15  # standard deviation of what a pause draws, as a share: it hangs on the clocks


def mean_reading_w(meter: Meter, since_s: float) -> float:
    """Mean of the newest readings; NaN where there are none. Cheap: it is asked a few times a second."""
    watts = [reading.power_w for reading in meter.readings_after(since_s)]
    return sum(watts) / len(watts) if watts else math.nan


@dataclass(frozen=True, slots=True)
class SeenSteps:
    """Mean power of steps and their mean time, NaN where too little was seen; and how far pauses blur the power."""

    power_w: float
    step_s: float
    blur_w: float


def seen_steps(meter: Meter, since_s: float, idle_w: float) -> SeenSteps:
    """What the steps since a moment drew and took, pauses between them taken off."""
    trace = meter.trace(since_s)
    if len(trace) < FEWEST_READINGS:
        return SeenSteps(math.nan, math.nan, 0.0)
    paused_s = float(meter.paused_s(trace.at_s)[-1])
    seconds = float(trace.at_s[-1] - trace.at_s[0])
    busy_s = max(seconds - paused_s, 1e-9)
    power_w = (trace.energy_j - idle_w * paused_s) / busy_s if paused_s <= MOST_PAUSED * seconds else math.nan
    times_s = meter.step_times(since_s)
    step_s = float(np.mean(times_s)) if len(times_s) >= FEWEST_STEPS else math.nan
    return SeenSteps(power_w, step_s, IDLE_DOUBT * idle_w * paused_s / busy_s)
