"""What goes wrong in a user's training step, as one of our errors: out of memory is an answer, all else is a failure.

A step that ran out of memory can be done again, unless its optimizer had begun to change the model: ``watch_updates``
tells.
"""

from __future__ import annotations

import re
import traceback
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, TypeVar

from underwatt.errors import OutOfMemoryError, StepError, UnderwattError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_Result = TypeVar("_Result")
_OUT_OF_MEMORY = re.compile(
    r"out of memory|OutOfMemory|CUBLAS_STATUS_ALLOC_FAILED|can't allocate memory|NvMapMemAlloc|RESOURCE_EXHAUSTED"
    r"|^(\S+\.)?_?(Array)?MemoryError\b",
    re.IGNORECASE | re.MULTILINE,
)


def says_out_of_memory(text: str) -> bool:
    """Whether an error text of PyTorch, another framework or the system means that memory ran out."""
    return _OUT_OF_MEMORY.search(text) is not None


def ran_out_of_memory(error: Exception) -> bool:
    """Whether this is how PyTorch, or the system, says that memory ran out."""
    return isinstance(error, (MemoryError, OutOfMemoryError)) or says_out_of_memory(_text(error))


def kernel_oom_kills() -> int:
    """How often the kernel has killed a process for memory: on a Jetson, this is how a batch does not fit."""
    try:
        counters = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
        return int(counters.get("oom_kill", 0))
    except (OSError, ValueError):
        return 0


def does_not_fit(batch_size: int) -> OutOfMemoryError:
    """The one error for a batch size that is too large."""
    return OutOfMemoryError(f"Batch size {batch_size} does not fit in memory.", hint="Use a smaller batch size.")


def half_updated(batch_size: int, hint: str) -> OutOfMemoryError:
    """The error for a model that may be half changed."""
    return OutOfMemoryError(
        f"Memory ran out while the optimizer changed the model, at batch size {batch_size}: it may be half changed.",
        hint=hint,
    )


def call_job(batch_size: int, call: Callable[[], _Result], of_run: str = "") -> _Result:
    """Call into a job, its faults translated; an error about memory remembers nothing, not even the fault itself."""
    try:
        return call()
    except UnderwattError:
        raise
    except Exception as exc:  # the job is the user's code and may raise anything
        if not ran_out_of_memory(exc):
            first = _text(exc).splitlines()[0].rstrip(".")
            raise StepError(f"The job failed in a step at batch size {batch_size}{of_run}: {first}.") from exc
        traceback.clear_frames(exc.__traceback__)
    # Raised out here: an error that remembers the frames of a full GPU keeps that GPU full.
    raise does_not_fit(batch_size)


def _text(error: Exception) -> str:
    return "".join(traceback.format_exception_only(error)).strip()


@contextmanager
def watch_updates() -> Iterator[Event]:
    """Use as ``with watch_updates() as begun:`` around a step of any PyTorch optimizers; then ``begun.is_set()``."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    begun = Event()
    hook = register_optimizer_step_pre_hook(lambda *_: begun.set())
    try:
        yield begun
    finally:
        hook.remove()
