"""One training of ``record_convergence.py``: on a GPU a chain of CUDA graphs on a stream of its own."""

from __future__ import annotations

import math
import time
import traceback
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from underwatt.jobs.job import scaled_lr

if TYPE_CHECKING:
    from collections.abc import Callable

    from convergence_data import Split

WARM_UP_STEPS = 3
GRAPH_SAMPLES = 32  # steps of small batches are unrolled in one graph until it trains this many samples
DEPTH = 2  # stretches queued per training, so that the GPU never waits for the host to look at a score


@dataclass(frozen=True)
class Model:
    """A network to train: how it is made for some classes, its learning rate at batch 128, and its data."""

    name: str
    make: Callable[[int], nn.Module]
    kind: str  # "image" or "text"
    lr: float = 5e-4


@dataclass
class Task:
    """One training: until the target, or for a number of samples where there is none."""

    model: Model
    role: str
    batch_size: int
    seed: int
    limit: int
    target: float = math.inf
    evaluate: bool = True
    start: dict[str, Tensor] = field(default_factory=dict)  # weights to begin with

    @property
    def lr(self) -> float:
        """The learning rate at its batch size."""
        return scaled_lr(self.model.lr, 128, self.batch_size, "sqrt")

    def __str__(self) -> str:
        return f"{self.model.name} {self.role} batch {self.batch_size} seed {self.seed}"


