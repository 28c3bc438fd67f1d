"""One view of a workload: physics near a belief, the quirks of a reference, and a Gaussian process for the rest.

The physics is fitted first; around the fit it is nearly linear in its constants, so constants, quirks, misfit and
noise together are one Gaussian process with a closed form. Time and power share constants, hence are fitted together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from underwatt.errors import PredictError
from underwatt.predict.base import observe
from underwatt.predict.gp import TAIL, TYPICAL_POWER, TYPICAL_TIME, Spread, choose_spread, features, kernel, trusted
from underwatt.predict.roofline import NAMES, Belief, Centre, Levels, evaluate, fit_constants

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from underwatt.predict.base import Observations
    from underwatt.predict.roofline import Inputs
    from underwatt.records import Profile


# A profile of another workload or device, understood well enough to lend its constants and its quirks.

# Rows of a reference that are looked at: its constants and quirks are well known by then.
MOST_ROWS = 400
ROBUST_ROUNDS = 3


@dataclass(frozen=True, slots=True, eq=False)
class _Quirk:
    """What the physics misses in one quantity of the reference, as a smooth function of the setting."""

    spread: Spread
    weights: NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class ReferenceModel:
    """A reference profile, fitted relative to the centre of the workload it is to help."""

    name: str
    theta: NDArray[np.float64]
    levels: Levels
    _points: NDArray[np.float32]
    _quirks: tuple[_Quirk, _Quirk]

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
        levels = Levels.of(seen.log_step_s, seen.log_power_w)
        theta = fit_constants(x, seen.log_step_s, seen.log_power_w, Belief.general(levels))
        time, power = evaluate(theta, x)
        points = features(x)
        quirks = (
            _fit_quirk(points, seen.log_step_s - time.value, TYPICAL_TIME),
            _fit_quirk(points, seen.log_power_w - power.value, TYPICAL_POWER),
        )
        return cls(name, theta, levels, points.astype(np.float32), quirks)

    def quirks(self, x: Inputs) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """How far the reference's log time and log power lie from its own physics at each setting."""
        # Settings that differ only in what the reference never varied are one point to it.
        points = features(x).astype(np.float32)
        points[:, np.ptp(self._points, axis=0) == 0] = self._points[0, np.ptp(self._points, axis=0) == 0]
        distinct, back = _distinct_rows(points)
        time, power = self._quirks
        near = kernel(distinct, self._points, time.spread.stretch)
        time_quirk = near @ time.weights
        if power.spread.stretch != time.spread.stretch:
            near = kernel(distinct, self._points, power.spread.stretch)
        power_quirk = near @ power.weights
        return time_quirk[back].astype(float), power_quirk[back].astype(float)


def _distinct_rows(points: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.intp]]:
    rows = np.ascontiguousarray(points).view(np.dtype((np.void, points.dtype.itemsize * points.shape[1]))).ravel()
    _, first, back = np.unique(rows, return_index=True, return_inverse=True)
    return points[first], back.ravel()


def _fit_quirk(points: NDArray[np.float64], residual: NDArray[np.float64], typical: Spread) -> _Quirk:
    trust = np.ones(len(residual))
    nothing = np.zeros((len(residual), len(residual)))
    for _ in range(ROBUST_ROUNDS):
        spread = choose_spread(points, nothing, residual, trust, typical)
        near = spread.amplitude**2 * kernel(points, points, spread.stretch)
        inverse = np.linalg.inv(near + np.diag(spread.noise**2 / trust))
        weights = inverse @ residual
        own = np.diag(inverse)
        variance = 1 / own - spread.noise**2 / trust + spread.noise**2
        trust = trusted(weights / own, variance)
    return _Quirk(spread, (spread.amplitude**2 * weights).astype(np.float32))


# A reference's quirks carry over to another workload by this much, give or take.
QUIRK_SHARE = 0.7
QUIRK_SHARE_STD = 0.3


@dataclass(frozen=True, slots=True, eq=False)
class _Linear:
    """Physics and quirks around the fitted constants: values, and slopes by each constant and quirk share."""

    value: NDArray[np.float64]  # 2 × settings: time, power
    slopes: NDArray[np.float64]  # 2 × settings × unknowns


