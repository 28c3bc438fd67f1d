"""What a training job is to the profiler: begin at a batch size, a stream of completed steps, end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from underwatt.records import WorkloadCost, WorkloadInfo


@dataclass(frozen=True, slots=True)
class Beat:
    """The moment at which a step was complete, in the time of the clock that the workload runs by.

    ``steps`` is more than one where a job reports several steps at once. The time of one step is the distance
    between two beats divided by the ``steps`` of the later one.
    """

    at_s: float
    steps: int = 1
    batch_size: int | None = None  # where an external job says it


class StepRun(Protocol):
    """A job under way at one batch size."""

    def step(self) -> Beat | None:
        """The next completed step, or ``None`` once the job has come to its own end.

        Raises ``OutOfMemoryError`` where the batch size does not fit, ``StepError`` where the job fails, hangs or
        never reports. An external job does not wait to be asked: beats from before this call are handed out first,
        so whoever times a window drops those whose ``at_s`` lies before it.
        """

    def stop(self) -> None:
        """End the job and free what it holds; may be repeated."""


class Workload(Protocol):
    """A job that can be run at any batch size."""

    @property
    def info(self) -> WorkloadInfo:
        """Who it is."""

    def cost(self) -> WorkloadCost | None:
        """What a step costs, or ``None`` where that cannot be counted (an external command)."""

    def start(self, batch_size: int) -> StepRun:
        """Begin training at a batch size."""
