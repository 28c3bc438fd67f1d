"""The settings that no other setting beats in time, power and energy at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray


def front(time_s: ArrayLike, power_w: ArrayLike) -> NDArray[np.intp]:
    """Rows on the Pareto front, the fastest first.

    Energy is time × power: a setting that another beats in both is beaten in energy too, so the front of time and
    power is the front of all three. Rows without a finite time or power are never on it; of equal rows one is.
    """
    time, power = np.asarray(time_s, dtype=float), np.asarray(power_w, dtype=float)
    known = np.flatnonzero(np.isfinite(time) & np.isfinite(power))
    order = known[np.lexsort((power[known], time[known]))]
    lowest_before = np.concatenate([[np.inf], np.minimum.accumulate(power[order])[:-1]])
    return np.asarray(order[power[order] < lowest_before]) if len(order) else order
