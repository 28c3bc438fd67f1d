"""Training itself: a model, an optimizer and batches, one step at a time; and when a step on a GPU is complete."""

from __future__ import annotations

import contextlib
import copy
import math
import os
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

from underwatt.errors import InputError, JobError
from underwatt.jobs._torch import torch
from underwatt.jobs.data import EndlessBatches, open_loader, train_and_test
from underwatt.jobs.rates import RateFollower, ScheduleFollower

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from underwatt.jobs.job import Job

EVALUATION_BATCH = 256
LOSS_PERIOD_S = 0.2  # how often a loss is fetched from a GPU


def build_model(job: Job, seed: int) -> torch.nn.Module:
    """A fresh model on the CPU: the job's function called under the seed, or a copy of its module."""
    if isinstance(job.model, torch.nn.Module):
        return copy.deepcopy(job.model)
    torch.manual_seed(seed)
    return job.model()


def forward(job: Job, model: torch.nn.Module, batch: Any) -> tuple[Any, Any]:
    """The model's output for a batch, and what it should have been."""
    if job.forward is not None:
        return job.forward(model, batch)
    *inputs, targets = batch
    return model(*inputs), targets


def loss_of(job: Job, output: Any, targets: Any) -> torch.Tensor:
    """The job's loss; cross-entropy over the last axis where it names none, for sequences too."""
    if job.loss is not None:
        return job.loss(output, targets)
    return torch.nn.functional.cross_entropy(output.flatten(0, -2), targets.flatten())


def one_step(
    job: Job, model: torch.nn.Module, optimizer: torch.optim.Optimizer, parts: Sequence[Any], sizes: Sequence[int]
) -> Any:
    """Change a model by one batch, in the job's own way where it has one; gives the loss.

    Of a batch in parts of so many samples the mean of the parts' gradients is its own.
    """
    if job.train_step is not None:
        (batch,) = parts
        loss = job.train_step(model, batch, optimizer)
        return loss.detach() if isinstance(loss, torch.Tensor) else loss
    optimizer.zero_grad(set_to_none=True)
    mean: Any = 0.0
    for part, samples in zip(parts, sizes, strict=True):
        loss = loss_of(job, *forward(job, model, part))
        loss = loss if len(parts) == 1 else loss * (samples / sum(sizes))
        loss.backward()  # type: ignore[no-untyped-call]
        mean = mean + loss.detach()
    optimizer.step()
    return mean


class Scoring:
    """The score of a test set, to which its batches are added one by one."""

    def __init__(self, job: Job, samples: int) -> None:
        self._metric, self._samples, self._added = job.metric, samples, 0
        self._right = 0.0
        self._outputs: list[Any] = []
        self._targets: list[Any] = []
        self._updated = self._metric if hasattr(self._metric, "update") else None
        if self._updated is not None:
            self._updated.reset()

    def add(self, output: Any, targets: Any, samples: int) -> None:
        """One batch of so many samples."""
        self._added += samples
        if self._metric is None:  # right answers are counted
            self._right += float((output.argmax(-1) == targets).float().mean()) * samples
            return
        output, targets = to_device(output, "cpu"), to_device(targets, "cpu")
        if self._updated is not None:
            self._updated.update(output, targets)
            return
        if not self._outputs:
            self._check_room(_bytes_of(output) / samples * self._samples)
        self._outputs.append(output)
        self._targets.append(targets)

    def value(self) -> float:
        """The score of all that was added."""
        if self._metric is None:
            return self._right / self._added
        if self._updated is not None:
            return float(self._updated.compute())
        return float(self._metric(_joined(self._outputs), _joined(self._targets)))

    def _check_room(self, wanted_bytes: float) -> None:
        if wanted_bytes > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2:
            raise JobError(
                f"The outputs of the whole test set, which the metric is asked of, take {wanted_bytes / 1e9:.0f} GB.",
                hint="Give a metric with update, compute and reset, as torchmetrics has them, or less test data.",
            )


def _bytes_of(value: Any) -> int:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return sum(map(_bytes_of, value))
    return value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0


def _joined(parts: list[Any]) -> Any:
    """Batches as one: tensors and lists end to end, and so what is in tuples and dictionaries."""
    first = parts[0]
    if isinstance(first, dict):
        return {key: _joined([part[key] for part in parts]) for key in first}
    if isinstance(first, list):
        return [item for part in parts for item in part]
    if isinstance(first, tuple):
        return tuple(_joined(list(column)) for column in zip(*parts, strict=True))
    if not isinstance(first, torch.Tensor):
        return parts
    parts = [part.unsqueeze(0) for part in parts] if first.dim() == 0 else parts
    if len({part.shape[1:] for part in parts}) > 1:
        raise JobError(
            "The outputs of the test set differ in shape from batch to batch, so that they are no one tensor.",
            hint="Pad them alike, or give a metric with update, compute and reset, as torchmetrics has them.",
        )
    return torch.cat(parts)


