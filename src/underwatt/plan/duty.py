"""Pauses between steps: the knob that needs no privilege, with its true cost in time.

A device that draws P while it trains and I while it waits draws any mean B between them if it trains for the share
(B − I) / (P − I) of the time. So a setting that draws more than the budget is not out of the question: it only takes
longer. The budget's watts must be a mean, over a window that holds several steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from underwatt.plan.budget import Budget, Watts

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    Floats = NDArray[np.float64]

# Where a budget names no window, its mean is kept over this long.
DEFAULT_WINDOW_S = 5.0
# What one step draws beyond the budget must be a small share of what the window allows, or its mean would swing.
LARGEST_SWING = 0.012
# Waiting for more than this share of the time is no way to train.
LEAST_BUSY = 0.05


def allows_pauses(budget: Budget) -> bool:
    """Whether a budget can be kept by pausing: mean watts can, peak watts cannot."""
    return budget.power_w is not None and budget.watts is Watts.MEAN


def can_pause(power_w: ArrayLike, step_s: ArrayLike, budget: Budget) -> NDArray[np.bool_]:
    """Whether pauses between steps keep the mean steady: one step must not draw much of what a window allows."""
    assert budget.power_w is not None
    above = np.maximum(np.asarray(power_w, dtype=float) / budget.power_w - 1, 0.0)
    return np.asarray(above * np.asarray(step_s) <= LARGEST_SWING * (budget.window_s or DEFAULT_WINDOW_S))


def busy_share(power_w: ArrayLike, idle_w: float, budget_w: float) -> Floats:
    """The share of the time that may be spent in steps which draw ``power_w``; 0 where waiting alone draws too much."""
    power = np.asarray(power_w, dtype=float)
    above = np.maximum(power - idle_w, 1e-12)
    share = np.where(power <= budget_w, 1.0, (budget_w - idle_w) / above)
    return np.asarray(np.clip(share, 0.0, 1.0))
