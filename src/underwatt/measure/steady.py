"""How long power readings still tell of what was before a change, and how well a mean is known meanwhile.

Everything that is assumed about the lag of a power sensor stands here; meter, measurement, controller and the judge of
a run take it from here. (The simulated boards have a sensor of their own, which is no assumption but the thing itself.)

Power: it settles over seconds after a change, because the sensor averages, so waiting it out would be most of the cost
of a short measurement. Instead the approach is fitted: P + A·exp(−t/τ) for a row of τ, and none, each weighed by how
well it explains the readings; the doubt about τ becomes part of the interval. τ belongs to the device's sensor, so what
one measurement teaches about it the next one knows (``Settling``).

Step times: the first are slow. How many to drop is chosen by the marginal standard error rule (White 1997): the cut
after which the mean is known best.

Both: neighbours are correlated, so an interval counts independent readings, not readings. Pure functions over arrays.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

SETTLING_TIMES_S = np.geomspace(0.1, 3.0, 24)  # from a quick shunt to the one-second average of a data-centre GPU
SETTLED = 0.005  # a reading counts as settled when the approach is this share of the mean or less
# Where the approach cannot be fitted (between pauses, after something else ran, when idle), it is waited out.
SETTLING_WAIT_S = 1.0
# The controller judges no reading so soon after a change to a setting of which it does not know what it draws.
UNJUDGED_AFTER_CHANGE_S = 1.5
# Sensors average, a Jetson's over about 2 s: so long after a change a run's readings may still show what was before.
SENSOR_LAG_S = 2.5
# A leap within a steady signal: as a share, in standard deviations of either side, of which there is so much, and
# which is never taken for smaller than this share.
JUMP, JUMP_STDS, JUMP_SIDE_S, JUMP_NOISE = 0.08, 6.0, 0.8, 0.008
LONGEST_WARM_UP = 5
CLEAR_GAIN = 0.5  # readings are dropped where that halves the variance of the mean, or better
_FEWEST = 6
_MOST_CERTAIN = 6.0  # log odds: a settling time is never ruled out for good
_FEWEST_BLOCKS = 4
_LONGEST_MEMORY = 200  # readings; correlations further apart are not looked for


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean and the half width of its 95% interval; values from ``first`` on count, ``count`` of them."""

    mean: float
    ci95: float
    first: int
    count: int


class Settling:
    """How quickly a device's power reading settles, as far as it is known; every measurement adds to it."""

    def __init__(self) -> None:
        self.log_prior = np.full(len(SETTLING_TIMES_S), -math.log(len(SETTLING_TIMES_S)))

    @property
    def typical_s(self) -> float:
        """The time constant with which readings follow a change, as far as it is known."""
        return float(np.exp(self.log_prior) @ SETTLING_TIMES_S)

    def seconds(self, step_w: float, power_w: float) -> float:
        """How long after a change of power readings still differ from it noticeably."""
        return self.typical_s * max(1.0, math.log(max(abs(step_w), 1e-9) / (2 * SETTLED * power_w)))

    def learn(self, log_likelihood: NDArray[np.float64]) -> None:
        """Take in how well each settling time explained one more measurement."""
        log_posterior = self.log_prior + log_likelihood
        log_posterior = np.maximum(log_posterior - log_posterior.max(), -_MOST_CERTAIN)
        self.log_prior = log_posterior - math.log(float(np.sum(np.exp(log_posterior))))


def jump(at_s: NDArray[np.float64], values: NDArray[np.float64]) -> tuple[float, float] | None:
    """The levels before and after a leap within a steady signal, such as another process that came; ``None`` if none.

    A sensor that averages takes a while from one level to the other: so much is left out between them.
    """
    if len(values) < 2 * _FEWEST or at_s[-1] - at_s[0] < SETTLING_WAIT_S + 2 * JUMP_SIDE_S:
        return None
    begin_s, end_s = at_s[0] + JUMP_SIDE_S, at_s[-1] - JUMP_SIDE_S - SETTLING_WAIT_S
    best: tuple[float, float, float] | None = None
    for first in np.flatnonzero((at_s >= begin_s) & (at_s <= end_s)).tolist():
        last = int(np.searchsorted(at_s, at_s[first] + SETTLING_WAIT_S))
        before, after = values[: first + 1], values[last:]
        if len(before) < _FEWEST or len(after) < _FEWEST:
            continue
        leap = abs(float(after.mean() - before.mean()))
        noise = max(float(before.std()), float(after.std()), JUMP_NOISE * abs(float(before.mean())))
        if best is None or leap / noise > best[0]:
            best = (leap / noise, float(before.mean()), float(after.mean()))
    if best is None or best[0] < JUMP_STDS or abs(best[2] / best[1] - 1) < JUMP:
        return None
    return best[1], best[2]


