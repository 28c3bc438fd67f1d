"""What the demo compares with: the paper's baseline, trained for real too, and an oracle that knows everything."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from underwatt.demo.board import EVALUATE_EVERY, LIMIT, Bench, Joules, Result
from underwatt.demo.job import BATCH_SIZES
from underwatt.device.session import Session
from underwatt.errors import BudgetError
from underwatt.jobs.job import Effort
from underwatt.jobs.load import RESNET18
from underwatt.jobs.training import Training
from underwatt.rivals.choices import Table, largest_batch, oracle
from underwatt.rivals.compare import truth_of
from underwatt.studies.proxy_training import train_to_target

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from underwatt.budget import Schedule
    from underwatt.jobs.job import Job
    from underwatt.records import Setting


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
