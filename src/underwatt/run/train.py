"""A job trained to its target under a budget: steps, tests, checkpoints, and whatever goes wrong on the way."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from underwatt.errors import OutOfMemoryError
from underwatt.run import checkpoint
from underwatt.run.checkpoint import Progress
from underwatt.run.completion import Completion
from underwatt.run.step_guard import StepGuard
from underwatt.run.update_watch import UpdateWatch, half_updated
from underwatt.workload._torch import torch
from underwatt.workload.faults import job_faults

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from pathlib import Path

    from underwatt.run.pilot import Pilot
    from underwatt.workload.training import Training

CHECKPOINT_PERIOD_S = 60.0  # of this machine's time


@dataclass(frozen=True, slots=True)
class Effort:
    """How often the model is tested, and after how many samples it is given up."""

    evaluate_every_samples: int
    limit_samples: float = math.inf


@dataclass(frozen=True, slots=True)
class Trained:
    """How a training ended: ``reached``, ``limit`` or ``energy spent``; its last score, and what it took."""

    outcome: str
    score: float | None
    samples: int
    steps: int
    elapsed_s: float
    energy_j: float


def train_under_budget(
    pilot: Pilot,
    training: Training,
    effort: Effort,
    folder: Path | None = None,
    *,
    progress: Progress | None = None,
    watch: Callable[[], None] = lambda: None,
) -> Trained:
    """Train to the job's target; ``folder`` takes checkpoints, ``progress`` is what an earlier part had come to.

    A step that does not fit into memory is done again in smaller batches: none is lost. Where memory runs out in the
    optimizer's own step, the model may be half changed: that is an error, and the last checkpoint is what counts.
    Whatever else ends the training, a last checkpoint is written first, unless it was a step of the job that failed.
    Ctrl-C waits for the end of a step.
    """
    return _Loop(pilot, training, effort, folder, progress, watch).run()


class _Loop:
    def __init__(
        self,
        pilot: Pilot,
        training: Training,
        effort: Effort,
        folder: Path | None,
        progress: Progress | None,
        watch: Callable[[], None],
    ) -> None:
        self._pilot, self._training, self._effort, self._folder, self._watch = pilot, training, effort, folder, watch
        self._completion = Completion(on_gpu=training.device.type == "cuda")
        self._evaluated = progress.evaluated_samples if progress else 0
        self._score = progress.score if progress else None
        self._guard = StepGuard()
        self._update = UpdateWatch()
        self._next_save_s = -math.inf  # at once: a run that is killed early can go on too

    def run(self) -> Trained:
        try:
            with self._guard:
                while not (outcome := self._judge()):
                    if time.monotonic() >= self._next_save_s:
                        self._save("")
                    self._step()
                    self._guard.pass_on()
                    self._watch()
        except BaseException:
            if self._guard.whole:
                self._save("")
            raise
        self._pilot.ends(outcome)
        self._save(outcome if outcome == "reached" else "")  # with more samples or joules it can go on
        training = self._training
        return Trained(
            outcome, self._score, training.samples, training.steps, self._pilot.elapsed_s, self._pilot.energy_j
        )

    def _step(self) -> None:
        pilot, training = self._pilot, self._training
        training.set_batch_size(pilot.batch_size)
        size = training.next_batch_size
        try:
            with self._update:
                pilot.simulate(size)
                with self._guard.step(), job_faults(size):
                    batch = training.fetch()
                    with self._guard.changing():
                        loss = training.learn(batch)
                    self._completion.wait(pausing=pilot.controller.pausing)
        except OutOfMemoryError:
            if self._update.begun:
                hint = "Go on from the last checkpoint with --resume, and smaller batch sizes (-b)."
                raise half_updated(size, hint) from None
            training.redo(pilot.out_of_memory(size))
            self._guard.whole = True
            return
        pilot.stepped(training.batch_size, loss)

    def _judge(self) -> str:
        """How the training ends here, or nothing."""
        samples = self._training.samples
        if samples - self._evaluated >= self._effort.evaluate_every_samples:
            with self._pilot.elsewhere(), self._random_apart(), job_faults(self._training.batch_size):
                self._score = self._training.evaluate()
            self._evaluated = samples
            self._pilot.scored(self._score, self._training.job.target)
            if self._training.job.reached(self._score):
                return "reached"
        if samples >= self._effort.limit_samples:
            return "limit"
        return "energy spent" if self._pilot.energy_left_j <= 0 else ""

    def _random_apart(self) -> AbstractContextManager[None]:
        """Random numbers that a test draws are not missing in the training, where it is cut short and done again."""
        device = self._training.device
        return torch.random.fork_rng([device] if device.type == "cuda" else [])

    def _save(self, done: str) -> None:
        """Write a checkpoint; a full disk ends no training."""
        if self._folder is None:
            return
        self._next_save_s = time.monotonic() + CHECKPOINT_PERIOD_S
        pilot = self._pilot
        progress = Progress(
            pilot.workload.id, pilot.elapsed_s, pilot.energy_j, pilot.share, self._evaluated, self._score, done
        )
        try:
            with pilot.elsewhere():
                checkpoint.save(self._folder, self._training, progress)
        except (OSError, RuntimeError) as exc:  # PyTorch makes some of the first into the second
            pilot.note("warning", f"No checkpoint could be written ({getattr(exc, 'strerror', None) or exc}).")
