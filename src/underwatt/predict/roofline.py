"""Step time and power as formulas of the clocks: physics with some thirty constants that measurements pin down.

A step is compute (arithmetic against memory traffic), launched by the CPU, while the CPU loads the next batch;
the slowest of them sets the pace, softly. Power is what is always on, plus what each clock costs when idle, plus
what each unit draws while it is busy. All in logs; see ``dual`` for how the derivatives come along.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np

from underwatt.predict.dual import Dual, add, smooth_max

if TYPE_CHECKING:
    from numpy.typing import NDArray

# How soft the corner is where more cores stop helping; fixed, as no table tells it apart from the cap itself.
CORE_CAP_SHARPNESS = np.log(6.0)
# What stands in for a power limit where there is none: log watts above anything a device draws.
NO_LIMIT = 12.0


@dataclass(frozen=True, slots=True)
class Constant:
    """What is believed of one constant before anything is measured; ``scale`` says what it is relative to."""

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

    cores: NDArray[np.float64]
    cpu: NDArray[np.float64]
    gpu: NDArray[np.float64]
    mem: NDArray[np.float64]
    batch: NDArray[np.float64]
    limit: NDArray[np.float64]  # log watts, relative to the highest limit
    log_limit_w: NDArray[np.float64]  # log watts; ``NO_LIMIT`` where there is none

    def __len__(self) -> int:
        return len(self.cores)

    def take(self, rows: slice) -> Inputs:
        """Some of the settings."""
        return Inputs(*(getattr(self, field.name)[rows] for field in fields(self)))


def evaluate(theta: NDArray[np.float64], x: Inputs) -> tuple[Dual, Dual]:
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
