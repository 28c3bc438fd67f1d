"""Somebody else's loader made to follow the batch size: it is put back as it was when that is over."""

from __future__ import annotations

import math
from itertools import islice
from typing import TYPE_CHECKING, Any

from underwatt.jobs._torch import torch
from underwatt.jobs.data import PassBatches

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def why_fixed(loader: Any) -> str:
    """Why the batch size of a loader cannot be changed; nothing where it can."""
    data = torch.utils.data
    if not isinstance(getattr(loader, "base_dataloader", loader), data.DataLoader):
        return "its batches come from several loaders, or from one that is none of PyTorch's"
    if isinstance(loader.dataset, data.IterableDataset) or loader.batch_sampler is None:
        return "its data set has no indices"
    if type(_whole(loader.batch_sampler)) is not data.BatchSampler or getattr(
        loader.batch_sampler, "split_batches", False
    ):
        return "it has a batch sampler of its own"
    return ""


def _whole(batch_sampler: Any) -> Any:
    """The batch sampler of all processes, where Accelerate has made one for each of them."""
    return getattr(batch_sampler, "batch_sampler", batch_sampler)


class Shard:
    """What one of several processes trains on: each takes every so manieth sample, and all take equally many."""

    def __init__(self, sampler: Any, rank: int, processes: int, *, drop_last: bool) -> None:
        self.sampler, self._rank, self._processes, self._drop_last = sampler, rank, processes, drop_last

    def __len__(self) -> int:
        return (math.floor if self._drop_last else math.ceil)(len(self.sampler) / self._processes)

    def __iter__(self) -> Iterator[int]:
        order = list(self.sampler)
        order += [
            order[at % len(order)] for at in range(len(self) * self._processes - len(order))
        ]  # as Accelerate does
        return islice(iter(order), self._rank, len(self) * self._processes, self._processes)

    def set_epoch(self, epoch: int) -> None:
        """Take the order of this epoch."""
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)


class LoaderFollower(PassBatches):
    """Takes the place of a loader's batch sampler, keeps its order, and makes batches as large as is asked for.

    It has no length, so that trainers see the end of an epoch when it comes.
    """

    def __init__(self, loader: Any, size: Callable[[], int], parts: int) -> None:
        self.loader, self._loader = loader, getattr(loader, "base_dataloader", loader)
        self._own = own = self._loader.batch_sampler
        self.batch_size, self.drop_last = _whole(own).batch_size, _whole(own).drop_last
        self.sampler = _whole(own).sampler
        if own is not _whole(own):
            self.sampler = Shard(self.sampler, own.process_index, own.num_processes, drop_last=self.drop_last)
        super().__init__(self.sampler, size, drop_last=self.drop_last, parts=parts)
        self._put(self)

    def trained(self, batches: int) -> int:
        """So many batches were trained on: how many samples those are."""
        return sum(len(self.handed_out.popleft()) for _ in range(batches))

    def close(self) -> None:
        """Give the loader its own batch sampler back."""
        self._put(self._own)

    def _put(self, batch_sampler: Any) -> None:
        object.__setattr__(self._loader, "batch_sampler", batch_sampler)  # which PyTorch does not have set otherwise
        self._loader._iterator = None  # workers that live on would go on with the other one
