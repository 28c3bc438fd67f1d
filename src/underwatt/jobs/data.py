"""A job's data as batches: what is trained and scored on, and streams whose batch size may change on the way.

Worker processes prepare batches ahead, so a stream remembers what it handed out until that was trained on: nothing is
skipped or repeated where a step is done again, or a training goes on from a checkpoint.
"""

from __future__ import annotations

import math
from collections import deque
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from underwatt.errors import InputError, JobError
from underwatt.jobs._torch import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

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
    """Samples, by their indices mostly, handed out in batches that can be taken back."""

    def __init__(self) -> None:
        self.handed_out: deque[list[Any]] = deque()  # batches that were not trained on yet, oldest first
        self.taken_back = False  # then a loader must be opened anew
        self._waiting: deque[Any] = deque()  # of which a batch is taken off in its own time, however many wait

    def _hand_out(self, size: int) -> list[Any]:
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
    way: the next batch has it. One of more than ``most_at_once`` samples is handed out in parts, which ``steps`` names.
    A sampler of the user's says what a pass is, which is drawn as a whole; one that brings no generator is given ours,
    whose state is known.
    """

    def __init__(self, length: int, batch_size: int, seed: int, sampler: Any = None) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.most_at_once: float = math.inf
        self.steps: deque[list[int]] = deque()  # the parts of each step that was not trained on yet, oldest first
        self._length, self._sampler, self._passes = length, sampler, 0
        self._generator = torch.Generator().manual_seed(seed)
        if getattr(sampler, "generator", self) is None:
            sampler.generator = self._generator
        self._generator = getattr(sampler, "generator", self._generator)

    def __iter__(self) -> Iterator[list[int]]:
        while True:
            while len(self._waiting) < self.batch_size:
                self._waiting += self._pass()
            self.steps.append(self.next_parts())
            for part in self.steps[-1]:
                yield self._hand_out(part)

    def next_parts(self) -> list[int]:
        """The parts of the next step, as equal as can be."""
        parts = math.ceil(self.batch_size / min(self.most_at_once, self.batch_size))
        return step_parts(self.batch_size, math.ceil(self.batch_size / parts), parts)

    def trained(self) -> None:
        """The oldest step was trained on."""
        for _ in self.steps.popleft():
            self.handed_out.popleft()

    def take_back(self) -> None:
        """Hand out again, in the same order, what was not trained on."""
        super().take_back()
        self.steps.clear()

    def _pass(self) -> list[Any]:
        if self._sampler is None:
            return torch.randperm(self._length, generator=self._generator).tolist()
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(self._passes)
        self._passes += 1
        if not (order := list(self._sampler)):
            raise JobError("The job's sampler names no sample.", hint="Check what it is made with.")
        return order

    def state(self) -> dict[str, Any]:
        """Where the stream stands, as after ``take_back``."""
        waiting = [index for batch in (*self.handed_out, self._waiting) for index in batch]
        return {"generator": self._generator.get_state(), "waiting": waiting, "passes": self._passes}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where another stream over the same data stood."""
        self._generator.set_state(state["generator"])
        self._waiting, self._passes = deque(state["waiting"]), state["passes"]
        self.handed_out.clear()
        self.steps.clear()


class PassBatches(_Batches):
    """Pass after pass over what ``order`` names, each batch as large as ``size()`` says at that moment.

    A step may be of several batches whose gradients are added up (``parts``): they differ by one sample at most, and a
    pass is a whole number of steps. The last step of a pass may be smaller, or is dropped. What was taken back, or
    restored, is the rest of a pass that the next ``iter`` goes on with.
    """

    def __init__(
        self, order: Iterable[Any], size: Callable[[], int], *, drop_last: bool = False, parts: int = 1
    ) -> None:
        super().__init__()
        self._order, self._size, self._drop_last, self._parts = order, size, drop_last, parts
        self._source: Iterator[Any] = iter(())  # of this pass, what does not wait yet
        self._is_restored = False  # a whole step, when it was kept: it may be less than one now, and is not dropped
        self.passes = 0  # begun so far

    def __iter__(self) -> Iterator[list[Any]]:
        if not self.taken_back:
            self.passes += 1
            self.handed_out.clear()
            self._waiting.clear()
            self._source = iter(self._order)
        self.taken_back = False
        while True:
            size = self._size()
            whole = size * self._parts
            self._waiting += islice(self._source, max(0, whole + self._parts - 1 - len(self._waiting)))
            left = len(self._waiting)
            if not left or (left < whole and self._drop_last and not self._is_restored):
                self._waiting.clear()
                return
            self._is_restored = False
            for part in step_parts(left, size, self._parts):
                yield self._hand_out(part)

    def state(self) -> list[Any]:
        """What of this pass was not trained on yet, and is not to be dropped."""
        self._waiting += self._source
        if self._drop_last and not self.handed_out and len(self._waiting) < self._size() * self._parts:
            return []
        return [index for batch in (*self.handed_out, self._waiting) for index in batch]

    def restore(self, rest: Iterable[Any]) -> None:
        """Go on with the rest of a pass."""
        self.handed_out.clear()
        self._waiting, self._source, self.taken_back = deque(rest), iter(()), True
        self._is_restored = True


def step_parts(left: int, size: int, parts: int) -> list[int]:
    """The batches of a step in parts, of so many samples that are left; never so that a later step lacks a part."""
    whole = size * parts
    total = min(left, whole)
    if 0 < left - whole < parts:
        total = left - parts if size > 1 else left
    even, more = divmod(total, parts)
    return [even + 1] * more + [even] * (parts - more if even else 0)


def open_batches(
    dataset: Any,
    size: Callable[[], int],
    *,
    shuffle: bool = False,
    drop_last: bool = False,
    sampler: Any = None,
    generator: Any = None,
    **more: Any,
) -> tuple[PassBatches, Callable[[], Iterator[Any]]]:
    """Batches of a user's data set, pass after pass, and a function that opens a loader over a pass or what is left.

    An iterable data set is read sample by sample, by worker processes too, and put into batches here.
    """
    if wrong := ", ".join(sorted({"batch_size", "batch_sampler"} & set(more))):
        raise InputError(f"tuner.loader chooses {wrong} itself.", hint="Leave it out, or give batch_sizes to tune.")
    data = torch.utils.data
    if isinstance(dataset, data.IterableDataset):
        if shuffle or sampler is not None:
            raise InputError(
                f"A {type(dataset).__name__} comes in its own order.", hint="Leave shuffle and sampler out."
            )
        collate = more.pop("collate_fn", None) or data.default_collate
        samples = data.DataLoader(dataset, batch_size=None, collate_fn=_same, generator=generator, **more)
        batches = PassBatches(samples, size, drop_last=drop_last)
        return batches, lambda: map(collate, batches)
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise InputError(
            f"The batch size of a {type(dataset).__name__} cannot be changed: it has no length or no indices.",
            hint="Give a data set of PyTorch's, or call tuner.starts(size) and tuner.step() around each step of yours.",
        )
    if sampler is not None and shuffle:
        raise InputError("A sampler of your own says the order: shuffle says another.", hint="Leave one of them out.")
    if sampler is None:
        sampler = data.RandomSampler(dataset, generator=generator) if shuffle and len(dataset) else range(len(dataset))
    batches = PassBatches(sampler, size, drop_last=drop_last)
    return batches, lambda: iter(data.DataLoader(dataset, batch_sampler=batches, generator=generator, **more))


def _same(sample: Any) -> Any:
    return sample


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
