"""One pass over a data set whose batch size may change from batch to batch."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from underwatt.errors import InputError
from underwatt.workload._torch import DataLoader, torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class PassBatches:
    """Indices of one pass, each batch as large as ``size()`` says at that moment; the last one may be smaller."""

    def __init__(self, length: int, size: Callable[[], int], *, shuffle: bool, drop_last: bool) -> None:
        self.handed_out: deque[list[int]] = deque()  # not trained on yet, oldest first
        self._size, self._drop_last = size, drop_last
        order = torch.randperm(length).tolist() if shuffle else list(range(length))
        self._waiting = deque(order)  # a batch is taken off in its own time, however many samples wait behind it

    def __iter__(self) -> Iterator[list[int]]:
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


def open_pass(
    dataset: Any, size: Callable[[], int], *, shuffle: bool, drop_last: bool, **more: Any
) -> tuple[PassBatches, Callable[[], Iterator[Any]]]:
    """The batches of one pass, and a function that opens a loader over those not handed out yet."""
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise InputError(
            f"The batch size of a {type(dataset).__name__} cannot be changed: it has no length or no indices.",
            hint="Give a map-style data set to tuner.loader, or use your own loader and call tuner.step() alone.",
        )
    wrong = {"batch_size", "sampler", "batch_sampler"} & set(more)
    if wrong:
        raise InputError(
            f"tuner.loader chooses {', '.join(sorted(wrong))} itself.",
            hint="Leave it out, or give batch_sizes to tune.",
        )
    batches = PassBatches(len(dataset), size, shuffle=shuffle, drop_last=drop_last)
    return batches, lambda: iter(DataLoader(dataset, batch_sampler=batches, **more))
