"""What others would choose, beside the choice: the state of the art and simple rules, so that a user sees the gain.

Each rule is a function over a table of settings (measured, or predicted where nothing else is known) that returns a
row, or ``None`` where it finds nothing that fits.

Every rule is judged by one outlook: what was measured where it was measured, predictions elsewhere. Only the oracle is
judged by a truth, which exists for simulated boards and recorded tables alone, and which no choice is made from. The
rules know no pauses between steps; the oracle does where the problem allows them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from underwatt.budget import Watts
from underwatt.csv_tables import read_measurements
from underwatt.drivers.replay import ReplayDevice
from underwatt.drivers.virtual.device import VirtualJetson
from underwatt.drivers.virtual.physics import Clocks, step_power, step_times
from underwatt.errors import InputError, OutOfMemoryError
from underwatt.planning.choice import RISK, Candidates, outlook_as_known
from underwatt.planning.problem import ROUNDING, Goal, Outlook, Problem, keeps, rows_of
from underwatt.predict.base import take_rows
from underwatt.predict.design import fits_memory

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from underwatt.budget import Budget
    from underwatt.device.base import Device
    from underwatt.planning.choice import Expectation
    from underwatt.predict.base import Floats, SettingArray
    from underwatt.records import Measurement, PowerMode, Prediction, Setting, WorkloadCost

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


def published(table: Table, power_w: float) -> int | None:
    """The method of "Accelerated Training on Low-Power Edge Devices" (TMLR 2025): the best batch size and clock.

    Every pair was measured and every batch size trained on proxy data: of those that fit, the smallest time per sample
    × samples to target. All other knobs stay at their highest, and nothing pauses.
    """
    return _smallest(table.time_s, by_clock_alone(table.settings) & table.fits(power_w))


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


# The comparison.

Fits = Literal["yes", "risky", "over"]
Known = Literal["measured", "predicted", "truth"]

# The rules that lower one clock, in the order of the comparison; the first is the paper's baseline.
LARGEST, MIDDLE = "largest batch that fits, highest clock", "middle batch or less, highest clock"
PUBLISHED = "published method, batch and clock"
JOINT = "; "  # between the names of rules that choose the same


@dataclass(frozen=True, slots=True)
class Alternative:
    """What a rule would choose, and what that takes to the target; ``time_s`` is inf where it is never reached."""

    name: str
    setting: Setting
    time_s: float
    energy_j: float
    power_w: float  # mean power, whatever the budget bounds
    fits: Fits  # "risky" keeps the budget as expected, but not at the accepted risk, or not up to its interval's end
    known: Known


@dataclass(frozen=True, slots=True, eq=False)
class Truth:
    """True step time and mean power of every candidate, NaN where not known or not possible; ``name`` says whose."""

    name: str
    step_s: Floats
    power_w: Floats


def compare(
    problem: Problem,
    prediction: Prediction,
    measurements: Sequence[Measurement],
    *,
    risk: float = RISK,
    stock_modes: Mapping[str, PowerMode] | None = None,
    powertrain: Prediction | None = None,
    truth: Truth | None = None,
) -> tuple[Alternative, ...]:
    """What each rule would choose among the candidates; rules that find nothing are left out, see ``cannot_keep``.

    ``powertrain`` is PowerTrain's prediction for each candidate: its choice is the fastest that it expects to fit.
    """
    if truth is not None and not len(truth.step_s) == len(truth.power_w) == len(problem):
        raise InputError(f"A truth of {len(truth.step_s)} settings cannot describe {len(problem)} candidates.")
    rows = np.flatnonzero(fits_memory(problem.candidates, measurements))
    part, budget = problem.take(rows), problem.budget
    judged = Candidates(replace(part, idle_w=None), take_rows(prediction, rows), measurements)
    kept = judged.outlook.keeps(budget)
    # Per sample, also where the target is never reached: throughput alone does not know of targets.
    a_sample, _ = outlook_as_known(Problem.of(part.candidates, budget), take_rows(prediction, rows), measurements)
    logs = (judged.outlook.log_time_s, a_sample.log_time_s, judged.outlook.log_drawn_w)
    table, watts = Table(part.candidates, *map(np.exp, logs)), (budget.power_w or math.inf) * ROUNDING
    stock = stock_mode(table, watts, stock_modes or {})
    named = {
        LARGEST: largest_batch(table, watts),
        MIDDLE: default_batch(table, watts),
        **({f"vendor's {stock[0]}": stock[1]} if stock else {}),
        "maximum mode": maximum_mode(table),
        "most samples/s": fastest_throughput(table, watts),
        PUBLISHED: published(table, watts),
    }
    if powertrain is not None:
        seen = Outlook.without_pauses(part, take_rows(powertrain, rows), measurements)
        named["PowerTrain's choice"] = oracle(Table.predicted(part, seen), watts)  # unmeasured, taken at its word
    chosen = {name: row for name, row in named.items() if row is not None}
    expected = judged.expect(np.array([*chosen.values()], dtype=np.intp))
    found = [
        as_alternative(name, one, budget, risk, keeps_it=bool(kept[row]))
        for (name, row), one in zip(chosen.items(), expected, strict=True)
    ]
    best_of_all = None if truth is None else _oracle(part, truth.name, truth.step_s[rows], truth.power_w[rows])
    return tuple(found) if best_of_all is None else (*found, best_of_all)


def cannot_keep(others: Sequence[Alternative]) -> str:
    """Which rules of one clock find nothing within the budget, in one sentence; empty where all find something."""
    lacking = [name for name in (LARGEST, MIDDLE, PUBLISHED) if not any(other.name == name for other in others)]
    if not lacking:
        return ""
    return f"No setting for {' and for '.join(lacking)}: with all else at its highest, no clock keeps the budget."


def joined(others: Sequence[Alternative]) -> tuple[Alternative, ...]:
    """One entry for rules that choose the same, with their names together; the truth is never joined with a guess."""
    same: dict[tuple[Setting, Known], list[Alternative]] = {}
    for other in others:
        same.setdefault((other.setting, other.known), []).append(other)
    return tuple(replace(group[0], name=JOINT.join(other.name for other in group)) for group in same.values())


def as_alternative(
    name: str, expected: Expectation, budget: Budget, risk: float = RISK, *, keeps_it: bool | None = None
) -> Alternative:
    """A setting of a plan, such as a neighbour on the front, in the form of the others.

    Whether it keeps the budget as expected is left to its chance where ``keeps_it`` does not say.
    """
    figures = (expected.power_w.expected, expected.time_s.expected, expected.energy_j.expected)
    power_w, time_s, energy_j = figures
    if keeps_it is None:
        keeps_it = expected.chance_over <= 0.5
    # One that was measured may keep it by its means, though the end of its interval does not; peaks have no means.
    may_keep = expected.measured and budget.watts is not Watts.PEAK and bool(keeps(budget, *figures))
    fits: Fits = "risky" if keeps_it or may_keep else "over"
    if keeps_it and expected.chance_over <= risk:
        fits = "yes"
    known: Known = "measured" if expected.measured else "predicted"
    return Alternative(name, expected.setting, time_s, energy_j, power_w, fits, known)


def _oracle(problem: Problem, whose: str, step_s: Floats, steps_w: Floats) -> Alternative | None:
    """The best candidate by the truth about time and power; samples to target are those of the problem."""
    budget = problem.budget
    if budget.power_w is not None and budget.watts is Watts.PEAK:
        return None  # the truth holds mean watts
    busy = problem.busy_share(steps_w, step_s)
    power_w = steps_w if budget.power_w is None else np.where(busy < 1, budget.power_w, steps_w)
    time_s = step_s * np.exp(problem.log_steps) / busy
    energy_j = time_s * power_w
    allowed = np.isfinite(energy_j) & keeps(budget, power_w, time_s, energy_j)
    if not np.any(allowed):
        return None
    row = int(np.argmin(np.where(allowed, time_s if problem.goal is Goal.SOONEST else energy_j, np.inf)))
    took = (float(time_s[row]), float(energy_j[row]), float(power_w[row]))
    return Alternative(f"oracle ({whose})", problem.candidates[row], *took, "yes", "truth")


def truth_of(device: Device | None, candidates: SettingArray, cost: WorkloadCost | None) -> Truth | None:
    """True time and power of each candidate: of a virtual board that runs a job of known cost, or of a replayed table.

    For judging a choice, never for making it. ``None`` for everything else: nobody knows the truth about a real device.
    """
    if isinstance(device, VirtualJetson) and cost is not None:
        return _simulated(device, candidates, cost)
    if isinstance(device, ReplayDevice):
        return _recorded(device, candidates)
    return None


def _simulated(device: VirtualJetson, candidates: SettingArray, cost: WorkloadCost) -> Truth:
    """All candidates at once; setting by setting, ``VirtualBoard.true_step_s`` says the same."""
    board, sizes = device.board, candidates.batch_size
    left_alone = {name: np.full(len(sizes), value) for name, value in board.mode.knobs().items()}
    knobs = left_alone | dict(zip(candidates.knobs, candidates.values.T, strict=True))
    clocks = Clocks(knobs["cpu_cores"], knobs["cpu_mhz"], knobs["gpu_mhz"], knobs["mem_mhz"])
    physics = board.spec.physics
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
    step_s, power_w = np.full((2, len(candidates)), np.nan)
    for measurement in read_measurements(device.info.address.removeprefix("replay:")):
        if measurement.usable:
            rows = rows_of(candidates, measurement.setting)
            step_s[rows], power_w[rows] = measurement.step_s, measurement.power_w
    return Truth("recorded table", step_s, power_w)
