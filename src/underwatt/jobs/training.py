"""Training itself: a model, an optimizer and batches, one step at a time; and when a step on a GPU is complete."""

from __future__ import annotations

import contextlib
import copy
import math
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

from underwatt.jobs._torch import torch
from underwatt.jobs.data import EndlessBatches, open_loader, train_and_test

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from underwatt.jobs.job import Job

EVALUATION_BATCH = 256
LOSS_PERIOD_S = 0.2  # how often a loss is fetched from a GPU
# Of a step's time, for looking at gradients; checked with benchmarks/gradient_cost.py.
MOST_LOOKING = 0.005
FIRST_LOOK, UNTIMED_LOOKS, LONGEST_PERIOD, SMOOTH = 3, 4, 1000, 0.05


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


def metric_of(job: Job, output: Any, targets: Any) -> float:
    """The job's metric; the share of right answers where it names none."""
    if job.metric is not None:
        return float(job.metric(output, targets))
    return float((output.argmax(-1) == targets).float().mean())


def to_device(batch: Any, device: Any) -> Any:
    """A batch with every tensor in it moved."""
    if hasattr(batch, "to"):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        return [to_device(value, device) for value in batch]
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
        self.optimizer = job.make_optimizer(self.model.parameters(), job.lr_at(batch_size))
        self.steps = 0
        self.samples = 0
        self.batch_size = batch_size  # of the last batch; the first one until there is one
        self._train_data, self._test_data = train_and_test(job, proxy=proxy)
        self._order = EndlessBatches(len(self._train_data), batch_size, seed)
        self._batches: Iterator[Any] | None = None
        self._open_loader()

    def set_batch_size(self, batch_size: int) -> None:
        """Go on at another batch size; batches that worker processes have prepared are trained on first."""
        self._order.batch_size = batch_size

    @property
    def next_parts(self) -> list[int]:
        """The parts of the batch that the next step trains on: one, unless all of it does not fit into memory."""
        return self._order.steps[0] if self._order.steps else self._order.next_parts()

    def step(self) -> torch.Tensor:
        """Train on one batch; the loss stays on the device, so that a GPU is not waited for."""
        return self.learn(self.fetch())

    def fetch(self) -> list[Any]:
        """The parts of the next batch, on the device; the model is as it was."""
        assert self._batches is not None, "closed"
        first = to_device(next(self._batches), self.device)
        return [first, *(to_device(next(self._batches), self.device) for _ in self._order.steps[0][1:])]

    def learn(self, parts: list[Any]) -> torch.Tensor:
        """Change the model by the batch that was fetched last; the mean of its parts' gradients is its own."""
        sizes = self._order.steps[0]
        if (size := sum(sizes)) != self.batch_size:
            self.scale_rate(self.batch_size, size)
            self.batch_size = size
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        mean: torch.Tensor | None = None
        for part, samples in zip(parts, sizes, strict=True):
            loss = loss_of(self.job, *forward(self.job, self.model, part))
            loss = loss if len(parts) == 1 else loss * (samples / size)
            loss.backward()  # type: ignore[no-untyped-call]
            mean = loss.detach() if mean is None else mean + loss.detach()
        self.optimizer.step()
        self._order.trained()
        self.steps += 1
        self.samples += self.batch_size
        assert mean is not None, "a batch has a part at least"
        return mean

    def scale_rate(self, from_size: int, to_size: int) -> None:
        """Have the learning rate of each group of parameters, which may have its own, follow the batch size."""
        before, after = self.job.lr_at(from_size), self.job.lr_at(to_size)
        for group in self.optimizer.param_groups:
            # Exactly the job's own where it is that, whatever batch sizes were on the way.
            group["lr"] = after if group["lr"] == before else group["lr"] * (after / before)

    def divide(self, too_large: int = 0) -> int:
        """A part of so many samples, or of the next step, does not fit into memory: the largest from now on.

        0 where the job wants whole batches, or a part is a single sample. A step that was begun is to be done again.
        """
        too_large = too_large or max(self.next_parts)
        if not self.job.accumulate or too_large < 2:
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
            "batch_size": self.batch_size,
            "steps": self.steps,
            "samples": self.samples,
            "random": torch.get_rng_state(),
            "random_gpu": torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self._order.restore(state["order"])
        self._order.batch_size = state["batch_size"]
        self.batch_size, self.steps, self.samples = state["batch_size"], state["steps"], state["samples"]
        self._open_loader()
        torch.set_rng_state(state["random"])  # after the loader, which draws a number
        if state["random_gpu"] is not None and self.device.type == "cuda":
            torch.cuda.set_rng_state(state["random_gpu"], self.device)

    @property
    def train_samples(self) -> int:
        """How many samples there are to train on."""
        return len(self._train_data)

    @property
    def test_samples(self) -> int:
        """How many samples a test takes."""
        return len(self._test_data)

    def evaluate(
        self, tested: Callable[[int], None] = lambda _samples: None, batch_size: int = EVALUATION_BATCH
    ) -> float:
        """The metric on held-out data, each sample counting once; ``tested`` is told of each batch when it is done."""
        self.model.eval()
        total = count = 0.0
        with torch.no_grad():
            for batch in open_loader(self.job, self._test_data, batch_size=batch_size):
                output, targets = forward(self.job, self.model, to_device(batch, self.device))
                samples = len(targets)
                total += metric_of(self.job, output, targets) * samples
                count += samples
                tested(samples)
        return total / count

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


