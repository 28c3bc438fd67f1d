"""A fake device in real time that always draws about the same."""

from __future__ import annotations

import random
from typing import Any

from underwatt.device.space import ModeSpace
from underwatt.device.timing import SystemClock
from underwatt.records import Capability, DeviceInfo, DeviceState, PowerMode, PowerSample


class SteadyFake:
    """A fake device in real time: no knobs, and always about the same power (exactly the same is a stuck sensor's)."""

    def __init__(self, power_w: float = 5.0) -> None:
        self.info = DeviceInfo("fake", "Steady fake", "steady-fake", "fake:steady", in_process=True)
        self.clock = SystemClock()
        self.space = ModeSpace(())
        self._power_w = power_w
        self._scatter = random.Random(0)

    def capabilities(self) -> tuple[Capability, ...]:
        return ()

    def read_power(self) -> PowerSample:
        return PowerSample(self.clock.now_s(), self._power_w * self._scatter.uniform(0.999, 1.001))

    def read_state(self) -> DeviceState:
        return DeviceState(PowerMode())

    def apply(self, mode: PowerMode) -> None:
        assert not mode.knobs()

    def snapshot(self, mode: PowerMode | None = None) -> dict[str, str]:
        del mode
        return {}

    def restore(self, snapshot: Any) -> None:
        assert not snapshot

    def close(self) -> None:
        pass
