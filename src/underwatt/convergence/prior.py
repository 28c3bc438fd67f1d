"""What is known of samples to target by batch size before this training says anything: its shape, from other trainings.

Samples(b) = E · (1 + (b / B_noise)^q + (B_small / b)^p). The first two terms are the gradient-noise law (McCandlish et
al. 2018, where q = 1): at B_noise a target takes twice the samples that the smallest noise would need. Real trainings
also need more at very small batches, hence the third. A grid of the constants, each with a weight, is the knowledge;
other trainings say where B_noise and B_small lie and how far they vary, and what this training shows narrows it.

E, the scale, is not known before a training: such a curve is *relative*. It tells batch sizes apart and promises no
time. Batch sizes are compared by the mean of the log, which no scale changes, and which makes the expected log of the
time, and so the expected factor by which a choice falls behind the best, small.

All of it holds for a learning rate that follows the batch size by the usual rule of its optimizer: the square root for
Adam and its kin (six of the seven trainings below), linear for SGD.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from underwatt.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from underwatt.predict.base import Floats

# Chosen with benchmarks/convergence_curve.py: exponents, and how likely each is before anything is known.
NOISE_POWERS = {0.7: 0.2, 1.0: 0.5, 1.4: 0.2, 2.0: 0.1}
SMALL_POWERS = {1.0: 0.4, 2.0: 0.35, 3.0: 0.25}
# Batch sizes in powers of two.
LOWEST_NOISE, HIGHEST_NOISE = 0.0, 17.0
LOWEST_SMALL, HIGHEST_SMALL = -6.0, 8.0
_STEP = 0.25  # of the noise scale; what is measured while training is sharper than other trainings are
_SMALL_STEP = 1.0
# How far trainings vary around their common centre, in powers of two, and how sure that is (of its log).
_USUAL_VARIATION, _VARIATION_SPREAD = 1.5, 0.5
_VARIATIONS = np.geomspace(0.3, 6.0, 25)


@dataclass(frozen=True, slots=True)
class ShapePrior:
    """Where log2 B_noise and log2 B_small of the next training lie: centres and standard deviations."""

    noise: float
    noise_std: float
    small: float
    small_std: float


VAGUE = ShapePrior(8.0, 3.0, -1.0, 2.5)  # as if there were no other trainings


@dataclass(frozen=True, slots=True)
class Evidence:
    """What one training's runs alone say of log2 B_noise and log2 B_small: a centre and how sure it is, each."""

    workload: str
    noise: float
    noise_std: float
    small: float
    small_std: float


# Written by benchmarks/fit_prior.py.
# fmt: off
KNOWN: tuple[Evidence, ...] = (
    Evidence("resnet18", 7.31, 1.11, -2.95, 2.46),
    Evidence("mobilenetv2", 6.20, 1.46, 1.93, 3.83),
    Evidence("efficientvit", 10.52, 2.52, 2.49, 1.98),
    Evidence("char_transformer", 8.94, 0.82, -3.14, 2.20),
    Evidence("cifar100", 8.17, 0.74, 4.38, 1.47),
    Evidence("librispeech", 8.20, 0.22, -3.15, 1.95),
    Evidence("squad", 11.79, 2.63, -2.06, 2.67),
)
# fmt: on


def shape_prior(more: Sequence[Evidence] = (), *, without: str = "") -> ShapePrior:
    """What the next training is expected to be like, by the known ones and ``more`` of them, such as a store holds.

    ``without`` names one that is left out, so that it can be predicted from the others. One of ``more`` stands in the
    place of a known one of the same name.
    """
    named = {one.workload: one for one in (*KNOWN, *more) if one.workload != without}
    rows = list(named.values())
    noise = _next_of([(one.noise, one.noise_std) for one in rows], VAGUE.noise, VAGUE.noise_std)
    small = _next_of([(one.small, one.small_std) for one in rows], VAGUE.small, VAGUE.small_std)
    return ShapePrior(*noise, *small)


