"""A curve of samples-to-target against batch size, with uncertainty, from runs at a few batch sizes.

The curve is that of ``prior.py``, with its scale. The constants are not fitted to one value: a grid of them, weighted
beforehand by what other trainings let expect, is weighted by how well each explains the runs, so that few runs give
wide intervals. A smooth deviation from the curve lets the prediction follow what was measured where it was measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from scipy.special import log_ndtr, ndtri

from underwatt.convergence.prior import VAGUE, RelativeCurve, combinations, evidence_of, log_shape
from underwatt.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from underwatt.convergence.prior import Evidence, ShapePrior
    from underwatt.predict.base import Floats
    from underwatt.records import ConvergenceRun

# Chosen with benchmarks/convergence_curve.py.
_STEP = 0.75  # of log2 B_noise and log2 B_small
_DEVIATIONS = {0.05: 0.35, 0.12: 0.4, 0.25: 0.25}  # of log samples from the curve
_DEVIATION_LENGTH_LOG2 = 1.0
_SEED_SPREAD, _SEED_WEIGHT = 0.1, 2.0  # of log samples between seeds, and how many runs' worth we believe it
_LEAST_VARIANCE = 1e-6


class SamplesToTarget(Protocol):
    """Samples to the target by batch size, such as a ``ConvergenceCurve``; of a ``RelativeCurve``, ratios alone."""

    def predict(self, batch_sizes: Sequence[int]) -> tuple[Floats, Floats]:
        """Mean and standard deviation of the log of the samples; inf where the target is never reached."""
        ...


@dataclass(frozen=True, slots=True)
class Observed:
    """What the runs at one batch size say together."""

    batch_size: int
    log_samples: float  # of the expected samples, failed runs and their repetition included; inf where all failed
    log_samples_std: float
    runs: int
    reached: int


@dataclass(frozen=True, slots=True)
class ConvergenceCurve:
    """Samples to one target by batch size."""

    target: float
    observed: tuple[Observed, ...]
    batch_noise: float  # posterior median of B_noise: well below it, a larger batch costs hardly more samples
    _constants: Floats  # one row a combination: log2 B_noise, log2 B_small, q, p, deviation
    _weights: Floats

    def predict(self, batch_sizes: Sequence[int]) -> tuple[Floats, Floats]:
        """Mean and standard deviation of log samples-to-target; the mean is inf where it is never reached."""
        asked = np.asarray(batch_sizes, float)
        if asked.size == 0 or not np.all(asked >= 1):
            raise InputError(f"Batch sizes must be at least 1, not {list(batch_sizes)}.")
        at, values, variances = _points(self.observed)
        means, stds = np.empty((len(self._weights), len(asked))), np.empty((len(self._weights), len(asked)))
        for rows, deviation, solved in _by_deviation(self._constants, at, values, variances):
            to_asked = deviation**2 * _correlation(asked, at)
            gain = to_asked @ solved.inverse
            means[rows] = log_shape(self._constants[rows], asked) + solved.scale[:, None] + solved.residuals @ gain.T
            left = deviation**2 - np.einsum("ij,ij->i", gain, to_asked)
            unsure = (1.0 - gain.sum(1)) ** 2 * solved.scale_variance  # the level itself is estimated from the runs
            stds[rows] = np.sqrt(np.maximum(left + unsure, _LEAST_VARIANCE))
        mean = self._weights @ means
        variance = self._weights @ (stds**2 + (means - mean) ** 2)
        hopeless = _hopeless(self.observed, asked)
        return np.where(hopeless, np.inf, mean), np.sqrt(variance)

    def interval(self, batch_sizes: Sequence[int], quantile: float = 0.9) -> tuple[Floats, Floats]:
        """Lower and upper number of samples that hold the truth with a probability."""
        mean, std = self.predict(batch_sizes)
        reach = float(ndtri(0.5 + quantile / 2)) * std
        return np.exp(mean - reach), np.exp(mean + reach)

    def evidence(self, workload: str) -> Evidence:
        """What its runs say of other trainings; of a curve that was fitted with the vague prior."""
        return evidence_of(workload, self._constants, self._weights)

    def relative(self) -> RelativeCurve:
        """How its batch sizes compare, for another target: the ratios hold there about, the number of samples not."""
        return RelativeCurve(f"trainings to {self.target:g}", self._constants[:, :4], self._weights)


def fit_convergence(
    runs: Sequence[ConvergenceRun],
    target: float | None = None,
    *,
    resolution_samples: float = 0.0,
    prior: ShapePrior = VAGUE,
) -> ConvergenceCurve:
    """The curve through the runs of one target (the only one, or the one named).

    ``resolution_samples`` is the distance between evaluations where runs were not interpolated between them.
    ``prior`` is what other trainings let expect, which few runs refine and many overrule.
    """
    chosen = _of_target(runs, target)
    observed = _observe(chosen, resolution_samples)
    if not any(o.reached for o in observed):
        raise InputError(
            f"No run reached the target {chosen[0].target:g}, so nothing can be said about batch sizes.",
            hint="Choose an easier target, or let runs take more samples.",
        )
    constants, log_prior = combinations(prior, _STEP, _STEP, _DEVIATIONS)
    at, values, variances = _points(observed)
    log_likelihood = np.empty(len(constants))
    failed_at = np.array([o.batch_size for o in observed if not o.reached], float)
    most = math.log(max(run.samples for run in chosen if run.reached))
    for rows, deviation, solved in _by_deviation(constants, at, values, variances):
        log_likelihood[rows] = solved.log_likelihood()
        if len(failed_at):
            # A run that was given up needs more than the longest that was not.
            over = log_shape(constants[rows], failed_at) + solved.scale[:, None] - most
            log_likelihood[rows] += log_ndtr(over / math.hypot(deviation, _SEED_SPREAD)).sum(1)
    log_weights = log_prior + log_likelihood
    weights = np.exp(log_weights - log_weights.max())
    weights /= weights.sum()
    kept = weights > 1e-6 * weights.max()  # most combinations explain nothing: predictions need not carry them
    constants, weights = constants[kept], weights[kept] / weights[kept].sum()
    order = np.argsort(constants[:, 0], kind="stable")
    middle = int(np.searchsorted(np.cumsum(weights[order]), 0.5))
    median_log2 = constants[order[min(middle, len(order) - 1)], 0]
    return ConvergenceCurve(chosen[0].target, observed, float(2.0**median_log2), constants, weights)


def targets_of(runs: Sequence[ConvergenceRun]) -> tuple[float, ...]:
    """The targets that runs were made for, ascending."""
    return tuple(sorted({run.target for run in runs}))


def _of_target(runs: Sequence[ConvergenceRun], target: float | None) -> list[ConvergenceRun]:
    targets = targets_of(runs)
    if not targets:
        raise InputError("There are no convergence runs.", hint="`underwatt converge JOB` makes them.")
    if target is None and len(targets) > 1:
        raise InputError(
            f"The runs are for several targets ({', '.join(f'{t:g}' for t in targets)}).", hint="Name one of them."
        )
    wanted = targets[0] if target is None else target
    chosen = [run for run in runs if run.target == wanted]
    if not chosen:
        raise InputError(
            f"No run was made for the target {wanted:g}.", hint=f"There are: {', '.join(f'{t:g}' for t in targets)}."
        )
    bad = next((r for r in chosen if r.batch_size < 1 or (r.reached and r.samples <= 0)), None)
    if bad is not None:
        raise InputError(f"A run at batch size {bad.batch_size} with {bad.samples:g} samples makes no sense.")
    return chosen


def _observe(runs: list[ConvergenceRun], resolution_samples: float) -> tuple[Observed, ...]:
    by_size = {size: [r for r in runs if r.batch_size == size] for size in sorted({r.batch_size for r in runs})}
    reached = {size: np.array([r.samples for r in some if r.reached]) for size, some in by_size.items()}
    longest = max((float(samples.max()) for samples in reached.values() if len(samples)), default=math.nan)
    squares = sum(float(((np.log(s) - np.log(s).mean()) ** 2).sum()) for s in reached.values() if len(s))
    freedom = sum(len(s) - 1 for s in reached.values() if len(s))
    seed_variance = (_SEED_WEIGHT * _SEED_SPREAD**2 + squares) / (_SEED_WEIGHT + freedom)
    observed = []
    for size, some in by_size.items():
        good = reached[size]
        if not len(good):
            observed.append(Observed(size, math.inf, math.inf, len(some), 0))
            continue
        share = len(good) / len(some)
        # A failed run is given up, at the cost of the longest that succeeded, and started again with another seed.
        expected = float(good.mean()) + (1 - share) / share * longest
        rounding = (resolution_samples / expected) ** 2 / 12
        std = math.sqrt(seed_variance / len(good) + rounding + (1 - share) / (share * len(some)))
        observed.append(Observed(size, math.log(expected), std, len(some), len(good)))
    return tuple(observed)


def _points(observed: tuple[Observed, ...]) -> tuple[Floats, Floats, Floats]:
    """Batch sizes at which some run got there, the log of their samples, and its variance."""
    rows = [(o.batch_size, o.log_samples, o.log_samples_std**2) for o in observed if o.reached]
    at, values, variances = np.array(rows, float).T.copy()
    return at, values, variances


def _hopeless(observed: tuple[Observed, ...], asked: Floats) -> NDArray[np.bool_]:
    """Batch sizes at which every run failed, and those beyond them: the curve only rises towards its ends."""
    reached = [o.batch_size for o in observed if o.reached]
    failed = [o.batch_size for o in observed if not o.reached]
    above = min((size for size in failed if size > max(reached)), default=math.inf)
    below = max((size for size in failed if size < min(reached)), default=-math.inf)
    return (asked >= above) | (asked <= below) | np.isin(asked, failed)


def _correlation(one: Floats, other: Floats) -> Floats:
    """How alike deviations at two batch sizes are (Matérn 3/2 in powers of two)."""
    distance = math.sqrt(3) * np.abs(np.log2(one)[:, None] - np.log2(other)[None, :]) / _DEVIATION_LENGTH_LOG2
    return np.asarray((1 + distance) * np.exp(-distance))


@dataclass(frozen=True, slots=True)
class _Solved:
    """The linear algebra of one size of deviation: the scale E has a flat prior and is solved for."""

    inverse: Floats
    log_determinant: float
    scale_variance: float
    scale: Floats  # the best log scale of each combination of constants
    residuals: Floats  # and what it leaves

    def log_likelihood(self) -> Floats:
        """How well each combination explains the runs, the scale integrated out."""
        squares = np.einsum("ij,jk,ik->i", self.residuals, self.inverse, self.residuals)
        return np.asarray(-0.5 * (squares + self.log_determinant - math.log(self.scale_variance)))


def _by_deviation(
    constants: Floats, at: Floats, values: Floats, variances: Floats
) -> Iterator[tuple[NDArray[np.bool_], float, _Solved]]:
    """The combinations of each size of deviation, solved for what was observed."""
    for deviation in np.unique(constants[:, 4]):
        rows = constants[:, 4] == deviation
        covariance = deviation**2 * _correlation(at, at) + np.diag(variances + _LEAST_VARIANCE)
        inverse = np.asarray(np.linalg.inv(covariance), np.float64)
        scale_variance = float(1 / inverse.sum())
        differences = values - log_shape(constants[rows], at)
        scale = differences @ inverse.sum(0) * scale_variance
        log_determinant = float(np.linalg.slogdet(covariance)[1])
        yield rows, deviation, _Solved(inverse, log_determinant, scale_variance, scale, differences - scale[:, None])


class SampleTable:
    """Samples to the target as they were given, batch size by batch size."""

    def __init__(self, samples: Mapping[int, float]) -> None:
        for size, count in samples.items():
            if not (math.isfinite(count) and count > 0):
                raise InputError(f"{count!r} samples to the target at batch size {size} make no sense.")
        self._samples = dict(samples)

    def predict(self, batch_sizes: Sequence[int]) -> tuple[Floats, Floats]:
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
    return given if hasattr(given, "predict") else fit_convergence(list(given))
