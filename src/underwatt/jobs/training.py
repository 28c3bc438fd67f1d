"""Training itself: a model, an optimizer and batches at one batch size, one step at a time."""

from __future__ import annotations

import copy
from collections import deque
from typing import TYPE_CHECKING, Any

from underwatt.jobs._torch import DataLoader, Subset, TensorDataset, default_collate, torch
from underwatt.jobs.job import HOLD_OUT, Job

if TYPE_CHECKING:
    from collections.abc import Iterator

    from underwatt.jobs.job import Job


# A job's data as an endless stream of full batches.


class _Stacked(tuple[Any, ...]):
    """A batch that is made already and needs no collating."""

    __slots__ = ()


class Tensors:
    """Tensors of equal length as a dataset that hands out whole batches at once."""

    def __init__(self, parts: tuple[Any, ...]) -> None:
        self._parts = tuple(torch.as_tensor(part) for part in parts)

    def __len__(self) -> int:
        return len(self._parts[0])

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        return tuple(part[index] for part in self._parts)

    def __getitems__(self, indices: list[int]) -> _Stacked:
        return _Stacked(part[indices] for part in self._parts)


def as_dataset(job: Job, name: str = "data") -> Any:
    """One of the job's data fields as a map-style dataset."""
    data = getattr(job, name)
    if not isinstance(data, tuple):
        return data
    # A collate function of the user's expects single samples.
    return Tensors(data) if job.collate is None else TensorDataset(*data)


def train_and_test(job: Job, *, proxy: bool = False) -> tuple[Any, Any]:
    """What to train on and what to score on; a fifth is held out, by the job's seed, where no test data is given."""
    prefix = "proxy_" if proxy and job.proxy_data is not None else ""
    data = as_dataset(job, f"{prefix}data")
    if getattr(job, f"{prefix}test_data") is not None:
        return data, as_dataset(job, f"{prefix}test_data")
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(job.seed)).tolist()
    # A single sample is trained and scored on: there is nothing to hold out.
    held_out = min(max(1, round(len(data) * HOLD_OUT)), len(data) - 1)
    return Subset(data, order[held_out:]), Subset(data, order[:held_out] or order)


class EndlessBatches:
    """Indices of one batch after another: shuffled passes laid end to end, so that every batch is full.

    There is no pause between passes, and a batch may be larger than the data. The batch size may be changed on the
    way: the next batch has it, and no sample is skipped or repeated for it.
    """

    def __init__(self, length: int, batch_size: int, seed: int) -> None:
        self.batch_size = batch_size
        self.handed_out: deque[list[int]] = deque()  # batches that were not trained on yet, oldest first
        self._length = length
        self._generator = torch.Generator().manual_seed(seed)
        self._waiting: deque[int] = deque()  # of which a batch is taken off in its own time, however many wait

    def __iter__(self) -> Iterator[list[int]]:
        while True:
            while len(self._waiting) < self.batch_size:
                self._waiting += torch.randperm(self._length, generator=self._generator).tolist()
            batch = [self._waiting.popleft() for _ in range(self.batch_size)]
            self.handed_out.append(batch)
            yield batch

    def take_back(self) -> None:
        """Hand out again, in the same order, what was not trained on."""
        for batch in reversed(self.handed_out):
            self._waiting.extendleft(reversed(batch))
        self.handed_out.clear()

    def state(self) -> dict[str, Any]:
        """Where the stream stands, as after ``take_back``."""
        waiting = [index for batch in (*self.handed_out, self._waiting) for index in batch]
        return {"generator": self._generator.get_state(), "waiting": waiting}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where another stream over the same data stood."""
        self._generator.set_state(state["generator"])
        self._waiting = deque(state["waiting"])
        self.handed_out.clear()


def endless_loader(job: Job, dataset: Any, batches: EndlessBatches, *, pin_memory: bool) -> Iterator[Any]:
    """Full, shuffled batches without end."""
    return _loader(job, dataset, pin_memory, batch_sampler=batches)


def one_pass(job: Job, dataset: Any, batch_size: int) -> Iterator[Any]:
    """Each sample once, in order; the last batch may be smaller."""
    return _loader(job, dataset, False, batch_size=batch_size)


def first_batch(job: Job, batch_size: int) -> Any:
    """The first samples as a batch, repeated where there are fewer."""
    dataset = as_dataset(job)
    indices = [index % len(dataset) for index in range(batch_size)]
    return next(_loader(job, dataset, False, batch_sampler=[indices]))


def _loader(job: Job, dataset: Any, pin_memory: bool, **how: Any) -> Iterator[Any]:
    collate = _Collate(job.collate)
    return iter(DataLoader(dataset, collate_fn=collate, num_workers=job.num_workers, pin_memory=pin_memory, **how))


class _Collate:
    """The user's collate function, or the usual one; a class so that worker processes can be sent it."""

    def __init__(self, collate: Any) -> None:
        self._collate = collate or default_collate

    def __call__(self, samples: Any) -> Any:
        return samples if isinstance(samples, _Stacked) else self._collate(samples)


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
    def next_batch_size(self) -> int:
        """The size of the batch that the next step trains on."""
        return len(self._order.handed_out[0]) if self._order.handed_out else self._order.batch_size

    def step(self) -> torch.Tensor:
        """Train on one batch; the loss stays on the device, so that a GPU is not waited for."""
        return self.learn(self.fetch())

    def fetch(self) -> Any:
        """The next batch, on the device; the model is as it was."""
        assert self._batches is not None, "closed"
        return to_device(next(self._batches), self.device)

    def learn(self, batch: Any) -> torch.Tensor:
        """Change the model by the batch that was fetched last."""
        self._follow_size(len(self._order.handed_out[0]))
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        loss = loss_of(self.job, *forward(self.job, self.model, batch))
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self._order.handed_out.popleft()
        self.steps += 1
        self.samples += self.batch_size
        return loss.detach()

    def redo(self, batch_size: int) -> None:
        """A step did not fit into memory: its samples, and all that were prepared, come again in smaller batches."""
        self.optimizer.zero_grad(set_to_none=True)
        self._batches = None  # with its worker processes
        self._order.take_back()
        self._order.batch_size = batch_size
        self._open_loader()

    def state(self) -> dict[str, Any]:
        """All that is needed to go on elsewhere as if nothing had happened."""
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
        self._batches = None
        self._order.restore(state["order"])
        self._order.batch_size = state["batch_size"]
        self.batch_size, self.steps, self.samples = state["batch_size"], state["steps"], state["samples"]
        self._open_loader()
        torch.set_rng_state(state["random"])  # after the loader, which draws a number
        if state["random_gpu"] is not None and self.device.type == "cuda":
            torch.cuda.set_rng_state(state["random_gpu"], self.device)

    def _open_loader(self) -> None:
        pin_memory = self.device.type == "cuda"
        self._batches = endless_loader(self.job, self._train_data, self._order, pin_memory=pin_memory)

    def _follow_size(self, batch_size: int) -> None:
        if batch_size != self.batch_size:
            self.batch_size = batch_size
            for group in self.optimizer.param_groups:
                group["lr"] = self.job.lr_at(batch_size)

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
