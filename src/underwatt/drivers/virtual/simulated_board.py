"""A living virtual board: it draws power, heats up, throttles, runs out of memory, all in simulated time."""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from underwatt.drivers.virtual.board_specs import REFERENCE_C
from underwatt.drivers.virtual.physics import Clocks, PowerParts, StepTimes, idle_power, step_power, step_times
from underwatt.errors import InputError, OutOfMemoryError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from underwatt.device.timing import Timer
    from underwatt.drivers.virtual.board_specs import BoardSpec, SensorRail, SensorSpec
    from underwatt.records import PowerMode, WorkloadCost


VOLTAGE_STEP_MV = 8  # data sheet of the INA3221
# Ripple of the supply moves a current across its steps, so that averages of many readings know more than one step.
RIPPLE_STEPS = 0.4
ROOM_C = 25.0
STEP_NOISE = 0.01  # of each step's time
POWER_NOISE = 0.015  # of each step's dynamic power
THROTTLE_PERIOD_S = 1.0  # how often the kernel's governor looks at the temperature
RECOVER_C = 5.0  # so far below the temperature at which it slows the GPU, it sets it free
_ROUNDING_S = 1e-9  # sums of decimal seconds miss whole ones by less than this
STALL_WORTH_SEEING = 0.02  # shorter waits for data are not played out on their own


