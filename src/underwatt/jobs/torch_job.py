"""A PyTorch job run inside this process, one real training step at a time."""

from __future__ import annotations

import gc
import logging
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from underwatt.device.clock import SystemClock
from underwatt.errors import JobError, StepError
from underwatt.jobs._torch import torch
from underwatt.jobs.cost import count_cost
from underwatt.jobs.faults import guarded
from underwatt.jobs.identity import job_info
from underwatt.jobs.training import Training
from underwatt.measure.workload import Beat

if TYPE_CHECKING:
    from collections.abc import Callable

    from underwatt.jobs.job import Job
    from underwatt.records import WorkloadCost, WorkloadInfo

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")


class TorchWorkload:
    """A job in this process: quick to start, but a CUDA fault takes the process along (see ``isolated``)."""

    def __init__(self, job: Job) -> None:
        self.job = job

    @cached_property
    def info(self) -> WorkloadInfo:
        """Who it is."""
        return job_info(self.job)

    @cached_property
    def _cost(self) -> WorkloadCost | None:
        try:
            return count_cost(self.job)
        except JobError as exc:
            _log.warning("%s", exc)
            return None

    def cost(self) -> WorkloadCost | None:
        """What a step costs, counted once; ``None``, with a warning, for a model that cannot be counted."""
        return self._cost

    def start(self, batch_size: int) -> TorchRun:
        """Build the model and its optimizer, and begin."""
        return TorchRun(self.job, batch_size)


class TorchRun:
    """A job under way in this process.

    On a GPU a call queues one step and then waits for the *previous* one. Waiting for every step would let the GPU
    run dry between steps and make small batches look slower than they train; not waiting at all would time the
    queueing. A beat is therefore the true completion of a step, seen with the next one already queued. The wait
    blocks instead of spinning, so that the CPU draws no power for it.
    """

    def __init__(self, job: Job, batch_size: int) -> None:
        self._batch_size = batch_size
        self._clock = SystemClock()
        self._in_flight: Any = None
        self._training: Training | None = self._guarded(lambda: Training(job, batch_size))

    @property
    def training(self) -> Training:
        """The model, its optimizer and its score."""
        if self._training is None:
            raise StepError("The job was stopped.", hint="Start it again at a batch size.")
        return self._training

    def step(self) -> Beat:
        """Train on one batch."""
        # No name for the training here: a caller who keeps an error keeps the names of this frame, and so the GPU.
        self._guarded(lambda: self.training.step())
        if self.training.device.type == "cuda":
            self._guarded(self._wait_for_previous)
        return Beat(self._clock.now_s())

    def stop(self) -> None:
        """Drop model, optimizer and loader, and give GPU memory back to the system."""
        if self._training is None:
            return
        on_cuda = self._training.device.type == "cuda"
        self._training.close()
        self._training = self._in_flight = None
        gc.collect()
        if on_cuda:
            torch.cuda.empty_cache()

    def _wait_for_previous(self) -> None:
        cuda = torch.cuda
        previous, self._in_flight = self._in_flight, cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self._in_flight.record()
        if previous is None:  # the first step: there is only itself to wait for
            previous = self._in_flight
        previous.synchronize()

    def _guarded(self, call: Callable[[], _Result]) -> _Result:
        """Call into the job, its faults translated."""
        return guarded(self._batch_size, call)