class Lane:
    """A training under way; on a GPU on its own stream, as CUDA graphs."""

    def __init__(
        self, task: Task, split: Split, every: int, evaluated: int, device: torch.device, stream: Any = None
    ) -> None:
        self.task = task
        self.split = split
        self.samples = 0
        self.curve: list[tuple[int, float]] = []
        self.started_s = time.monotonic()
        self.finished: str = ""
        self._every = every
        self._device = device
        self._evaluation_samples = evaluated
        self._pending: deque[tuple[int, Tensor, Tensor, Any]] = deque()
        self.stream = stream
        self._graphs: tuple[Any, Any] | None = None
        self._unroll = max(1, min(GRAPH_SAMPLES, self._every) // task.batch_size)
        torch.manual_seed(task.seed)
        self.model = task.model.make(split.classes)
        fresh = self.model.state_dict()
        fits = {k: v for k, v in task.start.items() if fresh[k].shape == v.shape and not self._fresh_head(k)}
        self.model.load_state_dict({**fresh, **fits})
        self.model.to(device)
        fused = {"fused": True, "capturable": True} if self.stream else {}
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=task.lr, **fused)
        self._order = torch.from_numpy(_order(len(split), task.limit + 4 * self._every, task.seed)).to(device)
        self._cursor = torch.zeros((), dtype=torch.int64, device=device)
        self._offsets = torch.arange(task.batch_size, device=device)
        self._loss = torch.zeros((), device=device)
        self._right = torch.zeros((), device=device)
        if self.stream:
            self._prepare_graphs()

    def _fresh_head(self, name: str) -> bool:
        return self.task.model.kind == "image" and name.startswith("head.")

    def _step(self) -> None:
        inputs, targets = self.split.batch(self._order.index_select(0, self._cursor + self._offsets))
        self.optimizer.zero_grad(set_to_none=True)
        scores = self.model(inputs)
        loss = nn.functional.cross_entropy(scores.flatten(0, -2), targets.flatten())
        loss.backward()
        self.optimizer.step()
        self._cursor += self.task.batch_size
        self._loss.copy_(loss.detach())

    @torch.no_grad()
    def _evaluate(self) -> None:
        self._right.zero_()
        for inputs, targets in self.split.test_batches(self._evaluation_samples):
            self._right += (self.model(inputs).argmax(-1) == targets).float().mean() * len(targets)
        self._right /= self.split.tests(self._evaluation_samples)

    def _prepare_graphs(self) -> None:
        """Record the graphs, or go on without them, and put everything back to the start."""
        state = [*self.model.parameters(), *self.model.buffers()]
        before = [tensor.detach().clone() for tensor in state]
        torch.cuda.current_stream().synchronize()
        try:
            self._graphs = self._captured()
        except Exception:  # noqa: BLE001 - slower is better than nothing
            traceback.print_exc()
            print(f"no CUDA graph for {self.task}: it goes on step by step", flush=True)
            self.stream = torch.cuda.Stream()
            self.optimizer.zero_grad(set_to_none=True)
        with torch.cuda.stream(self.stream), torch.no_grad():
            for tensor, value in zip(state, before, strict=True):
                tensor.copy_(value)
            for values in self.optimizer.state.values():
                for value in values.values():
                    value.zero_()
            self._cursor.zero_()
            self.stream.synchronize()

    def _captured(self) -> tuple[Any, Any]:
        """Training steps and an evaluation as graphs; the weights are not what they were afterwards."""
        graphs = []
        with torch.cuda.stream(self.stream):
            for _ in range(WARM_UP_STEPS):
                self.model.train()
                self._step()
                self.model.eval()
                self._evaluate()
            self.stream.synchronize()
            for mode, calls in ((True, [self._step] * self._unroll), (False, [self._evaluate])):
                self.model.train(mode)
                graph = torch.cuda.CUDAGraph()
                # Not torch.cuda.graph(): it waits for the whole device, and the other trainings would stand still.
                graph.capture_begin(capture_error_mode="thread_local")
                for call in calls:
                    call()
                graph.capture_end()
                graphs.append(graph)
        return graphs[0], graphs[1]

    def submit(self) -> None:
        """Queue training up to the next evaluation, and the evaluation."""
        if self.stream is None:
            return self._queue()
        with torch.cuda.stream(self.stream):
            return self._queue()

    def _queue(self) -> None:
        steps = self._every // self.task.batch_size
        if self._graphs:
            for _ in range(steps // self._unroll):
                self._graphs[0].replay()
            if self.task.evaluate:
                self._graphs[1].replay()
        else:
            self.model.train()
            for _ in range(steps):
                self._step()
            if self.task.evaluate:
                self.model.eval()
                self._evaluate()
        self.samples += steps * self.task.batch_size
        event = None
        right, loss = self._right.clone(), self._loss.clone()
        if self.stream:
            event = torch.cuda.Event()
            event.record(self.stream)
        self._pending.append((self.samples, right, loss, event))

    def poll(self) -> bool:
        """Queue more where there is room and read what is done; whether anything happened."""
        if self.finished:
            return False
        if len(self._pending) < DEPTH and self.samples < self.task.limit:
            self.submit()
            return True
        samples, right, loss, event = self._pending[0]
        if event is not None and not event.query():
            return False
        self._pending.popleft()
        if self.stream:
            with torch.cuda.stream(self.stream):
                accuracy, loss_value = right.item(), loss.item()
        else:
            accuracy, loss_value = right.item(), loss.item()
        if self.task.evaluate:
            self.curve.append((samples, accuracy))
        if not math.isfinite(loss_value):
            self.finished = "diverged"
        elif len(self.curve) >= 3 and smoothed(self.curve[-3:])[-1][1] >= self.task.target:
            self.finished = "reached"
        elif samples >= self.task.limit:
            self.finished = "limit"
        return True

    def close(self) -> dict[str, Tensor]:
        """End it; the weights as they are, on the CPU."""
        if self.stream:
            self.stream.synchronize()
        weights = {key: value.detach().cpu().clone() for key, value in self.model.state_dict().items()}
        self._graphs = None
        self._pending.clear()
        return weights


def _order(count: int, length: int, seed: int) -> np.ndarray:
    """Shuffled passes over the data laid end to end: the same for every batch size."""
    rng = np.random.default_rng(seed)
    passes = [rng.permutation(count) for _ in range(math.ceil(length / count))]
    return np.concatenate(passes)[:length].astype(np.int64)


def smoothed(curve: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Each evaluation as the mean of itself and its two neighbours: one lucky score is not a target reached."""
    triples = zip(curve, curve[1:], curve[2:], strict=False)
    return [(b[0], (a[1] + b[1] + c[1]) / 3) for a, b, c in triples]


def samples_to(curve: list[tuple[int, float]], target: float) -> float:
    """Samples at the first crossing of the target, interpolated; NaN where it is never crossed."""
    before = (0, -math.inf)
    for samples, accuracy in curve:
        if accuracy >= target:
            if not math.isfinite(before[1]) or accuracy == before[1]:
                return float(samples)
            return before[0] + (samples - before[0]) * (target - before[1]) / (accuracy - before[1])
        before = (samples, accuracy)
    return math.nan
