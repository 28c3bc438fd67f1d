"""One pass over a data set whose batch size may change from batch to batch."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from underwatt.errors import InputError
from underwatt.jobs._torch import DataLoader, torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


def fillable(batch_sizes: Sequence[int], length: int) -> tuple[int, ...]:
    """The batch sizes that a data set of this length can fill; others could be neither measured nor compared."""
    found = tuple(size for size in batch_sizes if size <= length)
    if not found:
        raise InputError(
            f"The data set has {length} samples, and the smallest batch size is {min(batch_sizes)}.",
            hint=f"Offer batch sizes of at most {length}." if length else "Check where its samples come from.",
        )
    return found


def left_out(batch_sizes: Sequence[int], length: int) -> str:
    """What to say of the batch sizes that are not offered; nothing where all are."""
    large = [str(size) for size in sorted(batch_sizes) if size > length]
    return f"The data set has {length} samples: batch size {', '.join(large)} is left out." if large else ""


class PassBatches:
    """Indices of one pass, each batch as large as ``size()`` says at that moment; the last one may be smaller."""

    def __init__(self, length: int, size: Callable[[], int], *, shuffle: bool, drop_last: bool) -> None:
        self.handed_out: deque[list[int]] = deque()  # not trained on yet, oldest first
        self.taken_back = False  # then a loader must be opened anew
        self._size, self._drop_last = size, drop_last
        order = torch.randperm(length).tolist() if shuffle else list(range(length))
        self._waiting = deque(order)  # a batch is taken off in its own time, however many samples wait behind it

    def __iter__(self) -> Iterator[list[int]]:
        self.taken_back = False
        while self._waiting:
            size = self._size()
            if len(self._waiting) < size and self._drop_last:
                return
            batch = [self._waiting.popleft() for _ in range(min(size, len(self._waiting)))]
            self.handed_out.append(batch)
            yield batch

    def take_back(self) -> None:
        """Hand out again what was not trained on."""
        for batch in reversed(self.handed_out):
            self._waiting.extendleft(reversed(batch))
        self.handed_out.clear()
        self.taken_back = True


def open_pass(
    dataset: Any, size: Callable[[], int], *, shuffle: bool, drop_last: bool, **more: Any
) -> tuple[PassBatches, Callable[[], Iterator[Any]]]:
    """The batches of one pass, and a function that opens a loader over those not handed out yet."""
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise InputError(
            f"The batch size of a {type(dataset).__name__} cannot be changed: it has no length or no indices.",
            hint="Give a map-style data set, or call tuner.starts(size) and tuner.step() around each step of your own.",
        )
    wrong = {"batch_size", "sampler", "batch_sampler"} & set(more)
    if wrong:
        raise InputError(
            f"tuner.loader chooses {', '.join(sorted(wrong))} itself.",
            hint="Leave it out, or give batch_sizes to tune.",
        )
    batches = PassBatches(len(dataset), size, shuffle=shuffle, drop_last=drop_last)
    return batches, lambda: iter(DataLoader(dataset, batch_sampler=batches, **more))
