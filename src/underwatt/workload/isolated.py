"""A PyTorch job run in a process of its own, so that a CUDA fault or a full memory never ends the profiler."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from underwatt.workload.command import DEFAULT_LIMITS, CommandRun, CommandWorkload, Limits
from underwatt.workload.load import load_job
from underwatt.workload.torch_job import TorchWorkload

if TYPE_CHECKING:
    from underwatt.records import WorkloadCost, WorkloadInfo


class IsolatedWorkload:
    """The job at an address as an external command: the same pipe, limits and guard as any other."""

    def __init__(self, address: str, limits: Limits = DEFAULT_LIMITS) -> None:
        # Loaded here as well, for who it is and what it costs; neither touches a GPU.
        self._here = TorchWorkload(load_job(address))
        self.job = self._here.job
        command = [sys.executable, "-m", "underwatt.workload.child", address, "{batch_size}"]
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
