"""What others would choose: the state of the art and simple rules, so that a user sees what is gained.

Each rule is a function over a table of settings (measured, or predicted where nothing else is known) that returns a
row, or ``None`` where it finds nothing that fits. The published algorithm, last, works on measurements themselves.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from underwatt.errors import BudgetError, InputError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from underwatt.budget import Budget
    from underwatt.planning.problem import Outlook, Problem
    from underwatt.predict.base import Floats, SettingArray
    from underwatt.records import Measurement, PowerMode

# The first of these that may be set is "the clock" of the published baseline; all else stays at its highest.
CLOCKS = ("gpu_mhz", "power_limit_w", "mem_mhz", "cpu_mhz", "cpu_cores")


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """Settings with their time to target, time per sample, and the watts that the budget bounds."""

    settings: SettingArray
    time_s: Floats
    sample_s: Floats
    drawn_w: Floats

    @classmethod
    def measured(cls, problem: Problem, measurements: Sequence[Measurement]) -> Table:
        """The truth: one measurement for each candidate of the problem, in their order."""
        if len(measurements) != len(problem):
            raise InputError(f"{len(measurements)} measurements cannot describe {len(problem)} candidates.")
        step_s = np.array([m.step_s for m in measurements])
        drawn_w = np.array([problem.budget.drawn_w(m) for m in measurements])
        time_s = step_s * np.exp(problem.log_steps)
        return cls(problem.candidates, time_s, step_s / problem.candidates.batch_size, drawn_w)

    @classmethod
    def predicted(cls, problem: Problem, outlook: Outlook) -> Table:
        """What is expected of each candidate, taken at its word."""
        sample_s = np.exp(outlook.log_time_s - problem.log_steps) / problem.candidates.batch_size
        return cls(problem.candidates, np.exp(outlook.log_time_s), sample_s, np.exp(outlook.log_drawn_w))

    def fits(self, power_w: float) -> NDArray[np.bool_]:
        """Which settings keep the watts."""
        return np.asarray(self.drawn_w <= power_w)


def oracle(table: Table, power_w: float) -> int | None:
    """The best setting that fits: what a planner that knew the table would choose, or one that trusts predictions."""
    return _smallest(table.time_s, table.fits(power_w))


def fastest_throughput(table: Table, power_w: float) -> int | None:
    """The most samples a second that fit, whatever the batch size does to convergence."""
    return _smallest(table.sample_s, table.fits(power_w))


def largest_batch(table: Table, power_w: float) -> int | None:
    """The largest batch, the GPU clock (or power limit) as high as fits, all else at its highest: the paper's baseline.

    Where a batch size fits at no clock, the next smaller one is taken. ``None`` where none fits: lowering the CPU or
    the memory instead would be another method, and often a much slower one.
    """
    return _highest(table.settings, by_clock_alone(table.settings) & table.fits(power_w))


def default_batch(table: Table, power_w: float) -> int | None:
    """The middle batch size in place of the largest, otherwise the same rule."""
    small = table.settings.batch_size <= _middle_batch(table)
    return _highest(table.settings, small & by_clock_alone(table.settings) & table.fits(power_w))


def maximum_mode(table: Table) -> int | None:
    """Every knob at its highest with the middle batch size: what a user gets who never heard of power modes."""
    return _highest(table.settings, table.settings.batch_size == _middle_batch(table))


def stock_mode(table: Table, power_w: float, modes: Mapping[str, PowerMode]) -> tuple[str, int] | None:
    """The fastest of the device's named modes that fits, with the middle batch size; the thriftiest where none fits.

    Modes that are not in the table are left out.
    """
    found: list[tuple[bool, float, str, int]] = []  # the best first
    settings, fits = table.settings, table.fits(power_w)
    for name, mode in modes.items():
        same = settings.batch_size == _middle_batch(table)
        for knob, value in mode.knobs().items():
            column = settings.column(knob)
            same = same & (column == value if column is not None else False)
        for over, values, rows in ((False, table.time_s, same & fits), (True, table.drawn_w, same)):
            row = _smallest(values, rows)
            if row is not None:
                found.append((over, float(values[row]), name, row))
    return min(found)[2:] if found else None


def by_clock_alone(settings: SettingArray) -> NDArray[np.bool_]:
    """The settings of the published method: every value of the clock, all other knobs at their highest."""
    clock = next((name for name in CLOCKS if name in settings.knobs), None)
    values = settings.values[:, [name != clock for name in settings.knobs]]
    return np.asarray(np.all(values == values.max(axis=0, initial=0.0), axis=1))


def _middle_batch(table: Table) -> float:
    sizes = np.unique(table.settings.batch_size)
    return float(sizes[(len(sizes) - 1) // 2])


def _highest(settings: SettingArray, allowed: NDArray[np.bool_]) -> int | None:
    """Of the allowed rows, the one of the largest batch and, among those, of the highest clocks."""
    rows = np.flatnonzero(allowed)
    columns = [settings.batch_size, *(settings.column(name) for name in CLOCKS)]
    order = np.lexsort([-column[rows] for column in reversed(columns) if column is not None])
    return int(rows[order[0]]) if len(rows) else None


def _smallest(values: Floats, allowed: NDArray[np.bool_]) -> int | None:
    allowed = allowed & np.isfinite(values)
    return int(np.argmin(np.where(allowed, values, np.inf))) if np.any(allowed) else None


def choose_published(
    measurements: Sequence[Measurement], samples_to_target: Mapping[int, float], budget: Budget
) -> Measurement:
    """The algorithm of "Accelerated Training on Low-Power Edge Devices" (TMLR 2025), exactly.

    Every setting was measured, every batch size was trained on proxy data: of the settings whose power fits, the one
    with the smallest time per sample × samples to target. No prediction, no uncertainty. Batch sizes that are not in
    ``samples_to_target``, or never reach the target (NaN or inf), are left out. Only the budget's watts count.

    Raises ``BudgetError`` where no measured setting fits.
    """
    usable = []
    for m in measurements:
        samples = samples_to_target.get(m.setting.batch_size, math.inf)
        if m.usable and math.isfinite(samples):
            usable.append((m.step_s / m.setting.batch_size * samples, m))
    if not usable:
        raise InputError(
            "No measured setting has a batch size whose samples to target are known.",
            hint="Measure settings at the batch sizes of the proxy runs.",
        )
    fitting = [(time_s, m) for time_s, m in usable if budget.allows(m)]
    if not fitting:
        smallest_w = min(budget.drawn_w(m) for _, m in usable)
        raise BudgetError(
            f"No measured setting keeps the budget of {budget}.",
            hint=f"The smallest budget that one keeps is {smallest_w:.4g} W.",
        )
    return min(fitting, key=lambda found: found[0])[1]
