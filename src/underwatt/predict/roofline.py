"""Step time and power as formulas of the clocks: physics with some thirty constants that measurements pin down.

A step is compute (arithmetic against memory traffic), launched by the CPU, while the CPU loads the next batch;
the slowest of them sets the pace, softly. Power is what is always on, plus what each clock costs when idle, plus
what each unit draws while it is busy. All in logs. Formulas are written once and differentiated exactly: a ``Dual`` is
an array of values and, for each constant it depends on, the array of derivatives. That is the cheap direction here:
about thirty constants, each touching few terms, and up to 100,000 settings.

The simulator's physics (``drivers/virtual``) is another one on purpose: a predictor that shares its simulator's
formulas would be examined on its own answers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from underwatt.predict.base import take_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from underwatt.predict.base import Floats, SettingArray


class Dual:
    """Values with their derivatives by named constants."""

    __slots__ = ("by", "value")

    def __init__(self, value: Floats, by: dict[str, Floats] | None = None) -> None:
        self.value = value
        self.by = by or {}

    @classmethod
    def constant(cls, name: str, value: float) -> Dual:
        """A constant to be fitted: its derivative by itself is one."""
        return cls(np.asarray(value, float), {name: np.asarray(1.0)})

    def __add__(self, other: Dual | Floats) -> Dual:
        if not isinstance(other, Dual):
            return Dual(self.value + other, self.by)
        return Dual(self.value + other.value, _merge(self.by, other.by))

    def __neg__(self) -> Dual:
        return Dual(-self.value, _scaled(self.by, -1.0))

    def __sub__(self, other: Dual | Floats) -> Dual:
        return self + (-other)

    def __mul__(self, other: Dual | Floats) -> Dual:
        if not isinstance(other, Dual):
            return Dual(self.value * other, _scaled(self.by, other))
        return Dual(self.value * other.value, _merge(_scaled(self.by, other.value), _scaled(other.by, self.value)))

    def exp(self) -> Dual:
        """The exponential: of a constant, one that cannot be negative."""
        value = np.exp(self.value)
        return Dual(value, _scaled(self.by, value))

    def jacobian(self, names: Sequence[str], rows: int) -> Floats:
        """Derivatives as a matrix: one row a setting, one column a constant."""
        columns = np.zeros((len(names), rows))
        for at, name in enumerate(names):
            if name in self.by:
                columns[at] = self.by[name]
        return np.asarray(columns.T)


def _merge(left: dict[str, Floats], right: dict[str, Floats]) -> dict[str, Floats]:
    merged = dict(left)
    for name, slope in right.items():
        merged[name] = merged[name] + slope if name in merged else slope
    return merged


def _scaled(by: dict[str, Floats], scale: Floats | float) -> dict[str, Floats]:
    return {name: slope * scale for name, slope in by.items()}


def smooth_max(log_sharpness: Dual, *terms: Dual) -> Dual:
    """The p-norm of quantities given as logs: their maximum where p is large, their sum where p is one."""
    sharpness = np.exp(log_sharpness.value)
    values = np.stack(np.broadcast_arrays(*(term.value for term in terms)))
    top = values.max(axis=0)
    shares = np.exp(sharpness * (values - top))
    total = shares.sum(axis=0)
    shares /= total
    value = top + np.log(total) / sharpness
    by: dict[str, Floats] = {}
    for share, term in zip(shares, terms, strict=True):
        by = _merge(by, _scaled(term.by, share))
    if log_sharpness.by:
        by = _merge(by, _scaled(log_sharpness.by, (shares * values).sum(axis=0) - value))
    return Dual(value, by)


def add(*terms: Dual) -> Dual:
    """The sum of quantities given as logs."""
    return smooth_max(Dual(np.asarray(0.0)), *terms)


# How soft the corner is where more cores stop helping; fixed, as no table tells it apart from the cap itself.
CORE_CAP_SHARPNESS = np.log(6.0)
# What stands in for a power limit where there is none: log watts above anything a device draws.
NO_LIMIT = 12.0


@dataclass(frozen=True, slots=True)
class Constant:
    """What is believed of one constant before anything is measured; ``scale`` says what it is relative to.

    The beliefs below were chosen with benchmarks/predict.py.
    """

    mean: float
    std: float
    of_workload: float  # standard deviation from one workload or device to the next
    scale: str = ""  # "time": relative to the median log step time; "power": to the median log power


T, P = "time", "power"
CONSTANTS: dict[str, Constant] = {
    # Shares of the step at the highest clocks, as logs of their time over the median time.
    "gpu": Constant(-1.7, 1.0, 0.4, T),
    "mem": Constant(-1.8, 1.0, 0.4, T),
    "launch": Constant(-2.0, 1.0, 0.6, T),
    "load": Constant(-1.7, 1.0, 0.5, T),
    "load_mem": Constant(-3.0, 0.8, 0.4, T),
    "fixed": Constant(-3.6, 0.8, 0.4, T),
    "sync": Constant(-3.6, 0.8, 0.4, T),
    "host_mem": Constant(-2.3, 0.6, 0.3),
    "core_exponent": Constant(0.3, 0.3, 0.15),
    "core_cap": Constant(0.7, 0.25, 0.15),
    "overlap_mem": Constant(0.85, 0.25, 0.15),
    "overlap_cpu": Constant(0.8, 0.4, 0.25),
    "overlap": Constant(1.6, 0.4, 0.25),
    # Samples whose cost a step pays whatever its batch size.
    "gpu_batch": Constant(-2.3, 1.0, 0.4),
    "mem_batch": Constant(-4.0, 1.5, 0.4),
    "load_saturates": Constant(3.0, 1.2, 0.5),
    # Power, as logs of watts over the median watts.
    "always": Constant(-0.6, 0.25, 0.1, P),
    "idle_mem": Constant(-2.5, 0.8, 0.3, P),
    "idle_gpu": Constant(-2.3, 0.8, 0.3, P),
    "idle_cpu": Constant(-3.5, 0.8, 0.3, P),
    "busy_gpu": Constant(-1.4, 0.8, 0.3, P),
    "busy_cpu": Constant(-1.2, 0.8, 0.3, P),
    "busy_mem": Constant(0.3, 0.8, 0.3, P),
    "gpu_exponent": Constant(2.8, 0.5, 0.2),
    "cpu_exponent": Constant(2.9, 0.5, 0.2),
    "mem_exponent": Constant(0.9, 0.15, 0.05),
    "core_power": Constant(0.7, 0.4, 0.15),
    # A power limit slows the GPU down; how much, and how close to the limit the device keeps.
    "limit": Constant(-1.5, 1.0, 0.4, T),
    "limit_exponent": Constant(-0.4, 0.4, 0.2),
    "limit_draw": Constant(-0.05, 0.1, 0.05),
}
NAMES: tuple[str, ...] = tuple(CONSTANTS)


@dataclass(frozen=True, slots=True)
class Inputs:
    """Logs of the knobs, each relative to a nominal value; a knob that a device lacks is zero everywhere."""

    cores: Floats
    cpu: Floats
    gpu: Floats
    mem: Floats
    batch: Floats
    limit: Floats  # log watts, relative to the highest limit
    log_limit_w: Floats  # log watts; ``NO_LIMIT`` where there is none

    def __len__(self) -> int:
        return len(self.cores)


def evaluate(theta: Floats, x: Inputs) -> tuple[Dual, Dual]:
    """Log step time and log power at each setting, with derivatives by each constant."""
    k = {name: Dual.constant(name, value) for name, value in zip(NAMES, theta, strict=True)}
    softer = Dual(np.asarray(CORE_CAP_SHARPNESS))
    cores = -smooth_max(softer, Dual(-x.cores), -k["core_cap"])

    work_gpu = k["gpu"] - x.gpu + add(Dual(x.batch), k["gpu_batch"])
    work_mem = k["mem"] - x.mem + add(Dual(x.batch), k["mem_batch"])
    if np.any(x.log_limit_w < NO_LIMIT):
        work_gpu = add(work_gpu, k["limit"] - k["limit_exponent"].exp() * x.limit + x.batch)
    compute = smooth_max(k["overlap_mem"], work_gpu, work_mem)
    # A CPU waits for memory too: slow memory slows it a little, whatever its clock.
    host_clock = k["host_mem"].exp() * x.mem + x.cpu
    launch = k["launch"] - host_clock
    batch_load = Dual(x.batch) - add(Dual(np.zeros_like(x.batch)), Dual(x.batch) - k["load_saturates"])
    load_cpu = k["load"] - host_clock - k["core_exponent"].exp() * cores + batch_load
    load = add(load_cpu, k["load_mem"] - x.mem + batch_load)
    host = smooth_max(k["overlap_cpu"], launch, load)
    paced = smooth_max(k["overlap"], compute, host)
    log_step_s = add(paced, k["fixed"], k["sync"] - x.cpu)

    gpu_cost = k["gpu_exponent"] * x.gpu
    cpu_cost = k["cpu_exponent"] * x.cpu
    mem_cost = k["mem_exponent"] * x.mem
    log_power_w = add(
        k["always"],
        k["idle_mem"] + mem_cost,
        k["idle_gpu"] + gpu_cost,
        k["idle_cpu"] + cpu_cost + x.cores,
        k["busy_gpu"] + gpu_cost + compute - log_step_s,
        k["busy_mem"] + mem_cost + work_mem - log_step_s,
        k["busy_cpu"] + cpu_cost + k["core_power"] * cores + load_cpu - log_step_s,
    )
    if np.any(x.log_limit_w < NO_LIMIT):
        sharp = Dual(np.asarray(np.log(8.0)))
        log_power_w = -smooth_max(sharp, -log_power_w, -(k["limit_draw"] + x.log_limit_w))
    return log_step_s, log_power_w


# What the formulas leave unexplained, as standard deviations of log time and log power: the usual misfit over whole
# tables. Only the balance between belief and measurements hangs on them; the spread of predictions does not.
MISFIT_TIME, MISFIT_POWER = 0.04, 0.025
# Degrees of freedom of the misfit: few, so that a reading that is far off is an outlier and not a new law.
TAIL = 4.0
# All times of a workload may be larger or smaller together, and so may all powers of a device.
COMMON_TIME_STD, COMMON_POWER_STD = 0.5, 0.3

NOMINAL_CORES = 4.0
MOST_ITERATIONS = 60
ROWS_FOR_STARTS = 60
SMALL_GAIN = 1e-2

_OF_TIME = np.array([constant.scale == T for constant in CONSTANTS.values()], float)
_OF_POWER = np.array([constant.scale == P for constant in CONSTANTS.values()], float)
_COMMON = COMMON_TIME_STD**2 * np.outer(_OF_TIME, _OF_TIME) + COMMON_POWER_STD**2 * np.outer(_OF_POWER, _OF_POWER)
_MEAN, _STD, _OF_WORKLOAD = np.array([(c.mean, c.std, c.of_workload) for c in CONSTANTS.values()]).T
# Which part sets the pace is not always clear from ten readings: start from each point of view.
_STARTS: tuple[dict[str, float], ...] = (
    {},
    {"load": 0.8, "gpu": -0.5, "mem": -0.5},
    {"load": -1.0, "launch": 0.8},
)


@dataclass(frozen=True, slots=True)
class Centre:
    """The setting that constants are relative to: the highest clocks and the middle batch size that were measured."""

    log_knobs: dict[str, float]
    log_batch: float

    @classmethod
    def of(cls, settings: SettingArray) -> Centre:
        """The centre of measured settings."""
        highest = {name: float(np.log(settings.values[:, at].max())) for at, name in enumerate(settings.knobs)}
        if "cpu_cores" in highest:
            highest["cpu_cores"] = float(np.log(NOMINAL_CORES))
        sizes = np.log(settings.batch_size)
        return cls(highest, float(sizes.min() + sizes.max()) / 2)

    def inputs(self, settings: SettingArray) -> Inputs:
        """Settings in logs relative to the centre; a knob that only one of them has counts as being at the centre."""
        zero = np.zeros(len(settings))

        def relative(name: str) -> Floats:
            column = settings.column(name)
            return zero if column is None or name not in self.log_knobs else np.log(column) - self.log_knobs[name]

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


def level_shift(log_step_s: Floats | float, log_power_w: Floats | float) -> Floats:
    """What the usual (median) log time and log power of a profile add to each constant."""
    return np.asarray(_OF_TIME * float(np.median(log_step_s)) + _OF_POWER * float(np.median(log_power_w)))


@dataclass(frozen=True, slots=True)
class Belief:
    """A normal distribution over the constants."""

    mean: Floats
    cov: Floats

    @classmethod
    def general(cls, shift: Floats) -> Belief:
        """What is believed of any workload on any device, at its levels of time and power."""
        return cls(_MEAN + shift, np.diag(_STD**2) + _COMMON)

    @classmethod
    def near(cls, constants: Floats, shift: Floats, closeness: float) -> Belief:
        """What is believed of a workload that resembles another one whose constants, without its levels, are known."""
        return cls(constants + shift, np.diag((closeness * _OF_WORKLOAD) ** 2) + _COMMON)


def fit_constants(x: Inputs, log_step_s: Floats, log_power_w: Floats, belief: Belief) -> Floats:
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
        theta, cost = _descend(start, take_rows(x, some), log_step_s[some], log_power_w[some], belief.mean, precision)
        if cost < best_cost:
            best, best_cost = theta, cost
    if len(x) >= 2 * ROWS_FOR_STARTS:
        best, _ = _descend(best, x, log_step_s, log_power_w, belief.mean, precision)
    return best


def _descend(
    theta: Floats, x: Inputs, log_step_s: Floats, log_power_w: Floats, mean: Floats, precision: Floats
) -> tuple[Floats, float]:
    def look(at: Floats) -> tuple[float, Floats, Floats]:
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
            done = cost - new_cost < SMALL_GAIN
            theta, cost, errors, slopes = theta + step, new_cost, new_errors, new_slopes
            damping = max(damping / 4, 1e-6)
            if done:
                break
        else:
            damping *= 5
            if damping > 1e6:
                break
    return theta, cost