class GradientWatch:
    """Compares the gradients of successive steps now and then: how much of them is signal, and how much noise.

    Both are measured as the optimizer does: one that scales its steps by the size of gradients, as Adam does, sees the
    noise of each tensor in relation to its size. A GPU is never waited for, and looking takes at most ``most_share`` of
    the time on average: where it takes more, it is done less often.
    """

    def __init__(
        self,
        training: Training,
        now_s: Callable[[], float] = time.perf_counter,
        most_share: float = MOST_LOOKING,
    ) -> None:
        self._training, self._now_s, self._most_share = training, now_s, most_share
        self._adaptive = training.job.is_adaptive
        self._kept: list[torch.Tensor] = []  # the gradients of the step before
        self._squares: Any = None
        self._usual: Any = None  # squares of each tensor, on average
        self._size, self._step, self._due, self._looks = 0, 0, FIRST_LOOK, 0
        self._compares = self._is_off = False
        self._last_s, self._step_s, self._cost_s, self.gpu_s = math.nan, math.nan, 0.0, 0.0
        self._on_its_way: Any = None  # what was copied from a GPU, of which batch size, and the events around it

    def look(self) -> tuple[float, float] | None:
        """After a step: the squared true gradient and the variance of one sample's, where a pair became known."""
        begin_s = self._now_s()
        took_s, self._last_s = begin_s - self._last_s, begin_s
        if took_s > 0:  # the first is NaN
            self._step_s = took_s if math.isnan(self._step_s) else self._step_s + SMOOTH * (took_s - self._step_s)
        self._step += 1
        found = self._arrived()
        if self._is_off or self._step < self._due or self._on_its_way is not None:
            self._compares = False
            return found
        try:
            with torch.no_grad():
                found = self._compare() or found
        except (RuntimeError, TypeError):  # sparse, on several devices, no memory for a copy: then without
            self._is_off, self._kept = True, []
        self._spent(self._now_s() - begin_s)
        return found

    def _compare(self) -> tuple[float, float] | None:
        gradients = [weight.grad for weight in self._training.model.parameters() if weight.grad is not None]
        if not gradients or any(gradient.dtype != torch.float32 for gradient in gradients):
            raise TypeError("nothing that could be compared")
        size, is_cuda = self._training.batch_size, gradients[0].is_cuda
        timer = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if is_cuda else []  # type: ignore[no-untyped-call]
        if timer:
            timer[0].record()
        squares = torch.stack(torch._foreach_norm(gradients)).square()
        pair = None
        if self._compares and size == self._size and len(gradients) == len(self._kept):
            pair = self._pair(gradients, squares)
        self._compares = pair is None or self._period == 1
        if self._compares:
            if len(self._kept) != len(gradients):
                self._kept = [torch.empty_like(gradient) for gradient in gradients]
            torch._foreach_copy_(self._kept, gradients)
            self._squares, self._size, self._due = squares, size, self._step + 1
        else:
            self._due = self._step + self._period
        if pair is None:
            return None
        if not is_cuda:
            return self._told(pair.tolist(), size)
        copied = torch.empty(2, pin_memory=True)
        copied.copy_(pair, non_blocking=True)
        timer[1].record()
        self._on_its_way = copied, size, *timer
        return None

    def _pair(self, gradients: list[torch.Tensor], squares: Any) -> Any:
        """The product of two successive gradients, and their mean square, tensors weighed as the optimizer does."""
        torch._foreach_add_(self._kept, gradients)
        product = (torch.stack(torch._foreach_norm(self._kept)).square() - squares - self._squares) / 2
        square = (squares + self._squares) / 2
        self._usual = (
            square if self._usual is None or len(self._usual) != len(square) else self._usual.lerp(square, SMOOTH)
        )
        usual = self._usual.clamp_min(1e-30)
        counts = torch.tensor([gradient.numel() for gradient in gradients], device=usual.device)
        weights = counts / usual if self._adaptive else 1 / usual.sum()
        return torch.stack([(weights * product).sum(), (weights * square).sum()])

    def _arrived(self) -> tuple[float, float] | None:
        if self._on_its_way is None or not self._on_its_way[3].query():
            return None
        (copied, size, begin, end), self._on_its_way = self._on_its_way, None
        self.gpu_s = begin.elapsed_time(end) / 1000
        return self._told(copied.tolist(), size)

    def _told(self, pair: list[float], size: int) -> tuple[float, float]:
        product, square = pair
        noise = size * (square - product)
        # Batches of one pass have no sample in common, so that their noises are opposed a little.
        return product + noise / max(self._training.train_samples - 1, 1), noise

    def _spent(self, seconds: float) -> None:
        """A look took so long; the first ones load and allocate."""
        self._looks += 1
        if self._looks > UNTIMED_LOOKS:
            self._cost_s += SMOOTH * (seconds - self._cost_s) if self._cost_s else seconds

    @property
    def _period(self) -> int:
        """A pair of gradients is compared every so many steps."""
        allowed_s = self._most_share * self._step_s
        if not allowed_s > 0:
            return 1
        pair_s = max(2 * self._cost_s, self.gpu_s)
        return min(max(1, math.ceil(pair_s / allowed_s)), LONGEST_PERIOD)


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
