"""A device that lives in this machine's time, whose readings come from a thread and can be made to hang."""

from __future__ import annotations

import itertools
import threading
import time
from dataclasses import replace

from run_world import Hurt, virtual

from underwatt.device.timing import SystemClock
from underwatt.records import DeviceState, PowerSample, WorkloadCost

STEP_S = 0.01


class RealTime(Hurt):
    """A virtual board's knobs, real seconds, and readings that are made up."""

    def __init__(self) -> None:
        super().__init__(virtual())
        self.clock = SystemClock()  # type: ignore[assignment]
        self.hang: threading.Event | None = None  # readings wait for it
        self._jitter = itertools.cycle((0.0, 0.01, 0.02))

    def read_power(self) -> PowerSample:
        if self.hang is not None:
            self.hang.wait(30)
        return replace(super().read_power(), at_s=self.clock.now_s(), power_w=5.0 + next(self._jitter))

    def read_state(self) -> DeviceState:
        if self.hang is not None:
            self.hang.wait(30)
        return super().read_state()

    def run_step(self, cost: WorkloadCost, batch_size: int) -> None:
        time.sleep(STEP_S)
