"""Honest intervals: widened or narrowed by how far readings lay off when predicted from the others.

A model's own standard deviations hold as far as its noise is normal and alike everywhere. Real noise is neither: it
is small where the GPU sets the pace and large where loading does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

# The interval that is to hold: this share of readings within so many standard deviations.
SHARE, HALF_WIDTH = 0.9, 1.645
# The model's own word counts as much as so many readings, so that ten readings move it little.
OWN_WORD = 20.0
FACTORS = np.linspace(0.3, 4.0, 371)


def width_factor(errors: NDArray[np.float64], variance: NDArray[np.float64]) -> float:
    """By how much to multiply standard deviations, given errors of left-out readings and their stated variances."""
    from scipy.special import erf

    off = np.abs(errors) / np.sqrt(variance) / HALF_WIDTH
    held = (off[None] <= FACTORS[:, None]).sum(axis=1)
    as_stated = erf(FACTORS * HALF_WIDTH / np.sqrt(2))
    # One more reading than there are: the next one, which may lie further off than all of them.
    share = (held + OWN_WORD * as_stated) / (len(off) + 1 + OWN_WORD)
    enough = share >= SHARE
    return float(FACTORS[np.argmax(enough)] if enough.any() else FACTORS[-1])
