"""Samples to a target by batch size, from whatever a user has: a curve, or a table."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from underwatt.converge.curve import fit_convergence
from underwatt.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from underwatt.plan.problem import SamplesToTarget
    from underwatt.records import ConvergenceRun


class SampleTable:
    """Samples to the target as they were given, batch size by batch size."""

    def __init__(self, samples: Mapping[int, float]) -> None:
        for size, count in samples.items():
            if not (math.isfinite(count) and count > 0):
                raise InputError(f"{count!r} samples to the target at batch size {size} make no sense.")
        self._samples = dict(samples)

    def predict(self, batch_sizes: Sequence[int]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Log samples, without doubt; inf at batch sizes that were not given."""
        counts = [self._samples.get(int(size), math.inf) for size in batch_sizes]
        return np.log(counts), np.zeros(len(counts))


def samples_to_target(
    given: SamplesToTarget | Mapping[int, float] | Sequence[ConvergenceRun] | None,
) -> SamplesToTarget | None:
    """A table or convergence runs as what a planner asks."""
    if given is None:
        return None
    if isinstance(given, Mapping):
        return SampleTable(given)
    if hasattr(given, "predict"):
        return given
    return fit_convergence(list(given))
