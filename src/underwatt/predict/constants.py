"""The constants of the physics, fitted: the most probable ones given what is believed and what was measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from underwatt.predict.roofline import CONSTANTS, NAMES, NO_LIMIT, Inputs, evaluate

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from underwatt.predict.settings import SettingArray

# What the formulas leave unexplained, as standard deviations of log time and log power: the usual misfit over whole
# tables. Only the balance between belief and measurements hangs on them; the spread of predictions does not.
MISFIT_TIME = 0.04
MISFIT_POWER = 0.025
# Degrees of freedom of the misfit: few, so that a reading that is far off is an outlier and not a new law.
TAIL = 4.0
# All times of a workload may be larger or smaller together, and so may all powers of a device.
COMMON_TIME_STD = 0.5
COMMON_POWER_STD = 0.3

NOMINAL_CORES = 4.0
MOST_ITERATIONS = 60
ROWS_FOR_STARTS = 60
SETTLED = 1e-2

_OF_TIME = np.array([constant.scale == "time" for constant in CONSTANTS.values()], float)
_OF_POWER = np.array([constant.scale == "power" for constant in CONSTANTS.values()], float)
_MEAN = np.array([constant.mean for constant in CONSTANTS.values()])
_STD = np.array([constant.std for constant in CONSTANTS.values()])
_OF_WORKLOAD = np.array([constant.of_workload for constant in CONSTANTS.values()])
# Which part sets the pace is not always clear from ten readings: start from each point of view.
_STARTS: tuple[dict[str, float], ...] = (
    {},
    {"load": 0.8, "gpu": -0.5, "mem": -0.5},
    {"load": -1.0, "launch": 0.8},
)


@dataclass(frozen=True, slots=True)
class Centre:
    """The setting that constants are relative to: the highest clocks and the middle batch size that were measured."""

    log_knobs: tuple[tuple[str, float], ...]
    log_batch: float

    @classmethod
    def of(cls, settings: SettingArray) -> Centre:
        """The centre of measured settings."""
        highest = {name: float(np.log(settings.values[:, at].max())) for at, name in enumerate(settings.knobs)}
        if "cpu_cores" in highest:
            highest["cpu_cores"] = float(np.log(NOMINAL_CORES))
        sizes = np.log(settings.batch_size)
        return cls(tuple(highest.items()), float(sizes.min() + sizes.max()) / 2)

    def inputs(self, settings: SettingArray) -> Inputs:
        """Settings in logs relative to the centre; a knob that only one of them has counts as being at the centre."""
        knobs = dict(self.log_knobs)
        zero = np.zeros(len(settings))

        def relative(name: str) -> NDArray[np.float64]:
            column = settings.column(name)
            return zero if column is None or name not in knobs else np.log(column) - knobs[name]

        limits = settings.column("power_limit_w")
        return Inputs(
            cores=relative("cpu_cores"),
            cpu=relative("cpu_mhz"),
            gpu=relative("gpu_mhz"),
            mem=relative("mem_mhz"),
            batch=np.log(settings.batch_size) - self.log_batch,
            limit=relative("power_limit_w"),
            log_limit_w=zero + NO_LIMIT if limits is None else np.log(limits),
        )


@dataclass(frozen=True, slots=True)
class Levels:
    """The usual log time and log power of a profile: constants of time and power are relative to them."""

    log_step_s: float
    log_power_w: float

    @classmethod
    def of(cls, log_step_s: NDArray[np.float64], log_power_w: NDArray[np.float64]) -> Levels:
        """Medians, which outliers do not move."""
        return cls(float(np.median(log_step_s)), float(np.median(log_power_w)))

    def shift(self) -> NDArray[np.float64]:
        """What these levels add to each constant."""
        return _OF_TIME * self.log_step_s + _OF_POWER * self.log_power_w


@dataclass(frozen=True, slots=True)
class Belief:
    """A normal distribution over the constants."""

    mean: NDArray[np.float64]
    cov: NDArray[np.float64]

    @classmethod
    def general(cls, levels: Levels) -> Belief:
        """What is believed of any workload on any device."""
        return cls(_MEAN + levels.shift(), np.diag(_STD**2) + _common())

    @classmethod
    def near(cls, theta: NDArray[np.float64], theirs: Levels, levels: Levels, closeness: float) -> Belief:
        """What is believed of a workload that resembles another one whose constants are known."""
        mean = theta - theirs.shift() + levels.shift()
        return cls(mean, np.diag((closeness * _OF_WORKLOAD) ** 2) + _common())


def _common() -> NDArray[np.float64]:
    return np.asarray(
        COMMON_TIME_STD**2 * np.outer(_OF_TIME, _OF_TIME) + COMMON_POWER_STD**2 * np.outer(_OF_POWER, _OF_POWER)
    )


def fit_constants(
    x: Inputs, log_step_s: NDArray[np.float64], log_power_w: NDArray[np.float64], belief: Belief
) -> NDArray[np.float64]:
    """The most probable constants, by damped Gauss-Newton from several starts; the best of them wins.

    Where there are many rows, some of them decide between the starts.
    """
    precision = np.asarray(np.linalg.inv(belief.cov), dtype=np.float64)
    some = slice(None, None, max(1, len(x) // ROWS_FOR_STARTS))
    best, best_cost = belief.mean, np.inf
    for shifts in _STARTS:
        start = belief.mean.copy()
        for name, shift in shifts.items():
            start[NAMES.index(name)] += shift
        theta, cost = _descend(start, x.take(some), log_step_s[some], log_power_w[some], belief.mean, precision)
        if cost < best_cost:
            best, best_cost = theta, cost
    if len(x) >= 2 * ROWS_FOR_STARTS:
        best, _ = _descend(best, x, log_step_s, log_power_w, belief.mean, precision)
    return best


def _descend(
    theta: NDArray[np.float64],
    x: Inputs,
    log_step_s: NDArray[np.float64],
    log_power_w: NDArray[np.float64],
    mean: NDArray[np.float64],
    precision: NDArray[np.float64],
) -> tuple[NDArray[np.float64], float]:
    def look(at: NDArray[np.float64]) -> tuple[float, NDArray[np.float64], NDArray[np.float64]]:
        time, power = evaluate(at, x)
        errors = np.concatenate([(time.value - log_step_s) / MISFIT_TIME, (power.value - log_power_w) / MISFIT_POWER])
        slopes = np.vstack([time.jacobian(NAMES, len(x)) / MISFIT_TIME, power.jacobian(NAMES, len(x)) / MISFIT_POWER])
        off = at - mean
        cost = 0.5 * (TAIL + 1) * np.log1p(errors**2 / TAIL).sum() + 0.5 * off @ precision @ off
        return float(cost), errors, slopes

    damping = 1e-2
    cost, errors, slopes = look(theta)
    for _ in range(MOST_ITERATIONS):
        weights = (TAIL + 1) / (TAIL + errors**2)
        hessian = slopes.T @ (slopes * weights[:, None]) + precision
        gradient = slopes.T @ (weights * errors) + precision @ (theta - mean)
        step = np.linalg.solve(hessian + damping * np.diag(np.diag(hessian)), -gradient)
        new_cost, new_errors, new_slopes = look(theta + step)
        if new_cost < cost:
            settled = cost - new_cost < SETTLED
            theta, cost, errors, slopes = theta + step, new_cost, new_errors, new_slopes
            damping = max(damping / 4, 1e-6)
            if settled:
                break
        else:
            damping *= 5
            if damping > 1e6:
                break
    return theta, cost
