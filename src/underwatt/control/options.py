"""What the controller can be told, and what it is doing."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum

from underwatt.measure.measurement import MeasureOptions
from underwatt.measure.steady import UNJUDGED_AFTER_CHANGE_S

CALM_S = 0.35  # a reading says so much about the time after it; without another one, somebody looks


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
    calm_look_s: float = 2.0  # where readings and budget are calm meanwhile
    calm_above: float = 0.03  # of mean watts: readings are noisy
    measure: MeasureOptions = field(default_factory=lambda: MeasureOptions(precision=0.015, min_steps=4, limit_s=12.0))
    # Pauses blur a reading, and a few batch sizes are soon compared.
    measure_paused: MeasureOptions = field(
        default_factory=lambda: MeasureOptions(precision=0.03, min_steps=4, limit_s=6.0)
    )
    settle_s: float = UNJUDGED_AFTER_CHANGE_S
    short_s: float = 0.5  # a clear excess is seen in this time
    long_s: float = 4.0  # a drift in this
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

    Whoever reports steps looks here first, and only counts those of this batch size. It takes two to be quiet: the
    controller, which says until when and up to which watts (``until_s``, ``calm_w``), and the thread that reads power,
    which sees with each reading that nothing has happened (``calm_until_s``). Neither writes what is the other's.
    """

    until_s: float = -math.inf
    calm_w: float = -math.inf
    calm_until_s: float = -math.inf
    batch_size: int = 0
    steps: int = 0

    def heard(self, at_s: float, power_w: float, has_news: bool) -> None:
        """Power was read; ``has_news`` where somebody has asked for another budget."""
        self.calm_until_s = at_s + CALM_S if power_w <= self.calm_w and not has_news else -math.inf
