"""Long traces made short without hiding anything: of each stretch the extremes stay, and its worst excess."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

MOST_POINTS = 4000
MOST_STRETCHES = 240


@dataclass(frozen=True, slots=True, eq=False)
class Stretches:
    """Lowest, mean and highest reading of stretches of a trace, at the middle of each."""

    at_s: Floats
    low_w: Floats
    mean_w: Floats
    high_w: Floats


def thin(power_w: Floats, bound_w: Floats, most: int = MOST_POINTS) -> NDArray[np.intp]:
    """Rows to show, ascending, at most ``most`` of them.

    Of each stretch the lowest and the highest reading are kept and the one that is furthest above its bound, which
    need not be the highest where the bound changes: a stretch with an excess shows an excess. ``power_w`` is finite.
    """
    count = len(power_w)
    if count <= most:
        return np.arange(count)
    edges = np.linspace(0, count, max(1, (most - 2) // 3) + 1).astype(np.intp)
    excess = power_w - bound_w
    kept = [0, count - 1]
    for start, end in pairwise(edges.tolist()):
        stretch = power_w[start:end]
        kept += [start + int(stretch.argmin()), start + int(stretch.argmax()), start + int(excess[start:end].argmax())]
    return np.unique(np.asarray(kept, dtype=np.intp))


def stretches(at_s: Floats, power_w: Floats, most: int = MOST_STRETCHES) -> Stretches:
    """The trace as at most ``most`` stretches of equally many readings."""
    edges = np.unique(np.linspace(0, len(power_w), min(most, len(power_w)) + 1).astype(np.intp))
    starts = edges[:-1]
    if not len(starts):
        empty = np.empty(0)
        return Stretches(empty, empty, empty, empty)
    counts = np.diff(edges)
    return Stretches(
        at_s=(at_s[starts] + at_s[edges[1:] - 1]) / 2,
        low_w=np.minimum.reduceat(power_w, starts),
        mean_w=np.add.reduceat(power_w, starts) / counts,
        high_w=np.maximum.reduceat(power_w, starts),
    )
