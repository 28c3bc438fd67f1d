"""A job's data as an endless stream of full batches."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from underwatt.workload._torch import DataLoader, Subset, TensorDataset, default_collate, torch
from underwatt.workload.job import HOLD_OUT, Job

if TYPE_CHECKING:
    from collections.abc import Iterator


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
