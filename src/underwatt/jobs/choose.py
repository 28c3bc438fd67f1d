"""Which workload a user's words mean on a device: a job file or a command, run for real or simulated."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from underwatt.device.base import SimulatesLoad
from underwatt.errors import InputError, JobError
from underwatt.jobs.command import DEFAULT_LIMITS, CommandRun, CommandWorkload, Limits
from underwatt.jobs.load import load_job
from underwatt.jobs.simulated import SimulatedWorkload
from underwatt.jobs.torch_job import TorchWorkload

if TYPE_CHECKING:
    from collections.abc import Sequence

    from underwatt.device.base import Device
    from underwatt.measure.workload import Workload
    from underwatt.records import WorkloadCost, WorkloadInfo


# A PyTorch job run in a process of its own, so that a CUDA fault or a full memory never ends the profiler.


class IsolatedWorkload:
    """The job at an address as an external command: the same pipe, limits and guard as any other."""

    def __init__(self, address: str, limits: Limits = DEFAULT_LIMITS) -> None:
        # Loaded here as well, for who it is and what it costs; neither touches a GPU.
        self._here = TorchWorkload(load_job(address))
        self.job = self._here.job
        command = [sys.executable, "-m", "underwatt.jobs.child", address, "{batch_size}"]
        self._command = CommandWorkload(command, limits=limits, info=self._here.info)

    @property
    def info(self) -> WorkloadInfo:
        """Who it is."""
        return self._here.info

    def cost(self) -> WorkloadCost | None:
        """What a step costs."""
        return self._here.cost()

    def start(self, batch_size: int) -> CommandRun:
        """Start a process that trains at a batch size."""
        return self._command.start(batch_size)


JOB_HELP = "file.py:factory, module:factory, or -- COMMAND with {batch_size} in it"


@dataclass(frozen=True, slots=True)
class CommandRate:
    """The learning rate that fills ``{lr}`` in a command, and the batch size it suits."""

    lr: float | None = None
    lr_batch_size: int = 128


def choose_workload(
    words: Sequence[str],
    device: Device,
    *,
    rate: CommandRate | None = None,
    limits: Limits = DEFAULT_LIMITS,
) -> tuple[Workload, tuple[int, ...]]:
    """The workload that the words of a command line name, and the batch sizes it suggests (none for a command)."""
    simulated = isinstance(device, SimulatesLoad)
    if not words:
        raise InputError("No job was named.", hint=f"Give {JOB_HELP}.")
    if len(words) == 1 and words[0].endswith(".py"):
        raise InputError(
            f"{words[0]} is a file; which of its functions makes the job?",
            hint=f"Name it: {words[0]}:factory. A command goes after --, with {{batch_size}} in it.",
        )
    if len(words) > 1 or ":" not in words[0]:
        if simulated:
            raise InputError(
                f"A command cannot run on {device.info.name}: what a foreign program computes cannot be simulated.",
                hint="Give a job as file.py:factory, or use a real device.",
            )
        rate = rate or CommandRate()
        return CommandWorkload(words, lr=rate.lr, lr_batch_size=rate.lr_batch_size, limits=limits), ()

    job = IsolatedWorkload(words[0], limits)
    batch_sizes = tuple(job.job.batch_sizes)
    if not isinstance(device, SimulatesLoad):
        return job, batch_sizes
    cost = job.cost()
    if cost is None:
        raise JobError(
            f"The cost of {job.info.name} cannot be counted, so it cannot be simulated.",
            hint="Its model must run on PyTorch's meta device; otherwise use a real device.",
        )
    return SimulatedWorkload(job.info, cost, device), batch_sizes
