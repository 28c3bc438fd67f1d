"""A job's data as batches: what is trained and scored on, and streams whose batch size may change on the way.

Worker processes prepare batches ahead, so a stream remembers what it handed out until that was trained on: nothing is
skipped or repeated where a step is done again, or a training goes on from a checkpoint.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any

from underwatt.errors import InputError
from underwatt.jobs._torch import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from underwatt.jobs.job import Job

HOLD_OUT = 0.2


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
    return Tensors(data) if job.collate is None else torch.utils.data.TensorDataset(*data)


def train_and_test(job: Job, *, proxy: bool = False) -> tuple[Any, Any]:
    """What to train on and what to score on; a fifth is held out, by the job's seed, where no test data is given."""
    prefix = "proxy_" if proxy and job.proxy_data is not None else ""
    data = as_dataset(job, f"{prefix}data")
    if getattr(job, f"{prefix}test_data") is not None:
        return data, as_dataset(job, f"{prefix}test_data")
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(job.seed)).tolist()
    # A single sample is trained and scored on: there is nothing to hold out.
    held_out = min(max(1, round(len(data) * HOLD_OUT)), len(data) - 1)
    subset = torch.utils.data.Subset
    return subset(data, order[held_out:]), subset(data, order[:held_out] or order)


def fillable(batch_sizes: Sequence[int], length: int) -> tuple[tuple[int, ...], str]:
    """The batch sizes that a data set of this length can fill, and what to say of the others, if there are any.

    Those could be neither measured nor compared.
    """
    found = tuple(size for size in batch_sizes if size <= length)
    if not found:
        raise InputError(
            f"The data set has {length} samples, and the smallest batch size is {min(batch_sizes)}.",
            hint=f"Offer batch sizes of at most {length}." if length else "Check where its samples come from.",
        )
    large = ", ".join(str(size) for size in sorted(batch_sizes) if size > length)
    return found, f"The data set has {length} samples: batch size {large} is left out." if large else ""


class _Batches:
    """Indices of samples, handed out in batches that can be taken back."""

    def __init__(self) -> None:
        self.handed_out: deque[list[int]] = deque()  # batches that were not trained on yet, oldest first
        self.taken_back = False  # then a loader must be opened anew
        self._waiting: deque[int] = deque()  # of which a batch is taken off in its own time, however many wait

    def _hand_out(self, size: int) -> list[int]:
        batch = [self._waiting.popleft() for _ in range(size)]
        self.handed_out.append(batch)
        return batch

    def take_back(self) -> None:
        """Hand out again, in the same order, what was not trained on."""
        for batch in reversed(self.handed_out):
            self._waiting.extendleft(reversed(batch))
        self.handed_out.clear()
        self.taken_back = True


class EndlessBatches(_Batches):
    """One batch after another: shuffled passes laid end to end, so that every batch is full.

    There is no pause between passes, and a batch may be larger than the data. The batch size may be changed on the
    way: the next batch has it.
    """

    def __init__(self, length: int, batch_size: int, seed: int) -> None:
        super().__init__()
        self.batch_size = batch_size
        self._length = length
        self._generator = torch.Generator().manual_seed(seed)

    def __iter__(self) -> Iterator[list[int]]:
        while True:
            while len(self._waiting) < self.batch_size:
                self._waiting += torch.randperm(self._length, generator=self._generator).tolist()
            yield self._hand_out(self.batch_size)

    def state(self) -> dict[str, Any]:
        """Where the stream stands, as after ``take_back``."""
        waiting = [index for batch in (*self.handed_out, self._waiting) for index in batch]
        return {"generator": self._generator.get_state(), "waiting": waiting}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where another stream over the same data stood."""
        self._generator.set_state(state["generator"])
        self._waiting = deque(state["waiting"])
        self.handed_out.clear()


class PassBatches(_Batches):
    """One pass, each batch as large as ``size()`` says at that moment; the last one may be smaller."""

    def __init__(self, length: int, size: Callable[[], int], *, shuffle: bool, drop_last: bool) -> None:
        super().__init__()
        self._size, self._drop_last = size, drop_last
        self._waiting += torch.randperm(length).tolist() if shuffle else range(length)

    def __iter__(self) -> Iterator[list[int]]:
        self.taken_back = False
        while self._waiting:
            size = self._size()
            if len(self._waiting) < size and self._drop_last:
                return
            yield self._hand_out(min(size, len(self._waiting)))


def open_pass(
    dataset: Any, size: Callable[[], int], *, shuffle: bool, drop_last: bool, **more: Any
) -> tuple[PassBatches, Callable[[], Iterator[Any]]]:
    """The batches of one pass over a user's data set, and a function that opens a loader over those that are left."""
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise InputError(
            f"The batch size of a {type(dataset).__name__} cannot be changed: it has no length or no indices.",
            hint="Give a map-style data set, or call tuner.starts(size) and tuner.step() around each step of your own.",
        )
    if wrong := ", ".join(sorted({"batch_size", "sampler", "batch_sampler"} & set(more))):
        raise InputError(f"tuner.loader chooses {wrong} itself.", hint="Leave it out, or give batch_sizes to tune.")
    batches = PassBatches(len(dataset), size, shuffle=shuffle, drop_last=drop_last)
    return batches, lambda: iter(torch.utils.data.DataLoader(dataset, batch_sampler=batches, **more))


def open_loader(job: Job, dataset: Any, **how: Any) -> Iterator[Any]:
    """A PyTorch loader over a data set of the job; ``how`` says ``batch_size`` or ``batch_sampler``."""
    collate = partial(_collated, job.collate or torch.utils.data.default_collate)  # which worker processes can be sent
    return iter(torch.utils.data.DataLoader(dataset, collate_fn=collate, num_workers=job.num_workers, **how))


def _collated(collate: Callable[[Any], Any], samples: Any) -> Any:
    return samples if isinstance(samples, _Stacked) else collate(samples)


def first_batch(job: Job, batch_size: int) -> Any:
    """The first samples as a batch, repeated where there are fewer."""
    dataset = as_dataset(job)
    indices = [index % len(dataset) for index in range(batch_size)]
    return next(open_loader(job, dataset, batch_sampler=[indices]))
