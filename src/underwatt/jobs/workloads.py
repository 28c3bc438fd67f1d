"""The ways to run a job step by step: in this process, in one of its own, or simulated; and which one a user means.

A job that is a command of any language is in ``command``. PyTorch is imported only where a job is run here.
"""

from __future__ import annotations

import gc
import logging
import sys
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

from underwatt.device.base import SimulatesLoad
from underwatt.device.timing import SystemClock
from underwatt.errors import InputError, JobError, OutOfMemoryError, StepError, UnderwattError
from underwatt.jobs.command import DEFAULT_LIMITS, DEFAULT_RATE, CommandRate, CommandRun, CommandWorkload, Limits
from underwatt.jobs.faults import call_job
from underwatt.jobs.job import Job, load_job
from underwatt.measure.workload import Beat

if TYPE_CHECKING:
    from collections.abc import Sequence

    from underwatt.device.base import Device
    from underwatt.device.timing import Clock
    from underwatt.jobs.training import Training
    from underwatt.measure.workload import Workload
    from underwatt.records import WorkloadCost, WorkloadInfo

JOB_HELP = "file.py:factory, module:factory, or -- COMMAND with {batch_size} in it"
_log = logging.getLogger(__name__)


def choose_workload(
    words: Sequence[str] | Job,
    device: Device,
    *,
    rate: CommandRate = DEFAULT_RATE,
    limits: Limits = DEFAULT_LIMITS,
) -> tuple[Workload, tuple[int, ...]]:
    """The workload that the words of a command line name, and the batch sizes it suggests (none for a command).

    A job that is given as such, and not by its address, is run in this process.
    """
    if isinstance(words, Job):
        return _suited(TorchWorkload(words), device)
    if not words:
        raise InputError("No job was named.", hint=f"Give {JOB_HELP}.")
    if len(words) == 1 and words[0].endswith(".py"):
        raise InputError(
            f"{words[0]} is a file; which of its functions makes the job?",
            hint=f"Name it: {words[0]}:factory. A command goes after --, with {{batch_size}} in it.",
        )
    if len(words) > 1 or ":" not in words[0]:
        if isinstance(device, SimulatesLoad):
            raise InputError(
                f"A command cannot run on {device.info.name}: what a foreign program computes cannot be simulated.",
                hint="Give a job as file.py:factory, or use a real device.",
            )
        return CommandWorkload(words, rate=rate, limits=limits), ()
    return _suited(IsolatedWorkload(words[0], limits), device)


def _suited(workload: TorchWorkload | IsolatedWorkload, device: Device) -> tuple[Workload, tuple[int, ...]]:
    """The job itself, or its cost where the device simulates it."""
    batch_sizes = tuple(workload.job.batch_sizes)
    if not isinstance(device, SimulatesLoad):
        return workload, batch_sizes
    cost = workload.cost()
    if cost is None:
        raise JobError(
            f"The cost of {workload.info.name} cannot be counted, so it cannot be simulated.",
            hint="Its model must run on PyTorch's meta device; otherwise use a real device.",
        )
    return SimulatedWorkload(workload.info, cost, device), batch_sizes


class _JobWorkload:
    """Who a PyTorch job is and what a step of it costs, wherever it runs; neither touches a GPU."""

    def __init__(self, job: Job) -> None:
        self.job = job

    @cached_property
    def info(self) -> WorkloadInfo:
        """Its identity."""
        from underwatt.jobs.identity import job_info

        return job_info(self.job)

    @cached_property
    def _cost(self) -> WorkloadCost | None:
        from underwatt.jobs.cost import count_cost

        try:
            return count_cost(self.job)
        except JobError as exc:
            _log.warning("%s", exc)
            return None

    def cost(self) -> WorkloadCost | None:
        """What a step costs, counted once; ``None``, with a warning, for a model that cannot be counted."""
        return self._cost


