"""What is true of a virtual board, and what an oracle that knows it would do; nothing here is known to a controller."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from underwatt.budget import Budget
from underwatt.drivers.virtual.board_specs import REFERENCE_C
from underwatt.drivers.virtual.physics import Clocks, idle_power, step_power, step_times
from underwatt.drivers.virtual.simulated_board import POWER_NOISE, STALL_WORTH_SEEING
from underwatt.planning.problem import can_pause

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from edge import World
    from underwatt.drivers.virtual.simulated_board import VirtualBoard

    Floats = NDArray[np.float64]

GRID_W = 0.02  # of the watts at which the oracle's rate is tabled
READING_S = 0.1
# A run has some 10,000 steps: so many standard deviations above the mean, hardly one of them is to be expected.
RARE = 4.0


class Truth:
    """Fastest true progress at every budget, temperature and load, and the least that the board can draw.

    Under mean watts the oracle may pause, at the clocks of its setting, where steps are short enough to keep the mean
    steady. Under peak watts it uses settings of which hardly any true reading is ever above them.
    """

    def __init__(self, world: World, board: VirtualBoard, *, peak: bool = False) -> None:
        settings, physics, thermal = world.settings, board.spec.physics, board.spec.thermal
        clocks = Clocks(*(settings.column(name) for name in ("cpu_cores", "cpu_mhz", "gpu_mhz", "mem_mhz")))
        waits_w = idle_power(physics.power, clocks).total_w
        rates = 1 / world.time_s
        self._thermal = thermal
        # Static power grows with temperature, alike for all settings.
        self._slope = float(physics.power.static_w * thermal.leakage_per_c)
        self._least_w = float(waits_w.min())
        self._grid_w = np.arange(waits_w.min(), world.power_w.max() * 1.1, GRID_W)
        if peak:
            order = np.argsort(peaks_w := highest_w(world, board, clocks))
            best = np.concatenate([[0.0], np.maximum.accumulate(rates[order])])
            self._rate = best[np.searchsorted(peaks_w[order], self._grid_w, "right")]
            return
        step_s = step_times(physics.step_constants(world.cost), clocks, settings.batch_size).step_s

        def fastest(left_w: float) -> float:
            share = np.clip((left_w - waits_w) / (world.power_w - waits_w), 0.0, 1.0)
            return float((rates * share * can_pause(world.power_w, step_s, Budget(power_w=left_w))).max())

        self._rate = np.array([fastest(float(left_w)) for left_w in self._grid_w])

    def rate(self, budget_w: float, temperature_c: float, extra_w: float, slower: float) -> float:
        """Share of the training a second, at best."""
        left_w = budget_w - extra_w - self._slope * (temperature_c - REFERENCE_C)
        return float(np.interp(left_w, self._grid_w, self._rate, left=0.0)) / slower

    def least_w(self, extra_w: Floats, room_c: Floats, tick_s: float) -> Floats:
        """What the board draws at the least, tick by tick: it only waits, at its lowest clocks, and stays cool."""
        thermal, found = self._thermal, []
        keep = np.exp(-tick_s / (thermal.resistance_c_per_w * thermal.capacity_j_per_c))
        temperature_c = float(room_c[0]) + thermal.resistance_c_per_w * self._least_w
        for more_w, around_c in zip(extra_w.tolist(), room_c.tolist(), strict=True):
            power_w = self._least_w + self._slope * (temperature_c - REFERENCE_C) + more_w
            final_c = around_c + thermal.resistance_c_per_w * power_w
            temperature_c = final_c + (temperature_c - final_c) * keep
            found.append(power_w)
        return np.array(found)


def highest_w(world: World, board: VirtualBoard, clocks: Clocks) -> Floats:
    """The highest true reading that each setting shows in a run, at the reference temperature.

    A step waits for data, then works; a reading is the mean of the tenth of a second that holds most of the work.
    """
    physics = board.spec.physics
    times = step_times(physics.step_constants(world.cost), clocks, world.settings.batch_size)
    mean, idle = step_power(physics.power, clocks, times), idle_power(physics.power, clocks)
    stalls = times.step_s - times.work_s >= STALL_WORTH_SEEING * times.step_s
    work_s = np.where(stalls, times.work_s, times.step_s)
    more = times.step_s / work_s
    wait_w: Any = mean.static_w + mean.cpu_w + idle.gpu_w + idle.mem_w
    work_w = wait_w + (mean.gpu_w - idle.gpu_w + mean.mem_w - idle.mem_w) * more
    whole, rest_s = np.divmod(READING_S, times.step_s)
    work_j = np.minimum(rest_s, work_s) * work_w + np.maximum(rest_s - work_s, 0.0) * wait_w
    most_w = (whole * times.step_s * mean.total_w + work_j) / READING_S
    noise = RARE * POWER_NOISE / np.sqrt(np.maximum(1.0, READING_S / times.step_s))
    return np.asarray(most_w + noise * (most_w - mean.static_w))
