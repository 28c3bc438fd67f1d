"""A profile of another workload or device, understood well enough to lend its constants and its quirks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from underwatt.errors import PredictError
from underwatt.predict.constants import Belief, Centre, Levels, fit_constants
from underwatt.predict.gp import (
    TYPICAL_POWER,
    TYPICAL_TIME,
    Spread,
    choose_spread,
    features,
    kernel,
    trusted,
)
from underwatt.predict.observations import observe
from underwatt.predict.roofline import evaluate

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from underwatt.predict.roofline import Inputs
    from underwatt.records import Profile

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