def _next_of(rows: list[tuple[float, float]], centre: float, centre_std: float) -> tuple[float, float]:
    """Mean and deviation of what the next of a kind is like: a random-effects model over how far they vary."""
    log_weights, means, variances = [], [], []
    for variation in _VARIATIONS:
        precision, total = centre_std**-2, centre / centre_std**2
        log_weight = -0.5 * (math.log(variation / _USUAL_VARIATION) / _VARIATION_SPREAD) ** 2
        for value, std in rows:  # one after the other: each is judged by what those before it let expect
            expected, spread = total / precision, std**2 + variation**2
            log_weight -= 0.5 * ((value - expected) ** 2 / (spread + 1 / precision) + math.log(spread + 1 / precision))
            precision, total = precision + 1 / spread, total + value / spread
        log_weights.append(log_weight)
        means.append(total / precision)
        variances.append(1 / precision + variation**2)
    weights = np.exp(np.array(log_weights) - max(log_weights))
    weights /= weights.sum()
    mean = float(weights @ means)
    return mean, math.sqrt(float(weights @ (np.array(variances) + (np.array(means) - mean) ** 2)))


def evidence_of(workload: str, constants: Floats, weights: Floats) -> Evidence:
    """What the runs behind a posterior say by themselves: the vague prior that it was made with is taken out again."""

    def alone(values: Floats, centre: float, std: float) -> tuple[float, float]:
        mean = float(weights @ values)
        precision = 1 / max(float(weights @ (values - mean) ** 2), 1e-4)
        own = max(precision - std**-2, 0.01)  # where the runs say nothing, ten powers of two either way
        return (precision * mean - centre / std**2) / own if precision > std**-2 else centre, own**-0.5

    noise = alone(constants[:, 0], VAGUE.noise, VAGUE.noise_std)
    return Evidence(workload, *noise, *alone(constants[:, 1], VAGUE.small, VAGUE.small_std))


def combinations(
    prior: ShapePrior, noise_step: float, small_step: float, more: Mapping[float, float] | None = None
) -> tuple[Floats, Floats]:
    """Every combination of constants, one a row (log2 B_noise, log2 B_small, q, p), and the log of its weight.

    ``more`` is one more column, with how likely each of its values is.
    """
    noise = np.arange(LOWEST_NOISE, HIGHEST_NOISE + 0.1, noise_step)
    small = np.arange(LOWEST_SMALL, HIGHEST_SMALL + 0.1, small_step)
    tables = [NOISE_POWERS, SMALL_POWERS, *([more] if more else [])]
    axes = [noise, small, *(np.array(list(table)) for table in tables)]
    priors = [
        -0.5 * ((noise - prior.noise) / prior.noise_std) ** 2,
        -0.5 * ((small - prior.small) / prior.small_std) ** 2,
        *(np.log(np.array(list(table.values()))) for table in tables),
    ]
    constants = np.stack([grid.ravel() for grid in np.meshgrid(*axes, indexing="ij")], axis=1)
    return constants, np.asarray(sum(grid.ravel() for grid in np.meshgrid(*priors, indexing="ij")))


def log_shape(constants: Floats, batch_sizes: Floats) -> Floats:
    """Log of the curve without its scale, one row a combination of constants."""
    log2 = np.log2(batch_sizes)[None, :]
    noise, small, q, p = (constants[:, i, None] for i in range(4))
    return np.asarray(np.log1p(np.exp2(q * (log2 - noise)) + np.exp2(p * (small - log2))))


