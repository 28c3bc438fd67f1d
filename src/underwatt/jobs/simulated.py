"""A job whose steps pass in the time of a simulated device, with real training beside them where wanted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from underwatt.measure.workload import Beat

if TYPE_CHECKING:
    from underwatt.device.clock import Clock
    from underwatt.measure.workload import StepRun, Workload
    from underwatt.records import WorkloadCost, WorkloadInfo


class SimulatedBoard(Protocol):
    """The part of a simulated device that running steps needs: its time, and a step passing in it."""

    @property
    def clock(self) -> Clock:
        """The time it lives in."""
        ...

    def run_step(self, cost: WorkloadCost, batch_size: int) -> None:
        """Let one step pass in the device's own time."""
        ...


class SimulatedWorkload:
    """Steps of a known cost on a simulated device; with ``real`` each step is also truly trained.

    With ``real`` the losses and accuracies are real while times and watts are the simulated device's.
    """

    def __init__(
        self, info: WorkloadInfo, cost: WorkloadCost, device: SimulatedBoard, real: Workload | None = None
    ) -> None:
        self.info = info
        self._cost = cost
        self._device = device
        self._real = real

    def cost(self) -> WorkloadCost:
        """The cost that the device simulates."""
        return self._cost

    def start(self, batch_size: int) -> SimulatedRun:
        """Begin at a batch size."""
        real = self._real.start(batch_size) if self._real else None
        return SimulatedRun(self._cost, batch_size, self._device, real)


class SimulatedRun:
    """A simulated job under way."""

    def __init__(
        self, cost: WorkloadCost, batch_size: int, device: SimulatedBoard, real: StepRun | None = None
    ) -> None:
        self._cost = cost
        self._batch_size = batch_size
        self._device = device
        self._real = real

    def step(self) -> Beat | None:
        """Let one step pass on the device, after the real one where there is one."""
        if self._real is not None and self._real.step() is None:
            return None
        self._device.run_step(self._cost, self._batch_size)
        return Beat(self._device.clock.now_s())

    def stop(self) -> None:
        """End the real training, where there is one."""
        if self._real is not None:
            self._real.stop()
