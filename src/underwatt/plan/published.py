"""The published algorithm ("Accelerated Training on Low-Power Edge Devices", TMLR 2025), exactly.

Every setting was measured, every batch size was trained on proxy data. Keep the settings whose power fits; choose the
one with the smallest time per sample × samples to target. No prediction, no uncertainty.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from underwatt.errors import BudgetError, InputError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from underwatt.plan.budget import Budget
    from underwatt.records import Measurement


def choose_published(
    measurements: Sequence[Measurement], samples_to_target: Mapping[int, float], budget: Budget
) -> Measurement:
    """The measured setting that fits and is expected to reach the target soonest.

    Batch sizes that are not in ``samples_to_target``, or never reach the target (NaN or inf), are left out. Only the
    budget's watts count. Raises ``BudgetError`` where no measured setting fits.
    """
    usable = [m for m in measurements if m.usable and math.isfinite(_samples(m, samples_to_target))]
    if not usable:
        raise InputError(
            "No measured setting has a batch size whose samples to target are known.",
            hint="Measure settings at the batch sizes of the proxy runs.",
        )
    fitting = [m for m in usable if budget.allows(m)]
    if not fitting:
        smallest_w = min(budget.drawn_w(m) for m in usable)
        raise BudgetError(
            f"No measured setting keeps the budget of {budget}.",
            hint=f"The smallest budget that one keeps is {smallest_w:.4g} W.",
        )
    return min(fitting, key=lambda m: m.step_s / m.setting.batch_size * _samples(m, samples_to_target))


def _samples(measurement: Measurement, samples_to_target: Mapping[int, float]) -> float:
    return samples_to_target.get(measurement.setting.batch_size, math.inf)
