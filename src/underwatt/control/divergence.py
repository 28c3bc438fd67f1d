"""Whether a training has diverged, from its losses as they are looked at about once a second."""

from __future__ import annotations

import math
from dataclasses import dataclass

# Mixed precision skips a step now and then whose numbers ran over: one loss that is not finite is no end.
MOST_IN_A_ROW = 5


@dataclass(frozen=True, slots=True)
class Losses:
    """How many of the last losses, each of another step, were no finite numbers."""

    not_finite: int = 0
    steps: int = -1  # trained when the last one was looked at

    def after(self, loss: float | None, steps: int) -> Losses:
        """With the loss of one more step; nothing new where there is none, or it is of the step looked at last."""
        if loss is None or steps == self.steps:
            return self
        return Losses(0 if math.isfinite(loss) else self.not_finite + 1, steps)

    @property
    def in_doubt(self) -> bool:
        """Whether the last one was not finite: what the model is now may be worth nothing."""
        return self.not_finite > 0

    @property
    def diverged(self) -> bool:
        """Whether so many in a row were not finite that training on is in vain."""
        return self.not_finite >= MOST_IN_A_ROW