def to_device(batch: Any, device: Any) -> Any:
    """A batch with every tensor in it moved."""
    if hasattr(batch, "to"):
        return batch.to(device, non_blocking=device != "cpu")  # else it would be read before it has come
    if isinstance(batch, dict):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        moved = [to_device(value, device) for value in batch]
        return tuple(moved) if type(batch) is tuple else moved
    return batch


def device_of(job: Job) -> torch.device:
    """Where the job trains: where it says, else CUDA where there is one."""
    return torch.device(job.device or ("cuda" if torch.cuda.is_available() else "cpu"))


class Training:
    """A model in training; the batch size may be changed on the way, and the learning rate follows it."""

    def __init__(self, job: Job, batch_size: int, *, proxy: bool = False, seed: int | None = None) -> None:
        self.job = job
        self.device = device_of(job)
        seed = job.seed if seed is None else seed
        self.model = build_model(job, seed).to(self.device)
        self.optimizer = job.make_optimizer(self.model, job.lr)
        self.rates = RateFollower(self.optimizer, job.lr_batch_size, job.lr_rule)
        self.rates.follow(batch_size)
        self.scheduler: Any = job.scheduler(self.optimizer) if job.scheduler is not None else None
        self._schedule: ScheduleFollower | None = None
        if self.scheduler is not None and not self._waits_for_plateau:
            self._schedule = ScheduleFollower(self.scheduler, job.schedule_samples or job.lr_batch_size)
        self.steps = 0
        self.samples = 0
        self.batch_size = batch_size  # of the last batch; the first one until there is one
        self._train_data, self._test_data = train_and_test(job, proxy=proxy)
        sampler = job.sampler(self._train_data) if job.sampler is not None else None
        self._order = EndlessBatches(len(self._train_data), batch_size, seed, sampler)
        self._batches: Iterator[Any] | None = None
        self._open_loader()

    def set_batch_size(self, batch_size: int) -> None:
        """Go on at another batch size; batches that worker processes have prepared are trained on first."""
        self._order.batch_size = batch_size

    @property
    def next_parts(self) -> list[int]:
        """The parts of the batch that the next step trains on: one, unless all of it does not fit into memory."""
        return self._order.steps[0] if self._order.steps else self._order.next_parts()

    def step(self) -> Any:
        """Train on one batch; the loss stays on the device, so that a GPU is not waited for."""
        return self.learn(self.fetch())

    def fetch(self) -> list[Any]:
        """The parts of the next batch, on the device; the model is as it was."""
        assert self._batches is not None, "closed"
        first = to_device(next(self._batches), self.device)
        return [first, *(to_device(next(self._batches), self.device) for _ in self._order.steps[0][1:])]

    def learn(self, parts: list[Any]) -> Any:
        """Change the model by the batch that was fetched last."""
        sizes = self._order.steps[0]
        self.batch_size = sum(sizes)
        self.rates.follow(self.batch_size)
        self.model.train()
        loss = one_step(self.job, self.model, self.optimizer, parts, sizes)
        self._order.trained()
        self.steps += 1
        self.samples += self.batch_size
        if self._schedule is not None:
            self._schedule.follow(self.batch_size)
            self.scheduler.step()
        return loss

    def scored(self, score: float) -> None:
        """The model was tested: what waits for a plateau hears of it."""
        if self._waits_for_plateau:
            self.scheduler.step(score)

    @property
    def _waits_for_plateau(self) -> bool:
        return isinstance(self.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)

    def divide(self, too_large: int = 0) -> int:
        """A part of so many samples, or of the next step, does not fit into memory: the largest from now on.

        0 where the job wants whole batches, has a step of its own, or a part is a single sample. A step that was begun
        is to be done again.
        """
        too_large = too_large or max(self.next_parts)
        if not self.job.accumulate or self.job.train_step is not None or too_large < 2:
            return 0
        self._order.most_at_once = math.ceil(too_large / 2)
        return math.ceil(too_large / 2)

    def redo(self, batch_size: int) -> None:
        """A step did not fit into memory: its samples, and all that were prepared, come again in smaller batches."""
        self.optimizer.zero_grad(set_to_none=True)
        self._order.take_back()
        self._order.batch_size = batch_size
        self._open_loader()

    def state(self) -> dict[str, Any]:
        """All that is needed to go on, here or on another machine, as if nothing had happened."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "order": self._order.state(),
            "scheduler": self.scheduler.state_dict() if self.scheduler is not None else None,
            "left_over": self._schedule.left_over if self._schedule is not None else 0,
            "train_step": self._kept_step.state_dict() if self._kept_step is not None else None,
            "rate": self._rate,
            "batch_size": self.batch_size,
            "steps": self.steps,
            "samples": self.samples,
            "random": torch.get_rng_state(),
            "random_gpu": torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a state; refuses one that was made with another learning rate, which would come back with it."""
        if state.get("rate", self._rate) != self._rate:
            raise InputError(
                f"The learning rate was {state['rate']} before, and the job has {self._rate} now.",
                hint="Undo the change, or start a run without --resume, in a folder of its own.",
            )
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        if self._schedule is not None:
            self._schedule.left_over = state["left_over"]
        if self._kept_step is not None:
            self._kept_step.load_state_dict(state["train_step"])
        self._order.restore(state["order"])
        self._order.batch_size = state["batch_size"]
        self.batch_size, self.steps, self.samples = state["batch_size"], state["steps"], state["samples"]
        self._open_loader()
        torch.set_rng_state(state["random"])  # after the loader, which draws a number
        if state["random_gpu"] is not None and self.device.type == "cuda":
            torch.cuda.set_rng_state(state["random_gpu"], self.device)

    @property
    def _rate(self) -> str:
        rule = self.job.lr_rule
        how = (
            ""
            if rule is None
            else f" (rule: {rule if isinstance(rule, str) else getattr(rule, '__qualname__', 'a function')})"
        )
        return f"{self.job.lr:g} at batch size {self.job.lr_batch_size}{how}"

    @property
    def train_samples(self) -> int:
        """How many samples there are to train on."""
        return len(self._train_data)

    @property
    def _kept_step(self) -> Any:
        """The job's own step where it keeps something from step to step, such as a scaler of mixed precision."""
        return self.job.train_step if hasattr(self.job.train_step, "state_dict") else None

    @property
    def test_samples(self) -> int:
        """How many samples a test takes."""
        return len(self._test_data)

    def evaluate(
        self, tested: Callable[[int], None] = lambda _samples: None, batch_size: int = EVALUATION_BATCH
    ) -> float:
        """The metric of the held-out data; ``tested`` is told of each batch when it is done."""
        self.model.eval()
        scoring, left = Scoring(self.job, self.test_samples), self.test_samples
        with torch.no_grad():
            for batch in open_loader(self.job, self._test_data, batch_size=batch_size):
                samples = min(batch_size, left)
                scoring.add(*forward(self.job, self.model, to_device(batch, self.device)), samples)
                left -= samples
                tested(samples)
        return scoring.value()

    def is_finite(self) -> bool:
        """Whether all weights are finite numbers; one that is not never becomes one again."""
        return bool(torch.stack([torch.isfinite(weight).all() for weight in self.model.parameters()]).all())

    def close(self) -> None:
        """Let go of the loader, with its worker processes.

        An error that was raised in it keeps it alive, and so would its workers and threads stay.
        """
        batches, self._batches = self._batches, None
        shut_down = getattr(batches, "_shutdown_workers", None)
        if shut_down is not None:
            with _workers_may_die():
                shut_down()

    def _open_loader(self) -> None:
        self.close()
        pin_memory = self.device.type == "cuda"
        self._batches = open_loader(self.job, self._train_data, batch_sampler=self._order, pin_memory=pin_memory)


