"""What the physics misses: a Gaussian process over the logs of the knobs, and how large it and the noise are."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from underwatt.predict.roofline import Inputs

# How far (in log units) the misfit of the physics reaches along cores, CPU, GPU and memory clock, batch size, limit.
REACH = np.array([0.8, 0.8, 1.0, 1.0, 1.2, 1.0])
# Degrees of freedom of the noise: readings that are far off count less.
TAIL = 4.0
# The sizes tried, and how sure the typical ones are (standard deviations of their logs).
AMPLITUDES = (0.01, 0.02, 0.04, 0.08, 0.16)
STRETCHES = (0.5, 1.0, 2.0)
NOISES = (0.01, 0.02, 0.035, 0.06, 0.1, 0.16)
AMPLITUDE_STD, STRETCH_STD, NOISE_STD = 0.7, 0.5, 0.35
# Sizes are chosen on at most so many rows: more change nothing but the time it takes.
MOST_ROWS_FOR_SIZES = 150
# Larger than any squared whitened residual, so that the bordered matrix stays positive definite.
_CORNER = 1e12


@dataclass(frozen=True, slots=True)
class Spread:
    """Standard deviations of the misfit and of the noise, and how far the misfit reaches, as a factor."""

    amplitude: float
    noise: float
    stretch: float = 1.0


TYPICAL_TIME = Spread(amplitude=0.08, noise=0.03)
TYPICAL_POWER = Spread(amplitude=0.05, noise=0.02)


def features(x: Inputs) -> NDArray[np.float64]:
    """Settings as points, scaled so that the misfit reaches about one unit."""
    return np.asarray(np.column_stack([x.cores, x.cpu, x.gpu, x.mem, x.batch, x.limit]) / REACH)


def kernel(left: NDArray[Any], right: NDArray[Any], stretch: float) -> NDArray[Any]:
    """Matérn 5/2 correlation between points; keeps the precision of its inputs."""
    squares = (left**2).sum(axis=1)[:, None] + (right**2).sum(axis=1)[None] - 2 * left @ right.T
    distance = np.sqrt(np.maximum(squares, 0) * left.dtype.type(5.0 / stretch**2))
    return np.asarray((1 + distance * (1 + distance / 3)) * np.exp(-distance))


def choose_spread(
    points: NDArray[np.float64],
    explained: NDArray[np.float64],
    residual: NDArray[np.float64],
    trust: NDArray[np.float64],
    typical: Spread,
) -> Spread:
    """The most probable sizes of misfit and noise, given what the constants can explain and the typical sizes."""
    if len(residual) > MOST_ROWS_FOR_SIZES:
        some = np.linspace(0, len(residual) - 1, MOST_ROWS_FOR_SIZES).astype(int)
        points, residual, trust = points[some], residual[some], trust[some]
        explained = explained[np.ix_(some, some)]
    sizes = np.array(list(product(AMPLITUDES, NOISES)))
    amplitudes, noises = sizes.T
    believed = -0.5 * (np.log(amplitudes / typical.amplitude) / AMPLITUDE_STD) ** 2
    believed -= 0.5 * (np.log(noises / typical.noise) / NOISE_STD) ** 2
    best, best_score = typical, -np.inf
    rows = len(residual)
    # The last row of a Cholesky factor bordered by the residual is the whitened residual: one factorisation does.
    bordered = np.zeros((len(sizes), rows + 1, rows + 1))
    bordered[:, rows, :rows] = residual
    bordered[:, rows, rows] = _CORNER
    for stretch in STRETCHES:
        correlation = kernel(points, points, stretch)
        bordered[:, :rows, :rows] = explained + (amplitudes**2)[:, None, None] * correlation
        bordered[:, range(rows), range(rows)] += (noises**2)[:, None] / trust
        factors = np.linalg.cholesky(bordered)
        scores = believed - 0.5 * (np.log(stretch) / STRETCH_STD) ** 2
        scores -= 0.5 * (factors[:, rows, :rows] ** 2).sum(axis=1)
        scores -= np.log(factors[:, range(rows), range(rows)]).sum(axis=1)
        at = int(np.argmax(scores))
        if scores[at] > best_score:
            best, best_score = Spread(float(amplitudes[at]), float(noises[at]), stretch), float(scores[at])
    return best


def trusted(left_out: NDArray[np.float64], variance: NDArray[np.float64]) -> NDArray[np.float64]:
    """How much each reading counts (at most 1), from its error when predicted from the others."""
    return np.minimum(1.0, (TAIL + 1) / (TAIL + left_out**2 / variance))
