"""One view of a workload: physics near a belief, the quirks of a reference, and a Gaussian process for the rest.

The physics is fitted first; around the fit it is nearly linear in its constants, so constants, quirks, misfit and
noise together are one Gaussian process with a closed form. Time and power share constants, hence are fitted together.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from underwatt.errors import PredictError
from underwatt.predict.base import observe
from underwatt.predict.roofline import NAMES, TAIL, Belief, Centre, evaluate, fit_constants, level_shift

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from underwatt.predict.base import Floats, Observations
    from underwatt.predict.roofline import Inputs
    from underwatt.records import Profile

# All sizes below were chosen with benchmarks/predict.py.
# How far (in log units) the misfit of the physics reaches along cores, CPU, GPU and memory clock, batch size, limit.
REACH = np.array([0.8, 0.8, 1.0, 1.0, 1.2, 1.0])
# The sizes tried, and how sure the typical ones are (standard deviations of their logs).
AMPLITUDES = (0.01, 0.02, 0.04, 0.08, 0.16)
STRETCHES = (0.5, 1.0, 2.0)
NOISES = (0.01, 0.02, 0.035, 0.06, 0.1, 0.16)
AMPLITUDE_STD, STRETCH_STD, NOISE_STD = 0.7, 0.5, 0.35
# A reference's quirks carry over to another workload by this much, give or take.
QUIRK_SHARE, QUIRK_SHARE_STD = 0.7, 0.3
# Sizes are chosen on at most so many rows: more change nothing but the time it takes.
MOST_ROWS_FOR_SIZES = 150
# Rows of a reference that are looked at: its constants and quirks are well known by then.
MOST_ROWS = 400
# How often readings are weighed again by how far off they are.
ROBUST_ROUNDS = 3
# Larger than any squared whitened residual, so that the bordered matrix stays positive definite.
_CORNER = 1e12
# Chosen with benchmarks/speed.py: points compared at a time, so that what lies between stays in the caches.
_BLOCK = 1024


@dataclass(frozen=True, slots=True)
class Spread:
    """Standard deviations of the misfit and of the noise, and how far the misfit reaches, as a factor."""

    amplitude: float
    noise: float
    stretch: float = 1.0


TYPICAL = (Spread(amplitude=0.08, noise=0.03), Spread(amplitude=0.05, noise=0.02))  # of log time and of log power


def features(x: Inputs) -> Floats:
    """Settings as points, scaled so that the misfit reaches about one unit."""
    return np.asarray(np.column_stack([x.cores, x.cpu, x.gpu, x.mem, x.batch, x.limit]) / REACH)


def kernel(left: NDArray[Any], right: NDArray[Any], stretch: float) -> NDArray[Any]:
    """Matérn 5/2 correlation between points; keeps the precision of its inputs."""
    near = np.empty((len(left), len(right)), left.dtype)
    for start in range(0, len(left), _BLOCK):
        part = left[start : start + _BLOCK]
        squares = (part**2).sum(axis=1)[:, None] + (right**2).sum(axis=1)[None] - 2 * part @ right.T
        distance = np.sqrt(np.maximum(squares, 0) * left.dtype.type(5.0 / stretch**2))
        near[start : start + _BLOCK] = (1 + distance * (1 + distance / 3)) * np.exp(-distance)
    return near


def choose_spread(points: Floats, explained: Floats, residual: Floats, trust: Floats, typical: Spread) -> Spread:
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


def _trusted(left_out: Floats, variance: Floats) -> Floats:
    """How much each reading counts (at most 1), from its error when predicted from the others."""
    return np.minimum(1.0, (TAIL + 1) / (TAIL + left_out**2 / variance))


@dataclass(frozen=True, slots=True, eq=False)
class ReferenceModel:
    """A profile of another workload or device, understood well enough to lend its constants and its quirks.

    Quirks are what the physics misses in log time and log power, as smooth functions of the setting. All is relative
    to the centre of the workload that the reference is to help.
    """

    constants: Floats  # relative to the reference's own levels of time and power
    _points: NDArray[np.float32]
    _quirks: tuple[tuple[float, NDArray[np.float32]], ...]  # of time and of power: stretch, and weight of each point

    @classmethod
    def fit(cls, profile: Profile, centre: Centre, knobs: tuple[str, ...], seed: int) -> ReferenceModel:
        """Learn a reference; raises ``PredictError`` where it shares no knob with the measurements."""
        name = f"{profile.workload.name} on {profile.device.name}"
        seen = observe(profile.measurements, whose=f"the reference {name}")
        if knobs and not set(knobs) & set(seen.settings.knobs):
            raise PredictError(
                f"The reference {name} sets {', '.join(seen.settings.knobs) or 'no knob'}, "
                f"and the measurements set {', '.join(knobs)}: nothing in common.",
                hint="Leave this reference out, or give one of a device with the same knobs.",
            )
        if len(seen) > MOST_ROWS:
            seen = seen.take(np.random.default_rng(seed).permutation(len(seen))[:MOST_ROWS])
        x = centre.inputs(seen.settings)
        points = features(x)
        shift = level_shift(seen.log_step_s, seen.log_power_w)
        theta = fit_constants(x, seen.log_step_s, seen.log_power_w, Belief.general(shift))
        time, power = evaluate(theta, x)
        residuals = (seen.log_step_s - time.value, seen.log_power_w - power.value)
        quirks = tuple(_fit_quirk(points, *both) for both in zip(residuals, TYPICAL, strict=True))
        return cls(theta - shift, points.astype(np.float32), quirks)

    def quirks(self, x: Inputs) -> Floats:
        """How far the reference's log time and log power lie from its own physics at each setting."""
        # Settings that differ only in what the reference never varied are one point to it, and many are.
        points = features(x).astype(np.float32)
        constant = np.ptp(self._points, axis=0) == 0
        points[:, constant] = self._points[0, constant]
        rows = np.ascontiguousarray(points).view(np.dtype((np.void, points.dtype.itemsize * points.shape[1]))).ravel()
        _, first, back = np.unique(rows, return_index=True, return_inverse=True)
        near = {stretch: kernel(points[first], self._points, stretch) for stretch in dict(self._quirks)}
        found = [(near[stretch] @ weights)[back.ravel()] for stretch, weights in self._quirks]
        return np.stack(found).astype(float)


