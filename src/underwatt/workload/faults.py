"""What a user's training step raises, as one of our errors: out of memory is an answer, all else is a failed step."""

from __future__ import annotations

import traceback
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from underwatt.errors import StepError, UnderwattError, WorkloadError
from underwatt.workload.oom import does_not_fit, says_out_of_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_Result = TypeVar("_Result")


@contextmanager
def job_faults(batch_size: int, of_run: str = "") -> Iterator[None]:
    """Run a part of a job, its faults translated; an error of ours passes as it is."""
    try:
        yield
    except UnderwattError:
        raise
    except Exception as exc:  # noqa: BLE001 - the job is the user's code and may raise anything
        error, cause = _translated(exc, batch_size, of_run)
        raise error from cause


def guarded(batch_size: int, call: Callable[[], _Result]) -> _Result:
    """Call into a job, its faults translated; an error about memory remembers nothing, not even the fault itself."""
    try:
        return call()
    except UnderwattError:
        raise
    except Exception as exc:  # noqa: BLE001 - as above
        error, cause = _translated(exc, batch_size)
    # Raised out here: an error that remembers the frames of a full GPU keeps that GPU full.
    raise error from cause


def _translated(exc: Exception, batch_size: int, of_run: str = "") -> tuple[WorkloadError, Exception | None]:
    text = "".join(traceback.format_exception_only(exc)).strip()
    if isinstance(exc, MemoryError) or says_out_of_memory(text):
        traceback.clear_frames(exc.__traceback__)
        return does_not_fit(batch_size), None
    last = text.splitlines()[0].rstrip(".")
    return StepError(f"The job failed in a step at batch size {batch_size}{of_run}: {last}."), exc
