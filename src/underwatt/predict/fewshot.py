"""The default predictor: ten measurements, physics, and whatever earlier profiles can lend.

Several experts look at the same measurements: one that knows no reference, and for each reference one that keeps
close to it and one that keeps further off. Each is weighed by how well it predicts every measured setting from the
others, so that a reference that does not fit is ignored.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from scipy.special import erf

from underwatt.predict.base import Z90, check_same_knobs, observe
from underwatt.predict.expert import Expert, ReferenceModel, lent_quirks
from underwatt.predict.roofline import Centre
from underwatt.records import Prediction

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from underwatt.predict.base import Floats, SettingArray
    from underwatt.records import Measurement, Profile

# Chosen with benchmarks/predict.py, all but CHUNK and those with an underscore.
# How close an expert keeps to its reference, relative to how much workloads usually differ.
CLOSENESS = (0.4, 1.2)
# Scores count as if there were at most so many measurements: with more, weighing should still not be all or nothing.
MOST_COUNTED = 10
# Rows that are fitted: more change no plan, and each takes its time at every setting (benchmarks/large_store.py).
MOST_FITTED = 200
# An expert that matters less than this is not asked.
LEAST_WEIGHT = 0.01
# How much less is known, in log units of time and of power, for each doubling of the batch size beyond those measured:
# the linearised physics would be too sure there. Twice as much where one batch size says nothing about the slope.
BEYOND_SEVERAL = (0.15, 0.05)
BEYOND_ONE = (0.3, 0.1)
# Intervals are to hold this share of readings. The model's own word counts as much as so many readings, so that ten
# readings move it little.
SHARE = 0.9
OWN_WORD = 20.0
# Predicted so many settings at a time, chosen with benchmarks/speed.py: larger arrays go back to the system each time.
CHUNK = 1280
_FACTORS = np.linspace(0.3, 4.0, 371)
# Larger than any difference of log times, so that runs of one knob do not mix when scanned together.
_APART = 100.0
_MOST_PASSES = 10


class FewShot:
    """Physics, references as prior, and a Gaussian process; deterministic for a seed."""

    name = "underwatt"

    def __init__(self, *, seed: int = 0) -> None:
        self._seed = seed

    def fit(self, measurements: Sequence[Measurement], references: Sequence[Profile] = ()) -> FittedFewShot:
        """Learn from at least three measured settings and any number of references."""
        return self.prepare(observe(measurements).settings, references)(measurements)

    def prepare(
        self, candidates: SettingArray, references: Sequence[Profile] = ()
    ) -> Callable[[Sequence[Measurement]], FittedFewShot]:
        """Understand the references once, around these settings: fitting again and again is quick from there."""
        centre = Centre.of(candidates)
        models = [ReferenceModel.fit(profile, centre, candidates.knobs, self._seed) for profile in references]
        return partial(FittedFewShot.of, candidates.knobs, centre, models)


@dataclass(frozen=True, slots=True, eq=False)
class FittedFewShot:
    """Fitted experts, their weights and the factors of their intervals, for time (row 0) and power (row 1)."""

    knobs: tuple[str, ...]
    centre: Centre
    experts: tuple[Expert, ...]
    weights: Floats
    widths: Floats
    batch_sizes: tuple[float, float]  # the smallest and the largest that were measured

    @classmethod
    def of(
        cls,
        knobs: tuple[str, ...],
        centre: Centre,
        references: Sequence[ReferenceModel],
        measurements: Sequence[Measurement],
    ) -> FittedFewShot:
        """Ask every expert about the measurements, and keep those that matter."""
        seen = observe(measurements).merged()
        if len(seen) > MOST_FITTED:
            seen = seen.take(np.sort(np.random.default_rng(0).permutation(len(seen))[:MOST_FITTED]))
        check_same_knobs(seen.settings, knobs)
        experts = [Expert.fit(seen, centre)]
        for reference in references:
            experts += [Expert.fit(seen, centre, reference, closeness) for closeness in CLOSENESS]
        scores = min(len(seen), MOST_COUNTED) * np.array([expert.score for expert in experts]).T
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        kept = weights.max(axis=0) >= LEAST_WEIGHT
        weights = weights[:, kept] / weights[:, kept].sum(axis=1, keepdims=True)
        experts = [expert for expert, keep in zip(experts, kept, strict=True) if keep]
        sizes = seen.settings.batch_size
        widths = _widths(experts, weights)
        return cls(knobs, centre, tuple(experts), weights, widths, (float(sizes.min()), float(sizes.max())))

    def predict(self, settings: SettingArray) -> Prediction:
        """Log time and log power of each setting; among these settings, a higher clock is never slower."""
        check_same_knobs(settings, self.knobs)
        mean, square = np.zeros((2, len(settings))), np.zeros((2, len(settings)))
        # The last chunk takes the rest along: a few rows alone would be rounded another way by the matrix products.
        starts = range(0, len(settings), CHUNK)[: max(1, len(settings) // CHUNK)]
        for part in map(slice, starts, (*starts[1:], len(settings))):
            x = self.centre.inputs(settings.take(part))
            references = {id(expert.reference): expert.reference for expert in self.experts}
            lent = {key: lent_quirks(reference, x) for key, reference in references.items()}
            for expert, weight in zip(self.experts, self.weights.T, strict=True):
                expert_mean, expert_variance = expert.predict(x, lent[id(expert.reference)])
                mean[:, part] += weight[:, None] * expert_mean
                square[:, part] += weight[:, None] * (expert_variance + expert_mean**2)
        std = self.widths[:, None] * np.sqrt(np.maximum(square - mean**2, 1e-8))
        low, high = self.batch_sizes
        octaves = np.maximum(0.0, np.maximum(np.log2(settings.batch_size / high), np.log2(low / settings.batch_size)))
        std = np.hypot(std, np.outer(BEYOND_ONE if low == high else BEYOND_SEVERAL, octaves))
        return Prediction(never_slower(mean[0], settings), std[0], mean[1], std[1])


def _widths(experts: Sequence[Expert], weights: Floats) -> Floats:
    errors = np.stack([expert.left_out for expert in experts], axis=1)
    variances = np.stack([expert.left_out_variance for expert in experts], axis=1)
    shares = weights[:, :, None]
    error = (shares * errors).sum(axis=1)
    variance = (shares * (variances + errors**2)).sum(axis=1) - error**2
    return np.array([width_factor(*quantity) for quantity in zip(error, variance, strict=True)])


def width_factor(errors: Floats, variance: Floats) -> float:
    """By how much to multiply standard deviations, given errors of left-out readings and their stated variances.

    A model's own standard deviations hold as far as its noise is normal and alike everywhere. Real noise is neither:
    it is small where the GPU sets the pace and large where loading does.
    """
    off = np.abs(errors) / np.sqrt(variance) / Z90
    held = (off[None] <= _FACTORS[:, None]).sum(axis=1)
    as_stated = erf(_FACTORS * Z90 / np.sqrt(2))
    # One more reading than there are: the next one, which may lie further off than all of them.
    share = (held + OWN_WORD * as_stated) / (len(off) + 1 + OWN_WORD)
    enough = share >= SHARE
    return float(_FACTORS[np.argmax(enough)] if enough.any() else _FACTORS[-1])


def never_slower(log_step_s: Floats, settings: SettingArray) -> Floats:
    """The nearest times that do not rise where one knob is raised and the rest stays.

    Midway between the two extreme corrections (lower every later time, raise every earlier one), so that it favours
    neither. Holds among the settings asked about together.
    """
    runs = _runs(settings)
    return np.asarray((_scan(log_step_s, runs, lower=True) + _scan(log_step_s, runs, lower=False)) / 2)


def _runs(settings: SettingArray) -> list[tuple[NDArray[np.intp], Floats]]:
    """For each knob: the rows sorted so that settings equal in all else lie together, ascending; and their run."""
    ranks = []
    for column in (*settings.values.T, settings.batch_size):
        values = np.unique(column)
        # Small integers, as there are few values of each: these are sorted many times faster than numbers.
        ranks.append(np.searchsorted(values, column).astype(np.min_scalar_type(len(values))))
    runs: list[tuple[NDArray[np.intp], Floats]] = []
    for at, rank in enumerate(ranks[:-1]):
        if np.any(rank):
            others = ranks[:at] + ranks[at + 1 :]
            order = np.lexsort((rank, *others[::-1]))
            begins = np.any([np.diff(other[order]) for other in others], axis=0)
            runs.append((order, _APART * np.concatenate([[0.0], np.cumsum(begins)])))
    return runs


def _scan(log_step_s: Floats, runs: list[tuple[NDArray[np.intp], Floats]], *, lower: bool) -> Floats:
    out: Floats = np.array(log_step_s)
    for _ in range(_MOST_PASSES):
        before = out.copy()
        for order, run in runs:
            if lower:
                out[order] = np.minimum.accumulate(out[order] - run) + run
            else:
                out[order] = np.maximum.accumulate((out[order] - run)[::-1])[::-1] + run
        if np.allclose(out, before, rtol=0, atol=1e-9):
            break
    return out
