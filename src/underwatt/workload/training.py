"""Training itself: a model, an optimizer and batches at one batch size, one step at a time."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from underwatt.workload._torch import torch
from underwatt.workload.data import endless_loader, one_pass, train_and_test

if TYPE_CHECKING:
    from collections.abc import Iterator

    from underwatt.workload.job import Job

EVALUATION_BATCH = 256


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
        self._seed = job.seed if seed is None else seed
        self.model = build_model(job, self._seed).to(self.device)
        self.optimizer = job.make_optimizer(self.model.parameters(), job.lr_at(batch_size))
        self.steps = 0
        self.samples = 0
        self._train_data, self._test_data = train_and_test(job, proxy=proxy)
        self._batches: Iterator[Any] | None = None
        self.set_batch_size(batch_size)

    def set_batch_size(self, batch_size: int) -> None:
        """Go on at another batch size."""
        self.batch_size = batch_size
        for group in self.optimizer.param_groups:
            group["lr"] = self.job.lr_at(batch_size)
        self._batches = endless_loader(
            self.job,
            self._train_data,
            batch_size,
            self._seed + self.steps,  # a change on the way must not repeat the first batches
            pin_memory=self.device.type == "cuda",
        )

    def step(self) -> torch.Tensor:
        """Train on one batch; the loss stays on the device, so that a GPU is not waited for."""
        assert self._batches is not None, "closed"
        batch = to_device(next(self._batches), self.device)
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        loss = loss_of(self.job, *forward(self.job, self.model, batch))
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.steps += 1
        self.samples += self.batch_size
        return loss.detach()

    def evaluate(self) -> float:
        """The metric on held-out data, each sample counting once."""
        self.model.eval()
        total = count = 0.0
        with torch.no_grad():
            for batch in one_pass(self.job, self._test_data, EVALUATION_BATCH):
                output, targets = forward(self.job, self.model, to_device(batch, self.device))
                samples = len(targets)
                total += metric_of(self.job, output, targets) * samples
                count += samples
        return total / count

    def close(self) -> None:
        """Let go of the loader, with its worker processes."""
        self._batches = None
