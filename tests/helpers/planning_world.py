"""A made-up device whose truth is a formula: three knobs' worth of structure, no noise, some batch sizes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from underwatt.budget import Budget
from underwatt.planning.problem import Goal, Problem
from underwatt.predict.base import SettingArray
from underwatt.records import Measurement, PowerMode, Setting, Status

GPU_MHZ = (200.0, 300.0, 400.0, 500.0, 600.0, 800.0, 1000.0, 1200.0)
CPU_MHZ = (500.0, 1000.0, 1500.0, 2000.0)
BATCH_SIZES = (4, 8, 16, 32, 64)
KNOBS = ("cpu_mhz", "gpu_mhz")


class Curve:
    """Samples to target that rise at both ends, like real ones; 64 never gets there if ``hopeless``."""

    def __init__(self, *, std: float = 0.0, hopeless: bool = False) -> None:
        self.std, self.hopeless = std, hopeless

    def predict(self, batch_sizes):
        sizes = np.asarray(batch_sizes, float)
        mean = np.log(1e4 * (1 + sizes / 40 + (3 / sizes) ** 2))
        if self.hopeless:
            mean = np.where(sizes >= 64, np.inf, mean)
        return mean, np.full(len(sizes), self.std)


def truth(setting: Setting) -> Measurement:
    """What the made-up device does at a setting."""
    mode = setting.mode.knobs()
    step_s = 0.5 * setting.batch_size / mode["gpu_mhz"] + 12.0 / mode["cpu_mhz"]
    busy = 0.5 * setting.batch_size / mode["gpu_mhz"] / step_s
    power_w = 3.0 + 10.0 * (0.2 + 0.8 * busy) * (mode["gpu_mhz"] / 1200.0) ** 2 + 2.0 * mode["cpu_mhz"] / 2000.0
    return Measurement(setting, step_s=step_s, power_w=power_w, peak_w=1.2 * power_w)


def candidates() -> SettingArray:
    modes = np.array([[cpu, gpu] for cpu in CPU_MHZ for gpu in GPU_MHZ])
    return SettingArray.product(KNOBS, modes, BATCH_SIZES)


def problem(budget: Budget, *, goal: Goal = Goal.SOONEST, curve: Curve | None = None) -> Problem:
    return Problem.of(candidates(), budget, curve or Curve(), goal)


def everything() -> tuple[Measurement, ...]:
    settings = candidates()
    return tuple(truth(settings[row]) for row in range(len(settings)))


def out_of_memory_from(batch_size: int):
    """A device that cannot hold large batches."""

    def measure(setting: Setting) -> Measurement:
        if setting.batch_size >= batch_size:
            return Measurement(setting, status=Status.OUT_OF_MEMORY)
        return truth(setting)

    return measure


def at(cpu_mhz: float, gpu_mhz: float, batch_size: int) -> Setting:
    return Setting(PowerMode(cpu_mhz=cpu_mhz, gpu_mhz=gpu_mhz), batch_size)


def slower(measurement: Measurement, factor: float) -> Measurement:
    return replace(measurement, step_s=factor * measurement.step_s)