class VirtualClock:
    """A clock that moves only when told to; repeating calls happen in passing, at their exact times."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s
        self._timers: list[_VirtualTimer] = []
        self._movers: list[Callable[[float], None]] = []

    def now_s(self) -> float:
        """Simulated seconds."""
        return self._now_s

    def every(self, period_s: float, call: Callable[[], None]) -> Timer:
        """Call at each multiple of ``period_s`` from now on."""
        timer = _VirtualTimer(self._timers, self._now_s, period_s, call)
        self._timers.append(timer)
        return timer

    def on_move(self, mover: Callable[[float], None]) -> None:
        """Have ``mover(seconds)`` called for each stretch of time that passes: this is how a board lives."""
        self._movers.append(mover)

    def advance(self, seconds: float) -> None:
        """Move time forward, stopping at each timer that falls due on the way."""
        end_s = self._now_s + max(0.0, seconds)
        while True:
            due = min(self._timers, key=lambda timer: timer.due_s, default=None)
            if due is None or due.due_s > end_s + _ROUNDING_S:
                self._move_to(end_s)
                return
            self._move_to(max(due.due_s, self._now_s))
            due.fire()

    sleep = advance

    def _move_to(self, at_s: float) -> None:
        seconds = at_s - self._now_s
        if seconds > 0:
            self._now_s = at_s
            for mover in self._movers:
                mover(seconds)


@dataclass(eq=False)
class _VirtualTimer:
    timers: list[_VirtualTimer]
    start_s: float
    period_s: float
    call: Callable[[], None]
    fired: int = 0

    @property
    def due_s(self) -> float:
        return self.start_s + self.fired * self.period_s

    def fire(self) -> None:
        self.fired += 1
        self.call()

    def cancel(self) -> bool:
        if self in self.timers:
            self.timers.remove(self)
        return True


class AveragingSensor:
    """A power sensor as boards have it: it averages over a window, lags behind, is noisy, and reads in whole steps.

    Time is given to it in stretches of constant power.
    """

    def __init__(self, spec: SensorSpec, rails: Sequence[SensorRail], random: Random, watts: Sequence[float]) -> None:
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
        columns = zip(self._rails, self._millivolts, self._milliamps, strict=True)
        return {rail.name: (mv, ma) for rail, mv, ma in columns}

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


class RailWatts(NamedTuple):
    """Watts by the part that draws them."""

    static: float
    gpu: float
    cpu: float
    mem: float

    @classmethod
    def of(cls, power: PowerParts) -> RailWatts:
        """Of one mode, as plain numbers: a board looks at them many times a second."""
        return cls(float(power.static_w), float(power.gpu_w), float(power.cpu_w), float(power.mem_w))


class StepPhase(NamedTuple):
    """A stretch of a step during which power is steady."""

    seconds: float
    watts: RailWatts


class VirtualBoard:
    """A board with a state; everything it does, it does while its clock moves."""

    def __init__(
        self, spec: BoardSpec, *, seed: int = 0, clock: VirtualClock | None = None, cpuidle: bool = True
    ) -> None:
        self.spec = spec
        self.seed = seed
        self.cpuidle = cpuidle  # whether cores without work may sleep: not after jetson_clocks
        self.clock = clock or VirtualClock()
        self.space = spec.space
        self.mode = spec.stock_mode(spec.default_mode)
        self.temperature_c = ROOM_C  # until what it draws is known
        self.energy_j = 0.0  # truly drawn since the start; no sensor knows it
        self._steps_down = 0  # how many GPU clocks lower than asked for, because of heat
        self._next_look_s = self.clock.now_s() + THROTTLE_PERIOD_S
        self._extra_w, self._slow_factor, self._ambient_c = 0.0, 1.0, ROOM_C
        self._random = Random(seed)
        self._phases: dict[tuple[WorkloadCost, PowerMode, int, bool], tuple[StepPhase, ...]] = {}
        self._idle: dict[tuple[PowerMode, bool], RailWatts] = {}
        self._phase: RailWatts | None = None  # what the step under way draws now; none is idle
        self.temperature_c = ROOM_C + spec.thermal.resistance_c_per_w * self.power_w
        # The sensor has its own noise, so that reading its files more or less often changes no training step.
        self.sensor = AveragingSensor(spec.sensor, spec.rails, Random(seed + 1), self._rails_w())
        self.clock.on_move(self._live)

    # What it does

    def set_mode(self, mode: PowerMode) -> None:
        """Change the knobs that ``mode`` names, from the next moment on."""
        self.mode = self.mode.with_knobs(**self.space.check(mode).knobs())

    def run_step(self, cost: WorkloadCost, batch_size: int) -> None:
        """Train one step: time passes, power is drawn, heat is made."""
        self.check_memory(cost, batch_size)
        slow = self._slow_factor * self._random.lognormvariate(-(STEP_NOISE**2) / 2, STEP_NOISE)
        noise = self._random.gauss(1.0, POWER_NOISE)
        try:
            for seconds, (static, gpu, cpu, mem) in self._step_phases(cost, self.running, batch_size):
                self._phase = RailWatts(static, noise * gpu, noise * cpu, noise * mem)
                self.clock.advance(seconds * slow)
        finally:
            self._phase = None

    def check_memory(self, cost: WorkloadCost, batch_size: int) -> None:
        """Raise ``OutOfMemoryError`` where a step would not fit."""
        if batch_size < 1:
            raise InputError(f"Batch size must be at least 1, not {batch_size}.")
        needed = cost.memory_bytes(batch_size)
        free = self.spec.memory_bytes - self.spec.reserved_bytes
        if needed > free:
            raise OutOfMemoryError(
                f"A step at batch size {batch_size} needs {needed / 2**30:.2f} GiB, "
                f"and {self.spec.title} has {free / 2**30:.2f} GiB left for it.",
                hint="Use a smaller batch size.",
            )

    def disturb(self, *, extra_w: float = 0.0, slow_factor: float = 1.0, ambient_c: float = ROOM_C) -> None:
        """Let something else happen from now on, another process or a change of weather; ``disturb()`` ends it."""
        if extra_w < 0 or slow_factor < 1:
            raise InputError("A disturbance adds watts and time; it takes none away.")
        self._extra_w, self._slow_factor, self._ambient_c = extra_w, slow_factor, ambient_c

    # What can be seen of it

    @property
    def running(self) -> PowerMode:
        """The mode as it runs: the one asked for, less what heat has taken from the GPU clock."""
        if not self._steps_down or self.mode.gpu_mhz is None:
            return self.mode
        table = self.spec.gpu_mhz
        asked = table.index(self.mode.gpu_mhz)
        return self.mode.with_knobs(gpu_mhz=table[max(0, asked - self._steps_down)])

    @property
    def throttled(self) -> bool:
        """Whether heat holds the GPU clock down now."""
        return self.running != self.mode

    @property
    def power_w(self) -> float:
        """Watts truly drawn at this moment."""
        return sum(self._watts_now())

    # The truth, for tests and for judging predictions: nothing on a board can ask these

    def true_step_s(self, cost: WorkloadCost, mode: PowerMode, batch_size: int) -> float:
        """Mean time of an undisturbed, unthrottled step."""
        return float(self._model(cost, mode, batch_size)[0].step_s)

    def true_power_w(
        self, cost: WorkloadCost, mode: PowerMode, batch_size: int, *, temperature_c: float = REFERENCE_C
    ) -> float:
        """Mean watts while training undisturbed at a board temperature."""
        _, power = self._model(cost, mode, batch_size)
        return float(power.static_w * self._leakage(temperature_c) + (power.total_w - power.static_w))

    # How it lives

    def _live(self, seconds: float) -> None:
        end_s = self.clock.now_s()
        left_s = seconds
        while left_s > 0:
            stretch_s = left_s
            if self._may_throttle():
                stretch_s = min(left_s, max(1e-3, self._next_look_s - (end_s - left_s)))
            self._pass(stretch_s)
            left_s -= stretch_s
            if end_s - left_s >= self._next_look_s:
                self._look_at_temperature()
                self._next_look_s = end_s - left_s + THROTTLE_PERIOD_S

    def _pass(self, seconds: float) -> None:
        """One stretch of constant power: exact heating of one body, exact energy."""
        thermal = self.spec.thermal
        power_w = self.power_w
        self.sensor.live(seconds, self._rails_w())
        self.energy_j += seconds * power_w
        final_c = self._ambient_c + thermal.resistance_c_per_w * power_w
        decay = math.exp(-seconds / (thermal.resistance_c_per_w * thermal.capacity_j_per_c))
        self.temperature_c = final_c + (self.temperature_c - final_c) * decay

    def _may_throttle(self) -> bool:
        """Whether temperature can cross a limit soon; if not, any stretch of time is passed in one go."""
        thermal = self.spec.thermal
        final_c = self._ambient_c + thermal.resistance_c_per_w * self.power_w
        return self._steps_down > 0 or max(final_c, self.temperature_c) >= thermal.throttle_c

    def _look_at_temperature(self) -> None:
        thermal = self.spec.thermal
        lowest = self.spec.gpu_mhz.index(self.mode.gpu_mhz) if self.mode.gpu_mhz is not None else 0
        if self.temperature_c >= thermal.throttle_c:
            self._steps_down = min(self._steps_down + 1, lowest)
        elif self.temperature_c < thermal.throttle_c - RECOVER_C:
            self._steps_down = max(self._steps_down - 1, 0)

    def _leakage(self, temperature_c: float) -> float:
        return max(0.5, 1.0 + self.spec.thermal.leakage_per_c * (temperature_c - REFERENCE_C))

    def _watts_now(self) -> RailWatts:
        """What each part draws at this moment; another process is taken to draw on the GPU."""
        static, gpu, cpu, mem = self._phase or self._idle_watts(self.running)
        return RailWatts(static * self._leakage(self.temperature_c), gpu + self._extra_w, cpu, mem)

    def _rails_w(self) -> list[float]:
        static, gpu, cpu, mem = self._watts_now()
        return [r.static * static + r.gpu * gpu + r.cpu * cpu + r.mem * mem for r in self.spec.rails]

    # The physics, evaluated once for each thing that can be asked

    def _model(self, cost: WorkloadCost, mode: PowerMode, batch_size: int) -> tuple[StepTimes, PowerParts]:
        clocks, physics = self._clocks(mode), self.spec.physics
        times = step_times(physics.step_constants(cost), clocks, float(batch_size))
        return times, step_power(physics.power, clocks, times, cpuidle=self.cpuidle)

    def _clocks(self, mode: PowerMode) -> Clocks:
        knobs = self.mode.knobs() | self.space.check(mode).knobs()
        return Clocks(*(np.asarray(float(knobs[name])) for name in ("cpu_cores", "cpu_mhz", "gpu_mhz", "mem_mhz")))

    def _idle_watts(self, mode: PowerMode) -> RailWatts:
        key = (mode, self.cpuidle)
        if key not in self._idle:
            power = idle_power(self.spec.physics.power, self._clocks(mode), cpuidle=self.cpuidle)
            self._idle[key] = RailWatts.of(power)
        return self._idle[key]

    def _step_phases(self, cost: WorkloadCost, mode: PowerMode, batch_size: int) -> tuple[StepPhase, ...]:
        key = (cost, mode, batch_size, self.cpuidle)
        if key not in self._phases:
            times, power = self._model(cost, mode, batch_size)
            clocks, constants = self._clocks(mode), self.spec.physics.power
            nothing = np.zeros(())
            gpu_w = float(constants.gpu.watts(clocks.gpu_mhz, nothing))
            mem_w = float(constants.mem.watts(clocks.mem_mhz, nothing))
            self._phases[key] = _phases(times, RailWatts.of(power), gpu_w, mem_w)
        return self._phases[key]


def _phases(times: StepTimes, mean: RailWatts, gpu_w: float, mem_w: float) -> tuple[StepPhase, ...]:
    """A step as a wait for data and work; the mean over both is the step's power.

    While it waits, GPU and memory draw ``gpu_w`` and ``mem_w``: clocked, without work. A step under way gates nothing:
    measured trainings that wait for data most of the time draw no less.
    """
    step_s, work_s = float(times.step_s), float(times.work_s)
    wait_s = step_s - work_s
    if wait_s < STALL_WORTH_SEEING * step_s:
        return (StepPhase(step_s, mean),)
    more = step_s / work_s
    waiting = mean._replace(gpu=gpu_w, mem=mem_w)
    work = mean._replace(gpu=gpu_w + (mean.gpu - gpu_w) * more, mem=mem_w + (mean.mem - mem_w) * more)
    return (StepPhase(wait_s, waiting), StepPhase(work_s, work))
