"""What follows the batch size in a training of somebody else's: the loader, the learning rate, its schedulers.

Each takes the place of something for a while and puts it back when it is closed.
"""

from __future__ import annotations

import math
from itertools import islice
from typing import TYPE_CHECKING, Any

from underwatt.errors import InputError
from underwatt.jobs._torch import torch
from underwatt.jobs.data import PassBatches
from underwatt.jobs.job import scaled_lr, usual_rule

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from underwatt.jobs.job import LrRule


class RateFollower:
    """Has an optimizer's learning rate follow the batch size, for the length of each of its steps.

    Outside its own ``step`` the optimizer has its own rate, so that a learning-rate scheduler, wherever a loop calls
    it, and a checkpoint never see ours.
    """

    def __init__(self, optimizer: Any, lr_batch_size: int, rule: LrRule | None = None) -> None:
        self.optimizer = getattr(optimizer, "optimizer", optimizer)  # Accelerate and Lightning wrap it
        self._lr_batch_size = lr_batch_size
        self._rule: LrRule = rule if rule is not None else usual_rule(self.optimizer)
        self._batch_size = lr_batch_size
        self._own: Sequence[Any] = ()  # rates, while ours are in their place
        self._hooks: tuple[Any, ...] = ()
        if not hasattr(self.optimizer, "register_step_pre_hook"):
            raise InputError(
                f"The learning rate of a {type(optimizer).__name__} cannot be followed: it is no PyTorch optimizer.",
                hint="Leave optimizer out, and set the rate by tuner.batch_size yourself.",
            )

    def follow(self, batch_size: int) -> None:
        """Take the rate of a batch size from the optimizer's next step on."""
        self._batch_size = batch_size
        if not self._hooks:
            self._hooks = (
                self.optimizer.register_step_pre_hook(self._scale),
                self.optimizer.register_step_post_hook(self._back),
            )

    def close(self) -> None:
        """Leave the optimizer alone again."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = ()
        self._back()

    def _scale(self, *_: Any) -> None:
        self._back()  # where a step raised, nobody has done it
        groups = self.optimizer.param_groups
        self._own = [group["lr"] for group in groups]
        for group in groups:
            if group["lr"]:  # a warm-up may begin at zero, a schedule end there, and a frozen group stay there
                group["lr"] = scaled_lr(group["lr"], self._lr_batch_size, self._batch_size, self._rule)

    def _back(self, *_: Any) -> None:
        for group, lr in zip(self.optimizer.param_groups, self._own, strict=False):
            group["lr"] = lr
        self._own = ()


class ScheduleFollower:
    """Has a learning-rate scheduler that is stepped with the optimizer count samples: a step for each ``batch_size``.

    So a schedule made for a number of steps spans the same data, however many steps that takes now.
    """

    def __init__(self, scheduler: Any, batch_size: int) -> None:
        self._scheduler, self._batch_size, self._size = scheduler, batch_size, batch_size
        self._own = own = type(scheduler)
        self.left_over = 0  # samples that no step was made for yet

        def step(_: Any, *args: Any, **kwargs: Any) -> None:
            self.left_over += self._size
            while self.left_over >= self._batch_size:
                self.left_over -= self._batch_size
                own.step(scheduler, *args, **kwargs)

        # By its class: what a scheduler's own dictionary holds goes into checkpoints.
        scheduler.__class__ = type(own.__name__, (own,), {"step": step})

    def follow(self, batch_size: int) -> None:
        """The step under way is of this batch size."""
        self._size = batch_size

    def close(self) -> None:
        """Let every step count again."""
        self._scheduler.__class__ = self._own


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
