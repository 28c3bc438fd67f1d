"""What a user's training step raises, as one of our errors: out of memory is an answer, all else is a failed step."""

from __future__ import annotations

import traceback
from contextlib import contextmanager
from typing import TYPE_CHECKING

from underwatt.errors import StepError, UnderwattError, WorkloadError
from underwatt.workload.oom import does_not_fit, says_out_of_memory

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def job_faults(batch_size: int) -> Iterator[None]:
    """Run a part of a job, its faults translated; an error of ours passes as it is."""
    error: WorkloadError
    cause: BaseException | None = None
    try:
        yield
        return
    except UnderwattError:
        raise
    except Exception as exc:  # noqa: BLE001 - the job is the user's code and may raise anything
        text = "".join(traceback.format_exception_only(exc)).strip()
        if isinstance(exc, MemoryError) or says_out_of_memory(text):
            traceback.clear_frames(exc.__traceback__)
            error = does_not_fit(batch_size)
        else:
            last = text.splitlines()[0].rstrip(".")
            error, cause = StepError(f"The job failed in a step at batch size {batch_size}: {last}."), exc
    # Raised out here: an error that remembers the frames of a full GPU keeps that GPU full.
    raise error from cause
