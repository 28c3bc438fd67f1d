"""What the controller can be told, and what it is doing."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum

from underwatt.profile.measure import MeasureOptions


class State(str, Enum):
    """What the controller is doing."""

    SEARCHING = "searching"
    HOLDING = "holding"
    CORRECTING = "correcting"
    RESTORING = "restoring"


@dataclass(frozen=True, slots=True)
class ControlOptions:
    """When the controller looks, and what it takes seriously."""

    look_s: float = 0.2
    measure: MeasureOptions = field(default_factory=lambda: MeasureOptions(precision=0.015, min_steps=4, limit_s=12.0))
    # Pauses blur a reading, and a few batch sizes are soon compared.
    measure_paused: MeasureOptions = field(
        default_factory=lambda: MeasureOptions(precision=0.03, min_steps=4, limit_s=6.0)
    )
    settle_s: float = 1.5  # after a change readings tell of what was before
    short_s: float = 0.5  # a clear excess is seen in this time
    long_s: float = 4.0  # a drift in this
    clear_excess: float = 0.04
    same_level: float = 0.03  # budgets this close to each other need no search of their own
    most_a_level: int = 12  # measurements for one level of the budget
    least_gain: float = 0.005
    hopeless: float = 1.3  # so many times slower than the best: measured no further
    rough: float = 0.05  # half width of the intervals that suffices to rule a setting out
    short_of_s: float = 4.0  # pauses that draw more than the budget for so long do not help
    silent_s: float = 1.0  # without a reading for so long, the sensor counts as lost
    lost_s: float = 10.0  # a sensor may be silent for so long
    throttle_s: float = 60.0  # how long clocks above a throttled one are not used


@dataclass(slots=True)
class Quiet:
    """Until when steps need no look, because nothing is measured and nothing paused: then a step costs next to nothing.

    Whoever reports steps looks here first, and only counts those of this batch size.
    """

    until_s: float = -math.inf
    batch_size: int = 0
    steps: int = 0
