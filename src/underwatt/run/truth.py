"""The truth about every setting, where a device has one to tell: for judging a choice, never for making it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from underwatt.device.replay import ReplayDevice
from underwatt.device.virtual.device import VirtualJetson
from underwatt.errors import OutOfMemoryError
from underwatt.physics import Clocks, step_power, step_times
from underwatt.plan.compare import Truth
from underwatt.plan.problem import rows_of
from underwatt.tables import read_measurements

if TYPE_CHECKING:
    from underwatt.device.base import Device
    from underwatt.predict import SettingArray
    from underwatt.records import WorkloadCost


def truth_of(device: Device | None, candidates: SettingArray, cost: WorkloadCost | None) -> Truth | None:
    """True time and power of each candidate: of a virtual board that runs a job of known cost, or of a replayed table.

    ``None`` for everything else: nobody knows the truth about a real device.
    """
    if isinstance(device, VirtualJetson) and cost is not None:
        return _simulated(device, candidates, cost)
    if isinstance(device, ReplayDevice):
        return _recorded(device, candidates)
    return None


def _simulated(device: VirtualJetson, candidates: SettingArray, cost: WorkloadCost) -> Truth:
    """All candidates at once; setting by setting, ``VirtualBoard.true_step_s`` says the same."""
    board, sizes = device.board, candidates.batch_size
    left_alone = board.mode.knobs()
    columns = [
        np.full(len(sizes), left_alone[name]) if (column := candidates.column(name)) is None else column
        for name in ("cpu_cores", "cpu_mhz", "gpu_mhz", "mem_mhz")
    ]
    clocks, physics = Clocks(*columns), board.spec.physics
    times = step_times(physics.step_constants(cost), clocks, sizes)
    runs = np.ones(len(sizes), dtype=bool)
    for size in np.unique(sizes):
        try:
            board.check_memory(cost, int(size))
        except OutOfMemoryError:
            runs &= sizes != size
    power_w = step_power(physics.power, clocks, times).total_w
    return Truth("simulated truth", np.where(runs, times.step_s, np.nan), np.where(runs, power_w, np.nan))


def _recorded(device: ReplayDevice, candidates: SettingArray) -> Truth:
    step_s, power_w = np.full(len(candidates), np.nan), np.full(len(candidates), np.nan)
    for measurement in read_measurements(device.info.address.removeprefix("replay:")):
        if measurement.usable:
            rows = rows_of(candidates, measurement.setting)
            step_s[rows], power_w[rows] = measurement.step_s, measurement.power_w
    return Truth("recorded table", step_s, power_w)
