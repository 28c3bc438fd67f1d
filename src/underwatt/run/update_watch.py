"""A step that ran out of memory can be done again, unless its optimizer had begun to change the model."""

from __future__ import annotations

import traceback
from typing import TYPE_CHECKING, Any

from underwatt.errors import OutOfMemoryError
from underwatt.workload.oom import says_out_of_memory

if TYPE_CHECKING:
    from typing_extensions import Self


class UpdateWatch:
    """Use as ``with UpdateWatch() as watch:`` around a step of any PyTorch optimizers; then ``watch.begun``."""

    def __init__(self) -> None:
        self.begun = False
        self._hook: Any = None

    def __enter__(self) -> Self:
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        self.begun = False
        self._hook = register_optimizer_step_pre_hook(self._begins)
        return self

    def __exit__(self, *_: object) -> None:
        self._hook.remove()

    def _begins(self, *_: Any) -> None:
        self.begun = True


def ran_out_of_memory(error: Exception) -> bool:
    """Whether this is how PyTorch, or the system, says that memory ran out."""
    said = "".join(traceback.format_exception_only(error))
    return isinstance(error, (MemoryError, OutOfMemoryError)) or says_out_of_memory(said)


def half_updated(batch_size: int, hint: str) -> OutOfMemoryError:
    """The error for a model that may be half changed."""
    return OutOfMemoryError(
        f"Memory ran out while the optimizer changed the model, at batch size {batch_size}: it may be half changed.",
        hint=hint,
    )
