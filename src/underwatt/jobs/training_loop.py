"""A job trained to its target under a budget: steps, tests, checkpoints, and whatever goes wrong on the way.

Signals that end a process wait for the end of the step under way: no checkpoint holds half a step.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

from underwatt.errors import OutOfMemoryError
from underwatt.jobs import checkpoint
from underwatt.jobs._torch import torch
from underwatt.jobs.checkpoint import Progress
from underwatt.jobs.faults import call_job, half_updated, is_lost_worker, lost_worker, watch_updates
from underwatt.jobs.gradient_watch import GradientWatch
from underwatt.jobs.runs import RunResult
from underwatt.jobs.training import EVALUATION_BATCH, Completion, LatestLoss

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path
    from types import FrameType

    from typing_extensions import Self

    from underwatt.control.pilot import Pilot
    from underwatt.jobs.job import Effort
    from underwatt.jobs.training import Training

CHECKPOINT_PERIOD_S = 60.0  # of this machine's time
# Times the samples with the best score: without a better one it is said. A first score may be lucky, and come early:
# it is also waited for so many tests, and for such a share of a pass over the data.
STALLED, IN_VAIN, PASS_SHARE = 5.0, 5, 0.5
_ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def train_under_budget(
    pilot: Pilot,
    training: Training,
    effort: Effort,
    folder: Path | None = None,
    *,
    test_share: float = 1.0,
    progress: Progress | None = None,
    watch: Callable[[], None] = lambda: None,
) -> RunResult:
    """Train to the job's target; ``folder`` takes checkpoints, ``progress`` is what an earlier part had come to.

    The model is tested as often as ``effort`` says, or less often, so that tests take no more than ``test_share`` of
    the time, pauses included; and once more where it is given up, if it has not been tested since.
    A step that does not fit into memory is done again in smaller batches: none is lost. Where memory runs out in the
    optimizer's own step, the model may be half changed: that is an error, and the last checkpoint is what counts.
    Whatever else ends the training, a last checkpoint is written first, unless it was a step of the job that failed.
    A training whose loss or weights are no finite numbers any more has diverged: it ends, and its last good checkpoint
    stays. Ctrl-C waits for the end of a step.
    """
    return _Loop(pilot, training, effort, folder, progress, test_share).run(watch)


class _Loop:
    def __init__(
        self,
        pilot: Pilot,
        training: Training,
        effort: Effort,
        folder: Path | None,
        progress: Progress | None,
        test_share: float,
    ) -> None:
        self._pilot, self._training, self._effort, self._folder = pilot, training, effort, folder
        self._test_share, self._next_test_s = test_share, -math.inf
        self._completion = Completion(on_gpu=training.device.type == "cuda")
        self._latest_loss = LatestLoss()
        self._gradients = GradientWatch(training, pilot.device.clock.now_s)
        self._evaluated_samples = progress.evaluated_samples if progress else 0
        self._score = progress.score if progress else None
        self._best = progress.best_score if progress else None
        self._best_samples = progress.best_samples if progress else 0
        self._in_vain = 0  # tests since the best score
        self._said_samples = 0  # when it was last said that there is no better score
        self._guard = StepGuard()
        self._saved_samples = training.samples if progress else None  # of the checkpoint in the folder
        self._unkept: dict[str, str] = {}  # which weights could not be written, and why
        self._next_save_s = -math.inf  # at once: a run that is killed early can go on too

    def run(self, watch: Callable[[], None]) -> RunResult:
        try:
            if self._pilot.device.info.simulated:  # starting takes its time there too
                with self._pilot.moving_state():
                    pass
            with self._guard:
                while not (outcome := self._judge()):
                    if time.monotonic() >= self._next_save_s:
                        self._save()
                    self._step()
                    self._guard.pass_on()
                    watch()
        except BaseException as exc:
            if self._guard.model_intact:
                self._save(last=True)
            if is_lost_worker(exc):
                raise lost_worker() from exc
            raise
        if outcome in ("limit", "plateau") and not self._training.job.has_target:
            outcome = "finished"  # as it was meant to end
        self._pilot.outcome = outcome
        if outcome == "diverged":
            self._say_diverged()
        else:
            # With more samples or joules it can go on.
            self._save(outcome if outcome == "reached" else "", ended=True, last=True)
            for name in tuple(self._unkept):  # once more: a draft that was too large for the disk is gone
                if name == checkpoint.LAST or self._best_samples == self._training.samples:
                    self._keep(name)
        pilot, training = self._pilot, self._training
        took = training.samples, training.steps, pilot.elapsed_s, pilot.energy_j
        best_score = None if checkpoint.BEST in self._unkept else self._best
        not_kept = self._unkept.get(checkpoint.LAST, "") if best_score is None else ""
        return RunResult(outcome, self._score, *took, self._folder, best_score, not_kept)

    def _step(self) -> None:
        pilot, training = self._pilot, self._training
        training.set_batch_size(pilot.batch_size)
        parts = training.next_parts
        size = sum(parts)
        with watch_updates() as update_begun:
            try:
                for part in parts:
                    pilot.simulate(part)
                with self._guard.step():
                    loss = call_job(size, self._learn)
            except OutOfMemoryError:
                if update_begun.is_set():
                    hint = "Go on from the last checkpoint with --resume, and smaller batch sizes (-b)."
                    raise half_updated(size, hint) from None
                if part := training.divide():
                    text = f"Batch size {size} does not fit into memory as a whole: its gradients are added up, {part}"
                    pilot.note("info", f"{text} samples at a time.")
                    training.redo(size)
                else:
                    training.redo(pilot.out_of_memory(size))
                self._guard.model_intact = True
                return
        if pilot.learns and (pair := self._gradients.look()) is not None:
            pilot.saw_gradients(*pair)
        pilot.stepped(training.batch_size, self._latest_loss.of(loss))

    def _learn(self) -> Any:
        batch = self._training.fetch()
        with self._guard.changing():
            loss = self._training.learn(batch)
        self._completion.wait(pausing=self._pilot.controller.pausing)
        return loss

    def _judge(self) -> str:
        """How the training ends here, or nothing."""
        if self._pilot.losses.diverged or (self._pilot.losses.in_doubt and not self._training.is_finite()):
            return "diverged"
        is_spent = self._pilot.energy_left_j <= 0
        is_limit = self._training.samples >= self._effort.limit_samples
        if self._is_test_due() or (is_limit and not is_spent and self._untested):
            if not self._training.is_finite():
                return "diverged"  # whatever its score would be
            if self._test():
                return "reached"
            if self._training.samples - self._best_samples >= self._training.job.patience_samples:
                return "plateau"
            self._say_stalled()
        if not is_limit and not is_spent:
            return ""
        if not self._training.is_finite():
            return "diverged"
        return "limit" if is_limit else "energy spent"

    @property
    def _untested(self) -> int:
        """Samples trained on since the last test."""
        return self._training.samples - self._evaluated_samples

    def _is_test_due(self) -> bool:
        if self._untested < self._effort.evaluate_every_samples:
            return False
        if self._score is None and self._test_share < 1:  # before the first one: forward is a third of a step's work
            is_due = self._test_share * self._untested >= self._training.test_samples / 3
            return is_due and not self._is_measuring
        return self._pilot.elapsed_s >= self._next_test_s and not self._is_measuring

    @property
    def _is_measuring(self) -> bool:
        """Whether a test would blur a measurement, and can wait for its end."""
        return self._test_share < 1 and self._pilot.is_measuring

    def _test(self) -> bool:
        """Test the model; whether it has reached its target."""
        pilot, training, begin_s = self._pilot, self._training, self._pilot.elapsed_s
        size = min(EVALUATION_BATCH, 3 * max(training.next_parts))  # so that it takes about as long as a step
        devices = [training.device] if training.device.type == "cuda" else []
        # Random numbers that a test draws are not missing in the training, where it is cut short and done again.
        with pilot.testing() as tested, torch.random.fork_rng(devices):
            self._score = score = call_job(training.batch_size, lambda: training.evaluate(tested, size))
            call_job(training.batch_size, lambda: training.scored(score))
            self._in_vain += 1
            if math.isfinite(score) and training.job.is_better(score, self._best):
                self._best, self._best_samples, self._in_vain = score, training.samples, 0
                self._keep_best()
        self._evaluated_samples = training.samples
        took_s = pilot.elapsed_s - begin_s
        self._next_test_s = pilot.elapsed_s + took_s * (1 / self._test_share - 1)
        pilot.scored(score, training.job.target if training.job.has_target else None, took_s)
        return training.job.reached(score)

    def _say_stalled(self) -> None:
        """Say that the score has long brought nothing better, before somebody waits for it for ever."""
        samples, job = self._training.samples, self._training.job
        least = self._best_samples + PASS_SHARE * self._training.train_samples
        least = max(least, STALLED * self._best_samples, STALLED * self._said_samples)
        if self._best_samples and job.has_target and self._in_vain >= IN_VAIN and samples >= least:
            self._said_samples = samples
            text = f"The score has not been better than {self._best:.4g} since {self._best_samples:,} samples, and now "
            text += f"there are {samples:,}: the target of {job.target:g} may be out of reach."
            self._pilot.note(
                "warning",
                f"{text} Ctrl-C ends the training with its best model; --limit, or "
                "patience_samples=… in the job, does by itself.",
            )

    def _say_diverged(self) -> None:
        text = f"The training has diverged: at {self._training.samples:,} samples its loss or weights are not finite."
        if self._folder is not None and self._saved_samples is not None:
            path = self._folder / checkpoint.NAME
            text += f" The last good checkpoint, of {self._saved_samples:,} samples, is {path}."
        self._pilot.note("warning", f"{text} Train with a lower learning rate, or look for what is odd in the data.")

    def _keep_best(self) -> None:
        self._keep(checkpoint.BEST)

    def _keep(self, name: str) -> None:
        """Write the weights as they are under a name."""
        if self._folder is None:
            return
        what = "best model" if name == checkpoint.BEST else "last model"
        with self._disk_may_fail(what, name):
            checkpoint.save_model(self._folder / name, self._training.model)
            self._unkept.pop(name, None)

    @contextlib.contextmanager
    def _disk_may_fail(self, what: str, name: str = "") -> Iterator[None]:
        try:
            yield
        except (OSError, RuntimeError) as exc:  # PyTorch makes some of the first into the second
            why = getattr(exc, "strerror", None) or str(exc)
            self._pilot.note("warning", f"No {what} could be written ({why}).")
            if name:
                self._unkept[name] = why

    def _save(self, done: str = "", *, ended: bool = False, last: bool = False) -> None:
        """Write a checkpoint, but none of a model that has diverged, or may have; a full disk ends no training."""
        if self._folder is None:
            return
        self._next_save_s = time.monotonic() + CHECKPOINT_PERIOD_S
        if (self._pilot.losses.in_doubt and not ended) or not self._training.is_finite():
            return
        pilot = self._pilot
        progress = Progress(
            pilot.workload.id,
            pilot.elapsed_s,
            pilot.energy_j,
            pilot.share,
            self._evaluated_samples,
            self._score,
            done,
            self._best,
            self._best_samples,
        )
        with self._disk_may_fail("checkpoint"), pilot.moving_state():
            checkpoint.save(self._folder, self._training, progress)
            self._saved_samples = self._training.samples
        if last:  # also where there was no room for a checkpoint, which is larger
            with pilot.moving_state():
                self._keep(checkpoint.LAST)


class StepGuard:
    """Use as ``with StepGuard() as guard:`` around a loop, ``with guard.step():`` around each step, then ``pass_on``.

    A second signal does not wait: a step that hangs must not hold anybody up.
    """

    def __init__(self) -> None:
        self.model_intact = True  # as the last step left it
        self._held: int | None = None
        self._in_step = False
        self._process = os.getpid()
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in _ENDING_SIGNALS:
                if callable(handler := signal.getsignal(number)):  # what is ignored stays ignored
                    self._handlers[number] = handler
                    signal.signal(number, self._arrived)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """A step is under way; one that fails may have failed because of the signal, which is then what counts."""
        self._in_step = True
        try:
            yield
        except Exception:
            self.pass_on()
            raise
        finally:
            self._in_step = False

    def pass_on(self) -> None:
        """The step is over and counted: a signal that came meanwhile takes effect now."""
        if self._held is not None:
            held, self._held = self._held, None
            self._handlers[held](held, None)

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """The model is being changed; it is intact again only where this comes to its end."""
        self.model_intact = False
        yield
        self.model_intact = True

    def _arrived(self, number: int, frame: FrameType | None) -> None:
        # A loader's worker that was forked within a step has no step of its own to wait for.
        if self._in_step and self._held is None and os.getpid() == self._process:
            self._held = number
        else:
            self._handlers[number](number, frame)