def _fit_quirk(points: Floats, residual: Floats, typical: Spread) -> tuple[float, NDArray[np.float32]]:
    trust = np.ones(len(residual))
    nothing = np.zeros((len(residual), len(residual)))
    for _ in range(ROBUST_ROUNDS):
        spread = choose_spread(points, nothing, residual, trust, typical)
        near = spread.amplitude**2 * kernel(points, points, spread.stretch)
        inverse = np.linalg.inv(near + np.diag(spread.noise**2 / trust))
        weights = inverse @ residual
        own = np.diag(inverse)
        variance = 1 / own - spread.noise**2 / trust + spread.noise**2
        trust = _trusted(weights / own, variance)
    return spread.stretch, (spread.amplitude**2 * weights).astype(np.float32)


def lent_quirks(reference: ReferenceModel | None, x: Inputs) -> Floats:
    """What an expert takes over of its reference's quirks, before measuring: in log time and log power."""
    return np.zeros((2, len(x))) if reference is None else QUIRK_SHARE * reference.quirks(x)


@dataclass(frozen=True, slots=True, eq=False)
class Expert:
    """A fitted view; ``score`` says how well it predicts each measured quantity from the others."""

    score: tuple[float, float]
    theta: Floats
    belief: Belief
    reference: ReferenceModel | None
    left_out: Floats  # 2 × readings: errors when predicted from the others
    left_out_variance: Floats
    _points: NDArray[np.float32]
    _answers: tuple[_Answer, ...]  # for time and for power

    @classmethod
    def fit(
        cls, seen: Observations, centre: Centre, reference: ReferenceModel | None = None, closeness: float = 1.0
    ) -> Expert:
        """Fit on measurements, near a reference's constants (the closer, the smaller ``closeness``) or near none."""
        x = centre.inputs(seen.settings)
        points = features(x)
        shift = level_shift(seen.log_step_s, seen.log_power_w)
        belief = Belief.general(shift) if reference is None else Belief.near(reference.constants, shift, closeness)
        quirks = lent_quirks(reference, x)
        theta = fit_constants(x, seen.log_step_s - quirks[0], seen.log_power_w - quirks[1], belief)
        cov = np.zeros((len(NAMES) + 2, len(NAMES) + 2))
        cov[:-2, :-2] = belief.cov
        cov[-2, -2] = cov[-1, -1] = (QUIRK_SHARE_STD / QUIRK_SHARE) ** 2

        value, slopes = _linearise(theta, belief, quirks, x)
        rows = len(seen)
        residual = np.concatenate([seen.log_step_s, seen.log_power_w]) - value.ravel()
        slopes = slopes.reshape(2 * rows, -1)
        explained = slopes @ cov @ slopes.T
        trust = np.ones(2 * rows)
        blocks = (slice(0, rows), slice(rows, 2 * rows))
        for _ in range(ROBUST_ROUNDS):
            spreads = [
                choose_spread(points, explained[block, block], residual[block], trust[block], typical)
                for block, typical in zip(blocks, TYPICAL, strict=True)
            ]
            total = explained.copy()
            for block, spread in zip(blocks, spreads, strict=True):
                total[block, block] += spread.amplitude**2 * kernel(points, points, spread.stretch)
            noise = np.repeat([spread.noise**2 for spread in spreads], rows)
            total[np.diag_indices_from(total)] += noise / trust
            inverse = np.linalg.inv(total)
            weights = inverse @ residual
            left_out, unknown = leave_out(inverse, weights)
            variance = unknown - noise / trust + noise
            trust = _trusted(left_out, variance)
        density = -0.5 * (TAIL + 1) * np.log1p(left_out**2 / variance / TAIL) - 0.5 * np.log(variance)
        return cls(
            score=(float(density[:rows].mean()), float(density[rows:].mean())),
            theta=theta,
            belief=belief,
            reference=reference,
            left_out=left_out.reshape(2, rows),
            left_out_variance=variance.reshape(2, rows),
            _points=points.astype(np.float32),
            _answers=tuple(
                _Answer.of(spread, cov, slopes, weights, inverse, block)
                for block, spread in zip(blocks, spreads, strict=True)
            ),
        )

    def predict(self, x: Inputs, quirks: Floats) -> tuple[Floats, Floats]:
        """Means and variances of log time (row 0) and log power (row 1), the noise of a reading included.

        ``quirks`` are what ``lent_quirks`` gives for this expert's reference and these settings.
        """
        value, slopes = _linearise(self.theta, self.belief, quirks, x)
        points = features(x).astype(np.float32)
        mean, variance = np.empty((2, len(x))), np.empty((2, len(x)))
        for at, answer in enumerate(self._answers):
            if at == 0 or answer.spread.stretch != self._answers[0].spread.stretch:
                near = kernel(points, self._points, answer.spread.stretch)
            change, variance[at] = answer(slopes[at], near)
            mean[at] = value[at] + change
        return mean, variance


