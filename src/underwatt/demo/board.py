"""One board of the demo: a few settings measured, two budgets planned for, a training under each."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from underwatt.api.lookup import every_setting, spread_settings
from underwatt.budget import Budget, Schedule
from underwatt.control.live_budget import LiveBudget
from underwatt.control.measured_search import measure_as_you_go
from underwatt.demo.job import BATCH_SIZES
from underwatt.device.session import Session
from underwatt.drivers.virtual.device import VirtualJetson, open_virtual
from underwatt.events import BudgetChanged, Started
from underwatt.jobs.job import Effort
from underwatt.jobs.load import RESNET18
from underwatt.jobs.runs import Run, RunOptions
from underwatt.jobs.training import Training
from underwatt.jobs.training_loop import train_under_budget
from underwatt.jobs.workloads import SimulatedWorkload
from underwatt.measure.meter import SAMPLE_PERIOD_S, Trace
from underwatt.measure.series import in_order, run_profile
from underwatt.planning.problem import Problem
from underwatt.records import Setting
from underwatt.runlog.run_record import RunRecord

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from underwatt.convergence.curve import ConvergenceCurve
    from underwatt.events import Event
    from underwatt.jobs._torch import torch
    from underwatt.jobs.job import Job
    from underwatt.planning.search import SearchResult
    from underwatt.predict.base import SettingArray
    from underwatt.records import Measurement, WorkloadInfo
    from underwatt.store.store import Store

    Tell = Callable[[Event], None]

TELLING = 4
MOST_A_BUDGET = 8  # settings to measure beyond those
EVALUATE_EVERY, LIMIT = 256, 150_000  # samples
# Where the two budgets lie between the least and the most that was measured.
TIGHT, ROOMY = 0.25, 0.75
NEAREST_W = 0.5


@dataclass(frozen=True, slots=True)
class Result:
    """What a training took on the simulated board, by the board's own count of joules."""

    time_s: float
    energy_j: float
    samples: float
    score: float | None = None  # none where nothing was trained
    reached: bool = True
    record: RunRecord | None = None  # true power, ten times a second, and the budget
    restored: bool = True
    computing_s: float = 0.0  # of this machine, beside the training

    @property
    def power_w(self) -> float:
        """Mean watts."""
        return self.energy_j / self.time_s


class Joules:
    """Counts from now on what a simulated board truly draws: no sensor, so nothing lags and nothing is excused."""

    def __init__(self, device: VirtualJetson) -> None:
        self._device = device
        self._begun_s, self._begun_j = device.clock.now_s(), device.board.energy_j
        self._counted: list[tuple[float, float]] = []
        self._timer = device.clock.every(SAMPLE_PERIOD_S, self._count)

    def _count(self) -> None:
        # Rounded, so that the count at a change of the budget is not one after it.
        self._counted.append((round(self._device.clock.now_s() - self._begun_s, 6), self._device.board.energy_j))

    def since(self) -> tuple[float, float]:
        """Seconds and joules so far."""
        return self._device.clock.now_s() - self._begun_s, self._device.board.energy_j - self._begun_j

    def under(self, schedule: Schedule) -> RunRecord:
        """Mean power between counts, against the budget as it was asked for."""
        self._timer.cancel()
        at_s, energy_j = np.array([(0.0, self._begun_j), *(row for row in self._counted if row[0] > 0)]).T
        steps = zip(schedule.begins_s, schedule.levels_w, strict=True)
        return RunRecord(
            tuple(BudgetChanged(at_s=begin_s, power_w=level_w) for begin_s, level_w in steps),
            Trace(at_s[1:], np.diff(energy_j) / np.diff(at_s), None, missed=0),
        )


@dataclass(frozen=True)
class Bench:
    """A board to try things on, and what is known of the job before: every training starts on a cold one."""

    board: str
    job: Job
    workload: WorkloadInfo
    curve: ConvergenceCurve
    store: Store
    folder: Path

    def device(self) -> VirtualJetson:
        """The board, cold and as it comes."""
        return open_virtual(self.board)

    def candidates(self) -> SettingArray:
        """Every power mode at every batch size."""
        return every_setting(self.device().space, BATCH_SIZES)


def measure_few(bench: Bench) -> tuple[Measurement, ...]:
    """The vendor's named modes at the middle batch size, and some settings that tell how the others behave."""
    device = bench.device()
    middle = BATCH_SIZES[len(BATCH_SIZES) // 2]
    named = [Setting(mode, middle) for mode in device.stock_modes().values()]
    telling = spread_settings(device.space, BATCH_SIZES, TELLING)
    workload = SimulatedWorkload(bench.workload, RESNET18, device)
    with Session(device) as session:
        return run_profile(session, workload, in_order([*named, *telling]), bench.store).measured


def budgets_w(measured: Sequence[Measurement]) -> tuple[float, float]:
    """A tight and a roomy budget within what was measured."""
    watts = [m.power_w for m in measured if m.usable]
    low_w, high_w = min(watts), max(watts)
    tight, roomy = (NEAREST_W * round((low_w + at * (high_w - low_w)) / NEAREST_W) for at in (TIGHT, ROOMY))
    return tight, roomy


def plan_for(bench: Bench, budget_w: float) -> SearchResult:
    """The best setting within a budget, found by measuring a few more where that promises something."""
    device = bench.device()
    problem = Problem.of(bench.candidates(), Budget(power_w=budget_w), bench.curve)
    workload = SimulatedWorkload(bench.workload, RESNET18, device)
    with Session(device) as session:
        return measure_as_you_go(session, workload, problem, bench.store, most=MOST_A_BUDGET)


def train_underwatt(bench: Bench, schedule: Schedule, folder: Path, tell: Tell) -> Result:
    """Train the job for real under a budget that changes, with what was measured before as known."""
    device = bench.device()
    found = dict(device.snapshot())
    joules: list[Joules] = []
    took: dict[str, tuple[float, float]] = {}

    def listen(event: Event) -> None:
        if isinstance(event, Started):
            joules.append(Joules(device))
        took[event.kind] = joules[0].since()
        tell(replace(event, at_s=took[event.kind][0]))

    live = LiveBudget(Budget(schedule=schedule))
    run = Run(RunOptions(), device, live, folder, bench.store, BATCH_SIZES, convergence=bench.curve, listener=listen)
    training = _Timed(bench.job, BATCH_SIZES[0])
    began_s = time.process_time()
    try:
        with contextlib.ExitStack() as stack:
            pilot = run.pilot(stack, bench.workload, cost=RESNET18)
            pilot.target = bench.job.target
            stack.enter_context(pilot)
            trained = train_under_budget(pilot, training, Effort(EVALUATE_EVERY, LIMIT), folder)
    finally:
        training.close()
    end = trained.record().end
    return Result(
        *took["end"],
        training.samples,
        trained.score,
        trained.outcome == "reached",
        joules[0].under(schedule),
        dict(device.snapshot()) == found and end is not None and end.restored,
        time.process_time() - began_s - training.spent_s,
    )


class _Timed(Training):
    """Knows how long the real training itself took: the rest is Underwatt's own, and the simulation."""

    spent_s = 0.0

    def step(self) -> torch.Tensor:
        """Train on one batch."""
        began_s = time.process_time()
        loss = super().step()
        self.spent_s += time.process_time() - began_s
        return loss

    def evaluate(self, *_: Any) -> float:
        """The metric on held-out data; takes no time of the board, as for those it is compared with."""
        began_s = time.process_time()
        score = super().evaluate()
        self.spent_s += time.process_time() - began_s
        return score