class TorchWorkload(_JobWorkload):
    """A job in this process: quick to start, but a CUDA fault takes the process along."""

    def start(self, batch_size: int) -> TorchRun:
        """Build the model and its optimizer, and begin."""
        return TorchRun(self.job, batch_size)


class TorchRun:
    """A job under way in this process.

    On a GPU a beat is the true completion of a step, seen with the next one already queued (see ``Completion``).
    """

    def __init__(self, job: Job, batch_size: int) -> None:
        from underwatt.jobs.training import Completion, Training

        self._batch_size = batch_size
        self._clock = SystemClock()
        self.training: Training | None = call_job(batch_size, lambda: Training(job, batch_size))
        self._completion = Completion(on_gpu=self.training.device.type == "cuda")

    def step(self) -> Beat:
        """Train on one batch."""
        call_job(self._batch_size, self._train)
        return Beat(self._clock.now_s())

    def _train(self) -> None:
        # No name for the training here: a caller who keeps an error keeps the names of its frames, and so the GPU.
        if self.training is None:
            raise StepError("The job was stopped.", hint="Start it again at a batch size.")
        self.training.step()
        self._completion.wait(pausing=False)

    def stop(self) -> None:
        """Drop model, optimizer and loader, and give GPU memory back to the system."""
        if self.training is None:
            return
        self.training.close()
        self.training = None
        gc.collect()
        if self._completion.on_gpu:
            from underwatt.jobs._torch import torch

            torch.cuda.empty_cache()


class IsolatedWorkload(_JobWorkload):
    """The job at an address in a process of its own, so that a CUDA fault or a full memory never ends the profiler.

    It runs as an external command would: with the same pipe, limits and guard.
    """

    def __init__(self, address: str, limits: Limits = DEFAULT_LIMITS) -> None:
        super().__init__(load_job(address))
        command = [sys.executable, "-m", __name__, address, "{batch_size}"]
        self._command = CommandWorkload(command, limits=limits, info=self.info)

    def start(self, batch_size: int) -> CommandRun:
        """Start a process that trains at a batch size."""
        return self._command.start(batch_size)


def train_until_ended(address: str, batch_size: int) -> int:
    """What the process of an isolated job does: out of memory is reported, anything else is the last line printed."""
    from underwatt.jobs import emitter  # only here: whoever imports it speaks once more at exit

    try:
        run = TorchWorkload(load_job(address)).start(batch_size)
        while True:
            run.step()
            emitter.step()
    except OutOfMemoryError:
        emitter.oom()
        return 0
    except UnderwattError as exc:
        print(exc, file=sys.stderr)
        return 1


class SimulatedDevice(SimulatesLoad, Protocol):
    """The part of a simulated device that running steps needs: its time, and a step passing in it."""

    @property
    def clock(self) -> Clock:
        """The time it lives in."""
        ...


class SimulatedWorkload:
    """Steps of a known cost that pass in the time of a simulated device; nothing is trained."""

    def __init__(self, info: WorkloadInfo, cost: WorkloadCost, device: SimulatedDevice) -> None:
        self.info, self._cost, self._device = info, cost, device

    def cost(self) -> WorkloadCost:
        """The cost that the device simulates."""
        return self._cost

    def start(self, batch_size: int) -> SimulatedRun:
        """Begin at a batch size."""
        return SimulatedRun(self._cost, batch_size, self._device)


class SimulatedRun:
    """A simulated job under way."""

    def __init__(self, cost: WorkloadCost, batch_size: int, device: SimulatedDevice) -> None:
        self._cost, self._batch_size, self._device = cost, batch_size, device

    def step(self) -> Beat:
        """Let one step pass on the device."""
        self._device.run_step(self._cost, self._batch_size)
        return Beat(self._device.clock.now_s())

    def stop(self) -> None:
        """Nothing goes on in the background."""


if __name__ == "__main__":
    sys.exit(train_until_ended(sys.argv[1], int(sys.argv[2])))
