"""Out of memory, in the many ways that frameworks and systems say it."""

from __future__ import annotations

import re
from pathlib import Path

from underwatt.errors import OutOfMemoryError

_SAID = re.compile(
    r"out of memory|OutOfMemory|CUBLAS_STATUS_ALLOC_FAILED|can't allocate memory|NvMapMemAlloc|RESOURCE_EXHAUSTED"
    r"|^(\S+\.)?_?(Array)?MemoryError\b",
    re.IGNORECASE | re.MULTILINE,
)


def says_out_of_memory(text: str) -> bool:
    """Whether an error text of PyTorch, another framework or the system means that memory ran out."""
    return _SAID.search(text) is not None


def does_not_fit(batch_size: int) -> OutOfMemoryError:
    """The one error for a batch size that is too large."""
    return OutOfMemoryError(f"Batch size {batch_size} does not fit in memory.", hint="Use a smaller batch size.")


def kernel_oom_kills() -> int:
    """How often the kernel has killed a process for memory: on a Jetson, this is how a batch does not fit."""
    try:
        counters = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
        return int(counters.get("oom_kill", 0))
    except (OSError, ValueError):
        return 0