@dataclass(frozen=True, slots=True, eq=False)
class _Answer:
    """The closed form for one quantity: what the measurements change, and how much stays unknown.

    Both depend on a setting through its slopes and its nearness to each measured one, side by side.
    """

    spread: Spread
    change: Floats
    left: NDArray[np.float32]

    @classmethod
    def of(cls, spread: Spread, cov: Floats, slopes: Floats, weights: Floats, inverse: Floats, block: slice) -> _Answer:
        unknowns = len(cov)
        link = np.zeros((unknowns + block.stop - block.start, len(weights)))
        link[:unknowns] = cov @ slopes.T
        link[unknowns:, block] = spread.amplitude**2 * np.eye(block.stop - block.start)
        left = -link @ inverse @ link.T
        left[:unknowns, :unknowns] += cov
        return cls(spread, link @ weights, left.astype(np.float32))

    def __call__(self, slopes: Floats, near: NDArray[np.float32]) -> tuple[Floats, Floats]:
        split = slopes.shape[1]
        change = slopes @ self.change[:split] + near @ self.change[split:]
        both = np.concatenate([slopes, near], axis=1, dtype=np.float32)
        left = np.einsum("ij,ij->i", both @ self.left, both).astype(float) + self.spread.amplitude**2
        return change, np.maximum(left, 0.0) + self.spread.noise**2


def leave_out(inverse: Floats, weights: Floats) -> tuple[Floats, Floats]:
    """Error and variance of each reading predicted from the others: times first, then powers.

    Time and power of a reading are left out together, as either would give the other away.
    """
    rows = len(weights) // 2
    time, power = weights[:rows], weights[rows:]
    own, shared = np.diag(inverse), np.diag(inverse, rows)
    own_time, own_power = own[:rows], own[rows:]
    determinant = own_time * own_power - shared**2
    errors = np.concatenate([own_power * time - shared * power, own_time * power - shared * time])
    both = np.concatenate([determinant, determinant])
    return errors / both, np.concatenate([own_power, own_time]) / both


def _linearise(theta: Floats, belief: Belief, quirks: Floats, x: Inputs) -> tuple[Floats, Floats]:
    """Physics as believed before measuring, linear around ``theta``, quirks added: log time (0) and log power (1).

    Values, and slopes by each constant and by the share of each quirk.
    """
    value, slopes = np.empty((2, len(x))), np.zeros((2, len(x), len(NAMES) + 2))
    for at, dual in enumerate(evaluate(theta, x)):
        slopes[at, :, :-2] = dual.jacobian(NAMES, len(x))
        slopes[at, :, len(NAMES) + at] = quirks[at]
        value[at] = dual.value + quirks[at] + slopes[at, :, :-2] @ (belief.mean - theta)
    return value, slopes
