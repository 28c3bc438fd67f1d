"""A power sensor as boards have it: it averages, lags behind, is noisy, and reads in whole steps."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from random import Random

    from underwatt.device.virtual.spec import Sensor, SensorRail

VOLTAGE_STEP_MV = 8  # data sheet of the INA3221
# Ripple of the supply moves a current across its steps, so that averages of many readings know more than one step.
RIPPLE_STEPS = 0.4


class AveragingSensor:
    """Publishes each rail's average over a window, low-passed; time is given to it in stretches of constant power."""

    def __init__(self, spec: Sensor, rails: Sequence[SensorRail], random: Random, watts: Sequence[float]) -> None:
        self._spec = spec
        self._random = random
        self._rails = tuple(rails)
        self._millivolts = [VOLTAGE_STEP_MV * round(1e3 * rail.volts / VOLTAGE_STEP_MV) for rail in rails]
        self._follow = 1.0 - math.exp(-spec.window_s / spec.lag_s)
        self._filled_s = 0.0
        self._joules = [0.0] * len(self._rails)
        self._average_w = list(watts)
        self._milliamps = [0] * len(self._rails)
        self._publish()

    def live(self, seconds: float, watts: Sequence[float]) -> None:
        """Let time pass at constant watts on each rail; costs the same for a second as for a day."""
        window_s = self._spec.window_s
        room_s = window_s - self._filled_s
        if seconds < room_s:
            self._fill(seconds, watts)
            return
        self._fill(room_s, watts)
        self._follow_towards([joules / window_s for joules in self._joules], windows=1)
        whole, rest_s = divmod(seconds - room_s, window_s)
        if whole:
            self._follow_towards(watts, windows=int(whole))
        self._publish()
        self._filled_s = 0.0
        self._joules = [0.0] * len(self._rails)
        self._fill(rest_s, watts)

    def readings(self) -> dict[str, tuple[int, int]]:
        """Millivolts and milliamperes of each rail, as last published."""
        pairs = zip(self._millivolts, self._milliamps, strict=True)
        return {rail.name: pair for rail, pair in zip(self._rails, pairs, strict=True)}

    def watts(self) -> dict[str, float]:
        """Watts of each rail, as last published."""
        return {name: mv * ma / 1e6 for name, (mv, ma) in self.readings().items()}

    def _fill(self, seconds: float, watts: Sequence[float]) -> None:
        self._filled_s += seconds
        self._joules = [joules + seconds * w for joules, w in zip(self._joules, watts, strict=True)]

    def _follow_towards(self, watts: Sequence[float], *, windows: int) -> None:
        keep = (1.0 - self._follow) ** windows
        self._average_w = [w + (average - w) * keep for average, w in zip(self._average_w, watts, strict=True)]

    def _publish(self) -> None:
        step_ma, gauss = self._spec.step_ma, self._random.gauss
        for at, (average_w, mv) in enumerate(zip(self._average_w, self._millivolts, strict=True)):
            true_ma = 1e6 * average_w / mv
            noisy_ma = true_ma * gauss(1.0, self._spec.noise) + gauss(0.0, RIPPLE_STEPS * step_ma)
            self._milliamps[at] = max(0, round(step_ma * round(noisy_ma / step_ma)))