@dataclass(frozen=True, slots=True, eq=False)
class RelativeCurve:
    """How batch sizes compare in samples to a target: ratios alone, no number of samples.

    Planning weighs batch sizes by it and promises no time from it. ``given`` narrows it by what training shows.
    """

    source: str  # whose shape it is, in words: "7 other trainings", or with what this one showed
    _constants: Floats
    _weights: Floats

    @classmethod
    def of(cls, prior: ShapePrior, source: str) -> RelativeCurve:
        """The curve that a prior lets expect."""
        constants, log_weights = combinations(prior, _STEP, _SMALL_STEP)
        return cls(source, constants, np.ones(len(constants)))._weighed(log_weights)

    def given(self, noise_scale_samples: float, spread_log2: float, source: str = "") -> RelativeCurve:
        """The curve after B_noise was seen to be about so many samples, give or take a factor of 2^``spread_log2``.

        For a noise scale that is measured while training: give it all at once, with how far it is from B_noise (not
        only how well it was measured), or piece by piece where the pieces tell independently. The curve itself is not
        changed, so that a scale that grows with training is given anew to the curve of the beginning.
        """
        if not (math.isfinite(noise_scale_samples) and noise_scale_samples > 0 and spread_log2 > 0):
            raise InputError(f"A noise scale of {noise_scale_samples!r} ± 2^{spread_log2!r} makes no sense.")
        off = (self._constants[:, 0] - math.log2(noise_scale_samples)) / spread_log2
        return replace(self, source=source or self.source)._weighed(-0.5 * off**2)

    def predict(self, batch_sizes: Sequence[int]) -> tuple[Floats, Floats]:
        """Mean and deviation of log samples, as a multiple of what the best of all batch sizes needs."""
        asked = np.asarray(batch_sizes, float)
        if asked.size == 0 or not np.all(asked >= 1):
            raise InputError(f"Batch sizes must be at least 1, not {list(batch_sizes)}.")
        shape = log_shape(self._constants, np.append(asked, 2.0 ** np.arange(0, HIGHEST_NOISE)))
        mean = self._weights @ shape
        best = int(np.argmin(mean))
        std = np.sqrt(self._weights @ (shape - shape[:, [best]] - (mean - mean[best])) ** 2)
        return np.asarray(mean[: len(asked)] - mean[best]), np.asarray(std[: len(asked)])

    def noise_samples(self, quantile: float = 0.5) -> float:
        """B_noise, at which samples have doubled: its median, or another quantile."""
        order = np.argsort(self._constants[:, 0], kind="stable")
        levels, weights = self._constants[order, 0], self._weights[order]
        values, first = np.unique(levels, return_index=True)
        below = np.cumsum(np.add.reduceat(weights, first))
        return float(2.0 ** np.interp(quantile, below - np.diff(below, prepend=0.0) / 2, values))

    def regret(self, sample_s: Mapping[int, float], chosen: int) -> tuple[float, float]:
        """What not knowing the curve costs: time at the chosen batch size over the best, less 1; mean and 90% bound.

        ``sample_s`` is the time of a sample at each batch size that may be chosen, within the budget.
        """
        sizes = [size for size, seconds in sample_s.items() if math.isfinite(seconds)]
        if chosen not in sizes:
            raise InputError(f"There is no time of a sample at batch size {chosen}.")
        log_time = np.log([sample_s[size] for size in sizes]) + log_shape(self._constants, np.array(sizes, float))
        behind = np.expm1(log_time[:, sizes.index(chosen)] - log_time.min(axis=1))
        order = np.argsort(behind, kind="stable")
        at = min(int(np.searchsorted(np.cumsum(self._weights[order]), 0.9)), len(order) - 1)
        return float(self._weights @ behind), float(behind[order[at]])

    def said(self) -> str:
        """What it says, in part of a sentence."""
        low, middle, high = (self.noise_samples(quantile) for quantile in (0.05, 0.5, 0.95))
        return f"what {self.source} needed: twice the samples at batch size {middle:,.0f} ({low:,.0f} to {high:,.0f})"

    def _weighed(self, log_likelihood: Floats) -> RelativeCurve:
        log_weights = np.log(np.maximum(self._weights, 1e-300)) + log_likelihood
        weights = np.exp(log_weights - log_weights.max())
        kept: NDArray[np.bool_] = weights > 1e-5
        return replace(self, _constants=self._constants[kept], _weights=weights[kept] / weights[kept].sum())


def usual_shape(more: Sequence[Evidence] = (), *, without: str = "") -> RelativeCurve:
    """The curve that other trainings let expect, those of ``more`` included; see ``shape_prior``."""
    count = len({one.workload for one in (*KNOWN, *more)} - {without})
    return RelativeCurve.of(shape_prior(more, without=without), f"{count} other trainings")