@dataclass(frozen=True, slots=True, eq=False)
class Expert:
    """A fitted view; ``score`` says how well it predicts each measured quantity from the others."""

    name: str
    score: tuple[float, float]
    theta: NDArray[np.float64]
    belief: Belief
    reference: ReferenceModel | None
    left_out: NDArray[np.float64]  # 2 × readings: errors when predicted from the others
    left_out_variance: NDArray[np.float64]
    _points: NDArray[np.float32]
    _answers: tuple[_Answer, _Answer]

    @classmethod
    def fit(
        cls, seen: Observations, centre: Centre, reference: ReferenceModel | None = None, closeness: float = 1.0
    ) -> Expert:
        """Fit on measurements, near a reference's constants (the closer, the smaller ``closeness``) or near none."""
        x = centre.inputs(seen.settings)
        levels = Levels.of(seen.log_step_s, seen.log_power_w)
        if reference is None:
            belief = Belief.general(levels)
        else:
            belief = Belief.near(reference.theta, reference.levels, levels, closeness)
        quirks = lent_quirks(reference, x)
        theta = fit_constants(x, seen.log_step_s - quirks[0], seen.log_power_w - quirks[1], belief)
        cov = np.zeros((len(NAMES) + 2, len(NAMES) + 2))
        cov[:-2, :-2] = belief.cov
        cov[-2, -2] = cov[-1, -1] = (QUIRK_SHARE_STD / QUIRK_SHARE) ** 2

        linear = _linearise(theta, belief, quirks, x)
        rows = len(seen)
        residual = np.concatenate([seen.log_step_s, seen.log_power_w]) - linear.value.ravel()
        slopes = linear.slopes.reshape(2 * rows, -1)
        explained = slopes @ cov @ slopes.T
        points = features(x)
        trust = np.ones(2 * rows)
        blocks = (slice(0, rows), slice(rows, 2 * rows))
        for _ in range(ROBUST_ROUNDS):
            spreads = (
                choose_spread(points, explained[:rows, :rows], residual[:rows], trust[:rows], TYPICAL_TIME),
                choose_spread(points, explained[rows:, rows:], residual[rows:], trust[rows:], TYPICAL_POWER),
            )
            total = explained.copy()
            for block, spread in zip(blocks, spreads, strict=True):
                total[block, block] += spread.amplitude**2 * kernel(points, points, spread.stretch)
            noise = np.repeat([spread.noise**2 for spread in spreads], rows)
            total[np.diag_indices_from(total)] += noise / trust
            inverse = np.linalg.inv(total)
            weights = inverse @ residual
            left_out, unknown = leave_out(inverse, weights)
            variance = unknown - noise / trust + noise
            trust = trusted(left_out, variance)
        density = -0.5 * (TAIL + 1) * np.log1p(left_out**2 / variance / TAIL) - 0.5 * np.log(variance)
        return cls(
            name="no reference" if reference is None else reference.name,
            score=(float(density[:rows].mean()), float(density[rows:].mean())),
            theta=theta,
            belief=belief,
            reference=reference,
            left_out=left_out.reshape(2, rows),
            left_out_variance=variance.reshape(2, rows),
            _points=points.astype(np.float32),
            _answers=(
                _Answer.of(spreads[0], cov, slopes, weights, inverse, blocks[0]),
                _Answer.of(spreads[1], cov, slopes, weights, inverse, blocks[1]),
            ),
        )

    def predict(self, x: Inputs, quirks: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Means and variances of log time (row 0) and log power (row 1), the noise of a reading included.

        ``quirks`` are what ``lent_quirks`` gives for this expert's reference and these settings.
        """
        linear = _linearise(self.theta, self.belief, quirks, x)
        points = features(x).astype(np.float32)
        mean, variance = np.empty((2, len(x))), np.empty((2, len(x)))
        for at, answer in enumerate(self._answers):
            if at == 0 or answer.spread.stretch != self._answers[0].spread.stretch:
                near = kernel(points, self._points, answer.spread.stretch)
            change, variance[at] = answer(linear.slopes[at], near)
            mean[at] = linear.value[at] + change
        return mean, variance


@dataclass(frozen=True, slots=True, eq=False)
class _Answer:
    """The closed form for one quantity: what the measurements change, and how much stays unknown.

    Both depend on a setting through its slopes and its nearness to each measured one, side by side.
    """

    spread: Spread
    change: NDArray[np.float64]
    left: NDArray[np.float32]

    @classmethod
    def of(
        cls,
        spread: Spread,
        cov: NDArray[np.float64],
        slopes: NDArray[np.float64],
        weights: NDArray[np.float64],
        inverse: NDArray[np.float64],
        block: slice,
    ) -> _Answer:
        unknowns = len(cov)
        link = np.zeros((unknowns + block.stop - block.start, len(weights)))
        link[:unknowns] = cov @ slopes.T
        link[unknowns:, block] = spread.amplitude**2 * np.eye(block.stop - block.start)
        left = -link @ inverse @ link.T
        left[:unknowns, :unknowns] += cov
        return cls(spread, link @ weights, left.astype(np.float32))

    def __call__(
        self, slopes: NDArray[np.float64], near: NDArray[np.float32]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        split = slopes.shape[1]
        change = slopes @ self.change[:split] + near @ self.change[split:]
        both = np.concatenate([slopes.astype(np.float32), near], axis=1)
        left = np.einsum("ij,ij->i", both @ self.left, both).astype(float) + self.spread.amplitude**2
        return change, np.maximum(left, 0.0) + self.spread.noise**2


def lent_quirks(reference: ReferenceModel | None, x: Inputs) -> NDArray[np.float64]:
    """What an expert takes over of its reference's quirks, before measuring: in log time and log power."""
    return np.zeros((2, len(x))) if reference is None else QUIRK_SHARE * np.stack(reference.quirks(x))


def leave_out(
    inverse: NDArray[np.float64], weights: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
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


def _linearise(theta: NDArray[np.float64], belief: Belief, quirks: NDArray[np.float64], x: Inputs) -> _Linear:
    """The physics as believed before measuring, linear around ``theta``, quirks added."""
    slopes = np.zeros((2, len(x), len(NAMES) + 2))
    value = np.empty((2, len(x)))
    for at, dual in enumerate(evaluate(theta, x)):
        slopes[at, :, :-2] = dual.jacobian(NAMES, len(x))
        slopes[at, :, len(NAMES) + at] = quirks[at]
        value[at] = dual.value + quirks[at] + slopes[at, :, :-2] @ (belief.mean - theta)
    return _Linear(value, slopes)
