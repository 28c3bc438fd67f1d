"""The physics model's constants from a table of measured modes: seven for time, five for power.

PowerTrain's tables were made after ``jetson_clocks``, which switches cpuidle off: so it is here.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from underwatt.drivers.virtual.physics import (
    ClockedPart,
    Clocks,
    Floats,
    PowerConstants,
    StepConstants,
    StepTimes,
    busy_cores,
    step_power,
    step_times,
)

# Shapes assumed for every board alike: a chip's voltage about halves towards its lowest clock (usual for mobile chips),
# memory voltage is fixed, and a fifth of a busy part's power is its clock tree, drawn when idle too. Chosen
# with the Orin training tables in view, but they matter little: 0.4 to 0.6 V and a tenth to three tenths change the
# power error there by at most 0.3 points.
LOW_V, HIGH_V = 0.5, 1.0
IDLE_SHARE = 0.2
POWER_CONSTANTS = 5

_TIME_BOUNDS = {  # of the constants that are no cycles
    "load_workers": (1.0, 64.0, 6.0),
    "load_core_exponent": (0.3, 3.0, 1.2),
    "exposed_memory": (0.01, 1.0, 0.25),
}
_CYCLES = (
    "compute_mcycles_per_sample",
    "launch_mcycles_per_step",
    "load_mcycles_per_sample",
    "memory_mcycles_per_sample",
)
_CYCLES_BATCH = ("compute_mcycles_per_step", "memory_mcycles_per_step")
# Which arm is slow where differs between workloads: start once from each arm's point of view.
_STARTS = ((0.6, 0.3, 0.6, 0.4), (0.9, 0.1, 0.1, 0.5), (0.3, 0.9, 0.3, 0.3), (0.3, 0.1, 0.9, 0.9))


@dataclass(frozen=True, slots=True)
class Fit:
    """Fitted constants, how many numbers were adjusted, and the mean error left on the table, in percent."""

    step: StepConstants
    power: PowerConstants
    constants: int
    time_mape: float
    power_mape: float


def fit(clocks: Clocks, batch_size: Floats, step_s: Floats, power_w: Floats) -> Fit:
    """Fit time, then power from the busy times that the fitted time implies."""
    step, adjusted = fit_step(clocks, batch_size, step_s)
    times = step_times(step, clocks, batch_size)
    power = fit_power(clocks, times, power_w)
    watts = step_power(power, clocks, times, cpuidle=False).total_w
    return Fit(step, power, adjusted + POWER_CONSTANTS, mape(times.step_s, step_s), mape(watts, power_w))


def mape(predicted: Floats, measured: Floats) -> float:
    """Mean absolute error in percent of what was measured."""
    return float(100 * np.mean(np.abs(predicted / measured - 1)))


def fit_step(clocks: Clocks, batch_size: Floats, step_s: Floats) -> tuple[StepConstants, int]:
    """Step constants from step times, and how many were adjusted (two more where the batch size varies)."""
    from scipy.optimize import least_squares

    batched = len(np.unique(batch_size)) > 1
    names = _CYCLES + tuple(_TIME_BOUNDS) + (_CYCLES_BATCH if batched else ())
    scale = float(np.median(step_s))
    batch = float(np.median(batch_size))
    cycles = {  # millions of cycles that alone would fill a median step
        "compute_mcycles_per_sample": scale * float(np.median(clocks.gpu_mhz)) / batch,
        "launch_mcycles_per_step": scale * float(np.median(clocks.cpu_mhz)),
        "load_mcycles_per_sample": scale * float(np.median(clocks.cpu_mhz * clocks.cpu_cores)) / batch,
        "memory_mcycles_per_sample": scale * float(np.median(clocks.mem_mhz)) / batch,
        "compute_mcycles_per_step": scale * float(np.median(clocks.gpu_mhz)),
        "memory_mcycles_per_step": scale * float(np.median(clocks.mem_mhz)),
    }
    low = [cycles[n] * 1e-6 if n in cycles else _TIME_BOUNDS[n][0] for n in names]
    high = [cycles[n] * 1e3 if n in cycles else _TIME_BOUNDS[n][1] for n in names]

    def unpack(theta: Floats) -> StepConstants:
        return StepConstants(**dict(zip(names, np.exp(theta).tolist(), strict=True)))

    def residual(theta: Floats) -> Floats:
        return np.log(step_times(unpack(theta), clocks, batch_size).step_s / step_s)

    best = None
    for start in _STARTS:
        shares = dict(zip(_CYCLES, start, strict=True)) | dict.fromkeys(_CYCLES_BATCH, 0.1)
        first = [cycles[n] * shares[n] if n in cycles else _TIME_BOUNDS[n][2] for n in names]
        # Soft L1: a table holds modes that were measured while something else ran.
        found = least_squares(
            residual, np.log(first), bounds=(np.log(low), np.log(high)), loss="soft_l1", f_scale=0.05, max_nfev=100
        )
        if best is None or found.cost < best.cost:
            best = found
    assert best is not None
    return unpack(best.x), len(names)


def fit_power(clocks: Clocks, times: StepTimes, power_w: Floats) -> PowerConstants:
    """Power constants from watts and from how busy each part was."""
    from scipy.optimize import lsq_linear

    columns = _columns(clocks, times)
    weights = 1 / power_w
    solution = np.ones(columns.shape[1])
    for _ in range(20):  # reweighting towards the mean absolute percentage error
        solution = lsq_linear(columns * weights[:, None], power_w * weights, (0.0, np.inf)).x
        off = np.abs(columns @ solution / power_w - 1)
        weights = 1 / (power_w * np.sqrt(np.maximum(off, 0.005)))
    return _as_constants(solution, clocks)


def _columns(clocks: Clocks, times: StepTimes) -> Floats:
    """Power is linear in five numbers: the watts of static, GPU, one core, idle memory and busy memory at the top."""
    gpu, core, mem = (_unit_rail(float(np.max(mhz))) for mhz in (clocks.gpu_mhz, clocks.cpu_mhz, clocks.mem_mhz))
    cores = IDLE_SHARE * clocks.cpu_cores + (1 - IDLE_SHARE) * busy_cores(times, clocks)
    mem_clock = clocks.mem_mhz / mem.top_mhz
    return np.stack(
        [
            np.ones_like(times.step_s),
            gpu.watts(clocks.gpu_mhz, times.busy_gpu_s / times.step_s),
            core.watts_of(clocks.cpu_mhz) * cores,
            mem_clock,
            mem_clock * times.memory_s / times.step_s,
        ],
        axis=1,
    )


def _unit_rail(top_mhz: float, watts: float = 1.0) -> ClockedPart:
    """A rail that draws so many watts when busy at its top clock."""
    return ClockedPart(1e3 * watts / (HIGH_V**2 * top_mhz), top_mhz, LOW_V, HIGH_V, IDLE_SHARE)


def _as_constants(weights: Floats, clocks: Clocks) -> PowerConstants:
    static_w, gpu_w, core_w, mem_idle_w, mem_busy_w = (float(w) for w in weights)
    top_mhz = float(np.max(clocks.mem_mhz))
    mem_w = mem_idle_w + mem_busy_w
    return PowerConstants(
        static_w=static_w,
        gpu=_unit_rail(float(np.max(clocks.gpu_mhz)), gpu_w),
        cpu_core=_unit_rail(float(np.max(clocks.cpu_mhz)), core_w),
        mem=ClockedPart(
            1e3 * mem_w / (HIGH_V**2 * top_mhz), top_mhz, HIGH_V, HIGH_V, mem_idle_w / mem_w if mem_w else 0.0
        ),
    )