def warm_from(values: NDArray[np.float64]) -> int:
    """The index from which on the mean is known best; only the first few values, and at most half, are dropped.

    A slow step later on is no warm-up: it comes again, and belongs to the mean.
    """
    count = len(values)
    if count < 4:
        return 0
    # Sums of the tails, from the end: the mean and scatter after every cut in one pass.
    remaining = np.arange(1, count + 1, dtype=float)
    centred = values[::-1] - values[-1]  # keeps the sums of squares small
    total = np.cumsum(centred)
    scatter = np.cumsum(centred**2) - total**2 / remaining
    error = (np.maximum(scatter, 0.0) / remaining**2)[::-1]
    best = int(np.argmin(error[: min(count // 2, LONGEST_WARM_UP) + 1]))
    # Chance alone makes some cut look best; believing it each time would make the interval too narrow.
    return best if error[best] < CLEAR_GAIN * error[0] else 0


def mean_after_warmup(values: NDArray[np.float64]) -> Estimate:
    """Mean without the slow first values and its 95% interval; infinite where too little is known."""
    first = warm_from(values)
    kept = values[first:]
    count = len(kept)
    mean = float(np.mean(kept)) if count else math.nan
    if count < 3:
        return Estimate(mean, math.inf, first, count)
    variance = float(np.var(kept, ddof=1))
    independent = max(2.0, count * independent_share(kept - mean))
    return Estimate(mean, _t95(independent - 1) * math.sqrt(variance / independent), first, count)


def mean_while_settling(
    at_s: NDArray[np.float64],
    values: NDArray[np.float64],
    settling: Settling,
    block_s: float = 0.0,
) -> tuple[Estimate, NDArray[np.float64]]:
    """The value that a signal settles to and its 95% interval, from readings that may still be on their way.

    ``block_s`` is the length of one training step: what differs from step to step cannot be seen in the scatter within
    one, so for long steps the interval also has to cover the scatter of their means. Also returned: how well each
    settling time explains the readings, for ``Settling.learn`` once the measurement is complete.
    """
    count = len(values)
    if count < _FEWEST:
        few = Estimate(float(np.mean(values)) if count else math.nan, math.inf, 0, count)
        return few, np.zeros_like(SETTLING_TIMES_S)
    elapsed_s = at_s - at_s[0]
    approach = np.exp(-elapsed_s[None, :] / SETTLING_TIMES_S[:, None])
    centre = approach.mean(axis=1)
    centred = approach - centre[:, None]
    spread = np.sum(centred**2, axis=1)
    plain = values - values.mean()
    amplitude = centred @ plain / spread

    # One row for each settling time, and a last one for a signal that was settled from the start.
    level = np.append(values.mean() - amplitude * centre, values.mean())
    residual = np.vstack([plain - amplitude[:, None] * centred, plain])
    unexplained = np.maximum(np.sum(residual**2, axis=1), 1e-12 * count * values.mean() ** 2)
    leverage = np.append(1 / count + centre**2 / spread, 1 / count)

    best = int(np.argmin(unexplained))
    share = independent_share(residual[best])
    independent = max(3.0, count * share)
    # Bayesian information criterion: an approach costs one constant more than none.
    log_prior = np.append(settling.log_prior - 0.5 * math.log(independent), 0.0)
    log_likelihood = -0.5 * independent * np.log(unexplained / unexplained[best])
    log_weight = log_likelihood + log_prior
    is_telling = best < len(SETTLING_TIMES_S) - 1  # what takes longer still is warmth, and tells nothing of the sensor
    weight = np.exp(log_weight - log_weight.max())
    weight /= weight.sum()
    mean = float(weight @ level)
    noise = unexplained / (count - 3)
    variance = float(weight @ (noise * leverage / share + (level - mean) ** 2))
    ci95 = _t95(max(2.0, independent - 3)) * math.sqrt(variance)

    likeliest = int(np.argmax(log_weight))
    first = 0
    if likeliest < len(SETTLING_TIMES_S):
        first = int(np.sum(np.abs(amplitude[likeliest]) * approach[likeliest] > SETTLED * abs(mean)))
        first = min(first, count - 2)
    ci95 = max(ci95, _ci95_of_blocks(elapsed_s, residual[likeliest], block_s))
    return Estimate(mean, ci95, first, count - first), is_telling * log_likelihood[:-1]


def _ci95_of_blocks(elapsed_s: NDArray[np.float64], residual: NDArray[np.float64], block_s: float) -> float:
    """Half width of the mean's interval from the scatter of the means of whole blocks; 0 where blocks are short."""
    if block_s <= 0 or block_s < 4 * float(np.median(np.diff(elapsed_s))):
        return 0.0
    block = (elapsed_s // block_s).astype(int)
    sizes = np.bincount(block)
    means = np.bincount(block, residual)[sizes > 1] / sizes[sizes > 1]
    if len(means) < _FEWEST_BLOCKS:
        return math.inf
    return _t95(len(means) - 1) * float(np.std(means, ddof=1)) / math.sqrt(len(means))


def independent_share(scatter: NDArray[np.float64]) -> float:
    """Independent readings per reading: correlations are summed up to the first that is not positive (Geyer 1992)."""
    count = len(scatter)
    power = float(scatter @ scatter)
    if power == 0:
        return 1.0
    total = 0.0
    for lag in range(1, min(count // 2, _LONGEST_MEMORY)):
        # A short series understates each correlation by about one over its length.
        correlation = float(scatter[lag:] @ scatter[:-lag]) / power + 1.0 / count
        if correlation <= 0:
            break
        total += correlation
    return 1.0 / (1.0 + 2.0 * total)


def _t95(degrees: float) -> float:
    from scipy.special import stdtrit  # here: whoever asks for a lag only need not load SciPy

    return float(stdtrit(max(1.0, degrees), 0.975))