class LatestLoss:
    """The newest loss that is known as a number; a GPU is never waited for, and only this thread touches the tensor.

    From a GPU the loss is copied as a part of the step's own work, a few times a second, and read once that is done:
    asking for its value would wait for everything that is queued.
    """

    def __init__(self) -> None:
        self.value: float | None = None
        self._copy: tuple[Any, Any] | None = None  # on its way, and the event that says that it has come
        self._next_s = -math.inf

    def of(self, loss: Any) -> float | None:
        """The newest number, after a step whose loss is this."""
        if getattr(loss, "is_cuda", False):
            self._from_gpu(loss)
            return self.value
        try:
            self.value = None if loss is None else float(getattr(loss, "detach", lambda: loss)())
        except (TypeError, ValueError, RuntimeError):  # nothing that is one number
            self.value = None
        return self.value

    def _from_gpu(self, loss: torch.Tensor) -> None:
        if self._copy is not None:
            copied, arrived = self._copy
            if not arrived.query():
                return
            self.value, self._copy = float(copied), None
        now_s = time.monotonic()
        if now_s < self._next_s or loss.numel() != 1:
            return
        self._next_s = now_s + LOSS_PERIOD_S
        copied = torch.empty((), pin_memory=True)  # a copy to other memory is not made in passing
        copied.copy_(loss.detach().reshape(()), non_blocking=True)
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record(torch.cuda.current_stream(loss.device))
        self._copy = copied, arrived


@contextlib.contextmanager
def _workers_may_die() -> Iterator[None]:
    """While workers are ended on purpose, PyTorch must not raise that one has died, which would leave the rest."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, before if before is not None else signal.SIG_DFL)


class Completion:
    """Waits for steps on the GPU that PyTorch uses, where it uses one: a training loop only queues them.

    While steps follow each other at once, the *previous* step is waited for: waiting for each would let the GPU run
    dry and make small batches look slower than they train. Where there are pauses between steps, each one is waited
    for, because a pause begins when its step has ended. The wait blocks instead of spinning, so that the CPU draws no
    power for it.
    """

    def __init__(self, *, on_gpu: bool | None = None) -> None:
        self.on_gpu = on_gpu  # ``None``: found out at the first step
        self._in_flight: Any = None

    def wait(self, *, pausing: bool) -> None:
        """Return when the step that was queued last, or the one before it, is complete."""
        if self.on_gpu is None:
            self.on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        if not self.on_gpu:
            return
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record()
        (event if pausing or self._in_flight is None else self._in_flight).synchronize()
        self._in_flight = None if pausing else event
