"""What the demo does: real trainings of a small network on a virtual board, under budgets that change.

First what is trained; then what Underwatt does on one board: a few settings measured, two budgets planned for, a
training under each; last what it is compared with: the paper's baseline, trained for real too, and an oracle that knows
everything.
"""

from __future__ import annotations

import contextlib
import math
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from underwatt._imports import require
from underwatt.api.lookup import every_setting, spread_settings
from underwatt.budget import Budget, Schedule
from underwatt.control.live_budget import LiveBudget
from underwatt.control.measured_search import measure_as_you_go
from underwatt.device.session import Session
from underwatt.drivers.virtual.device import VirtualJetson, open_virtual
from underwatt.errors import BudgetError
from underwatt.events import BudgetChanged, Started
from underwatt.jobs._torch import torch
from underwatt.jobs.job import Effort, Job
from underwatt.jobs.load import RESNET18
from underwatt.jobs.runs import Run, RunOptions
from underwatt.jobs.training import Training
from underwatt.jobs.training_loop import train_under_budget
from underwatt.jobs.workloads import SimulatedWorkload
from underwatt.measure.meter import SAMPLE_PERIOD_S, Trace
from underwatt.measure.series import in_order, run_profile
from underwatt.planning.problem import Problem
from underwatt.records import Setting
from underwatt.rivals.compare import Table, largest_batch, oracle, truth_of
from underwatt.runlog.run_record import RunRecord
from underwatt.studies.proxy_training import train_to_target

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from underwatt.convergence.curve import ConvergenceCurve
    from underwatt.events import Event
    from underwatt.planning.search import SearchResult
    from underwatt.predict.base import SettingArray
    from underwatt.records import Measurement, WorkloadInfo
    from underwatt.store.store import Store

    Tell = Callable[[Event], None]

BATCH_SIZES = (8, 16, 32, 64, 128)
TARGET = 0.9
PAPER_LR = 5e-4
# Of 1,797 images. What convergence is studied on has none in common with what is trained and tested on later.
TRAIN, TEST, PROXY, PROXY_TEST = slice(700), slice(700, 1100), slice(1100, 1500), slice(1500, None)


def digits() -> Job:
    """The 8×8 digits that come with scikit-learn, and a network with one hidden layer to tell them apart."""
    bunch = require("sklearn.datasets", extra="demo").load_digits()
    order = torch.randperm(len(bunch.target), generator=torch.Generator().manual_seed(0))
    images, classes = torch.tensor(bunch.data, dtype=torch.float32)[order] / 16, torch.tensor(bunch.target)[order]

    def part(rows: slice) -> tuple[Any, Any]:
        return images[rows], classes[rows]

    return Job(
        _network,
        part(TRAIN),
        target=TARGET,
        test_data=part(TEST),
        proxy_data=part(PROXY),
        proxy_test_data=part(PROXY_TEST),
        lr=PAPER_LR,
        batch_sizes=BATCH_SIZES,
        device="cpu",
        name="digits at the cost of ResNet18",
    )


def _network() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))


# On one board.

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

    def step(self) -> Any:
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


# What it is compared with.


@dataclass(frozen=True, slots=True)
class Choice:
    """A setting with its true time and samples to the target, and its true power."""

    setting: Setting
    time_s: float
    power_w: float
    samples: float


def samples_in_hindsight(job: Job) -> dict[int, float]:
    """Samples to the target on the data that is really trained on, by batch size; no planner is told."""
    own = replace(job, proxy_data=None, proxy_test_data=None)
    effort = Effort(EVALUATE_EVERY, LIMIT)
    made = {size: train_to_target(own, size, job.seed, effort) for size in BATCH_SIZES}
    return {size: float(it.trained_samples) if it.ended == "reached" else math.inf for size, it in made.items()}


class Rivals:
    """Choices made from the simulated board's truth, which no real board tells."""

    def __init__(self, bench: Bench, samples: Mapping[int, float]) -> None:
        self._bench, self._samples = bench, samples
        candidates = bench.candidates()
        truth = truth_of(bench.device(), candidates, RESNET18)
        assert truth is not None, "the board is simulated"
        sample_s = truth.step_s / candidates.batch_size
        needed = np.array([samples[int(size)] for size in candidates.batch_size])
        self._table = Table(candidates, sample_s * needed, sample_s, truth.power_w)

    def baseline(self, budget_w: float) -> Choice | None:
        """The largest batch at the highest clock that fits, all else at its highest; none where nothing fits so."""
        row = largest_batch(self._table, budget_w)
        return None if row is None else self._choice(row)

    def best(self, budget_w: float) -> Choice:
        """The soonest of all that fit."""
        row = oracle(self._table, budget_w)
        if row is None:
            raise BudgetError(f"Nothing keeps {budget_w:g} W on this board.")
        return self._choice(row)

    def _choice(self, row: int) -> Choice:
        setting = self._table.settings[row]
        took_s, drawn_w = float(self._table.time_s[row]), float(self._table.drawn_w[row])
        return Choice(setting, took_s, drawn_w, self._samples[setting.batch_size])

    def train_baseline(self, schedule: Schedule) -> Result | None:
        """The baseline under a budget that changes: it knows what fits, and changes the clock just in time.

        Nothing is trained where it cannot keep one of the levels.
        """
        chosen = {watts: choice for watts in schedule.levels_w if (choice := self.baseline(watts)) is not None}
        if len(chosen) < len(set(schedule.levels_w)):
            return None
        device, job = self._bench.device(), self._bench.job
        found = dict(device.snapshot())
        longest_s = max(it.time_s / it.samples * it.setting.batch_size for it in chosen.values())
        training = Training(job, chosen[schedule.power_w(0.0)].setting.batch_size)
        score, evaluated, now = 0.0, 0, None
        joules = Joules(device)
        with Session(device) as session:
            while not job.reached(score) and training.samples < LIMIT:
                at_s, _ = joules.since()
                wanted = chosen[min(schedule.power_w(at_s), schedule.power_w(at_s + longest_s))].setting
                if wanted != now:
                    session.apply(wanted.mode)
                    training.set_batch_size(wanted.batch_size)
                    now = wanted
                device.run_step(RESNET18, wanted.batch_size)
                training.step()
                if training.samples - evaluated >= EVALUATE_EVERY:
                    evaluated, score = training.samples, training.evaluate()
            took = joules.since()
        training.close()
        restored = dict(device.snapshot()) == found
        return Result(*took, training.samples, score, job.reached(score), joules.under(schedule), restored)


def passed(schedule: Schedule, choose: Callable[[float], Choice]) -> Result:
    """A training that uses the choice for each level of a schedule, and changes between them at no cost.

    With ``Rivals.best`` that is the oracle; nothing is trained for it.
    """
    at_s = energy_j = samples = share = 0.0
    while True:
        choice = choose(schedule.power_w(at_s))
        left_s = (1 - share) * choice.time_s
        ends_s = schedule.next_change_s(at_s)
        if at_s + left_s <= ends_s:
            samples += (1 - share) * choice.samples
            return Result(at_s + left_s, energy_j + left_s * choice.power_w, samples)
        passed_share = (ends_s - at_s) / choice.time_s
        share += passed_share
        samples += passed_share * choice.samples
        energy_j += (ends_s - at_s) * choice.power_w
        at_s = ends_s
