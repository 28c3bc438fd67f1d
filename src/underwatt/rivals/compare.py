"""What simpler and published rules would take, beside the choice: so that a user sees what is gained.

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
from underwatt.errors import InputError, OutOfMemoryError, UnderwattError
from underwatt.planning.choice import RISK, Candidates, outlook_as_known
from underwatt.planning.problem import ROUNDING, Goal, Outlook, Problem, keeps, rows_of
from underwatt.predict.base import take_rows
from underwatt.predict.design import fits_memory
from underwatt.rivals.choices import (
    Table,
    choose_published,
    default_batch,
    fastest_throughput,
    largest_batch,
    maximum_mode,
    oracle,
    stock_mode,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from underwatt.budget import Budget
    from underwatt.device.base import Device
    from underwatt.planning.choice import Expectation
    from underwatt.predict.base import Floats, SettingArray
    from underwatt.records import Measurement, PowerMode, Prediction, Setting, WorkloadCost

Fits = Literal["yes", "risky", "over"]
Known = Literal["measured", "predicted", "truth"]

# The rules that lower one clock, in the order of the comparison; the first is the paper's baseline.
LARGEST, MIDDLE = "largest batch, highest clock", "middle batch, highest clock"
PUBLISHED = "published method, settings measured so far"
JOINT = "; "  # between the names of rules that choose the same
# A table of one setting leaves the published method nothing to choose.
FEWEST_TO_CHOOSE = 2


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
        PUBLISHED: _published(part, measurements),
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
    """Which rules of one clock find nothing within the budget, in one sentence; empty where both find something."""
    lacking = [name for name in (LARGEST, MIDDLE) if not any(other.name == name for other in others)]
    if not lacking:
        return ""
    return f"No setting for {' and for '.join(lacking)}: with all else at its highest, no clock keeps the budget."


def too_few_for_published(others: Sequence[Alternative]) -> str:
    """Why there is no row for the published method, in one sentence; empty where there is one."""
    if any(other.name == PUBLISHED for other in others):
        return ""
    return "No row for the published method: it chooses among measured settings, and fewer than two of them fit."


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


def _published(problem: Problem, measurements: Sequence[Measurement]) -> int | None:
    """The published method over what was measured; ``None`` where that leaves it nothing to choose from."""
    offered = [m for m in measurements if m.usable and len(rows_of(problem.candidates, m.setting))]
    if len({m.setting for m in offered if problem.budget.allows(m)}) < FEWEST_TO_CHOOSE:
        return None
    sizes = problem.candidates.batch_size
    samples = dict(zip(sizes.tolist(), (np.exp(problem.log_steps) * sizes).tolist(), strict=True))
    try:
        chosen = choose_published(offered, samples, problem.budget)
    except UnderwattError:
        return None  # no batch size among them reaches the target
    return int(rows_of(problem.candidates, chosen.setting)[0])


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
