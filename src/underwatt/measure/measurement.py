"""Measuring one setting: as short as possible, as long as its precision needs."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from underwatt.errors import InputError, MeasureError, OutOfMemoryError, StepError
from underwatt.measure.meter import SAMPLE_PERIOD_S, Meter, Trace
from underwatt.measure.steady import Estimate, Settling, mean_after_warmup, mean_while_settling
from underwatt.records import Measurement, Setting, Status

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from underwatt.device.base import Device
    from underwatt.device.session import Session
    from underwatt.measure.workload import StepRun

# The stopping rule is looked at after each tenth more time, but not more often than this: a look costs the CPU
# milliseconds, which a job in this process, or on few cores, would feel.
LOOK_PERIOD_S = 0.2
LOOK_GROWTH = 0.1
PAUSED_SETTLING_S = 1.0  # with pauses the approach of the reading cannot be fitted, so it is waited out
SILENT_S = 5.0
PRESENT_READINGS = 6  # where something else went on in between, readings of the steps alone
PAUSED_BLOCKS = 6
PAUSED_WORK_S = 0.5
THROTTLE_PERIOD_S = 1.0  # how often the device is asked whether it slows itself down


@dataclass(frozen=True, slots=True)
class MeasureOptions:
    """When a measurement is good enough."""

    precision: float = 0.01  # half width of both 95% intervals, as a share of the value
    warmup_steps: int = 1  # always dropped; more are where they were slow
    min_steps: int = 8
    min_samples: int = 6
    limit_s: float = 60.0  # give what is known after this long, once there are two steps
    sample_period_s: float = SAMPLE_PERIOD_S

    def __post_init__(self) -> None:
        if not 0 < self.precision < 1:
            raise InputError(f"The precision must be between 0 and 1, not {self.precision:g}.", hint="0.01 is 1%.")
        if self.limit_s <= 0:
            raise InputError(f"The time limit must be positive, not {self.limit_s:g} s.")


def measure(
    session: Session,
    run: StepRun,
    setting: Setting,
    options: MeasureOptions | None = None,
    settling: Settling | None = None,
) -> Measurement:
    """Apply a setting to a job under way and go on until step time and power are known well enough.

    ``run`` must be at the setting's batch size; it goes on running afterwards, so that the next mode need not start it
    again. ``settling`` carries what is known of the device's sensor from one measurement to the next, which makes the
    later ones shorter. Running out of memory, and a job that fails, are answers; a device that fails is an exception.
    """
    options = options or MeasureOptions()
    clock = session.device.clock
    started_s = clock.now_s()
    session.apply(setting.mode)
    try:
        found = _follow(session.device, run, setting, options, settling or Settling())
    except OutOfMemoryError as exc:
        found = Measurement(setting, status=Status.OUT_OF_MEMORY, note=exc.message)
    except StepError as exc:
        found = Measurement(setting, status=Status.FAILED, note=str(exc))
    return replace(found, cost_s=clock.now_s() - started_s)


def _follow(device: Device, run: StepRun, setting: Setting, options: MeasureOptions, settling: Settling) -> Measurement:
    begun_s = _warm_up(run, device.clock.now_s(), options.warmup_steps)
    if begun_s is None:
        return _too_short(setting)
    with Meter(device, options.sample_period_s) as meter:
        meter.beat_at(begun_s)
        measuring = Measuring(device, meter, setting, begun_s, options, settling)
        while True:
            beat = run.step()
            if beat is None:
                return measuring.end() or _too_short(setting)
            meter.beat_at(beat.at_s, beat.steps)
            if measuring.is_enough():
                known = measuring.end()
                assert known is not None, "enough is known"
                return known


class Measuring:
    """A setting that is being measured while somebody else runs its steps and beats the meter."""

    def __init__(
        self,
        device: Device,
        meter: Meter,
        setting: Setting,
        begun_s: float,
        options: MeasureOptions,
        settling: Settling,
        idle_w: float | None = None,
    ) -> None:
        self.setting = setting
        self.begun_s = begun_s
        self._device, self._meter, self._options, self._settling = device, meter, options, settling
        self._idle_w = idle_w
        self._now_s = device.clock.now_s
        self._reasons = dict.fromkeys(device.read_state().throttle_reasons)  # ordered and unique
        self._asked_s = self._now_s()
        self._next_look_s = begun_s + LOOK_PERIOD_S
        self._known: tuple[Measurement, NDArray[np.float64]] | None = None

    @property
    def so_far(self) -> Measurement | None:
        """What was known at the last look."""
        return self._known[0] if self._known else None

    def is_enough(self) -> bool:
        """Whether time and power are known well enough; to be asked after each step, looks only now and then."""
        now_s = self._now_s()
        if now_s < self._next_look_s:
            return False
        self._next_look_s = now_s + max(LOOK_PERIOD_S, LOOK_GROWTH * (now_s - self.begun_s))
        if now_s - self._asked_s >= THROTTLE_PERIOD_S:
            self._reasons.update(dict.fromkeys(self._device.read_state().throttle_reasons))
            self._asked_s = now_s
        self._known = _evaluate(self._meter, self.setting, self.begun_s, self._settling, self._idle_w)
        over = now_s - self.begun_s >= self._options.limit_s
        if self._known is None:
            if over and not len(self._meter.trace(self.begun_s)):
                raise MeasureError(f"{self._device.info.name} gave no power reading in {self._options.limit_s:g} s.")
            return False
        return over or _is_enough(self._known[0], self._options)

    def end(self) -> Measurement | None:
        """All that is known; ``None`` where that is nothing."""
        known = _evaluate(self._meter, self.setting, self.begun_s, self._settling, self._idle_w)
        if known is None:
            return None
        self._reasons.update(dict.fromkeys(self._device.read_state().throttle_reasons))
        found, log_likelihood = known
        self._settling.learn(log_likelihood)
        if self._reasons:
            return replace(found, status=Status.THROTTLED, note=f"slowed down: {', '.join(self._reasons)}")
        return found


def _warm_up(run: StepRun, since_s: float, steps: int) -> float | None:
    """Let some steps pass that began in the new mode; the moment the last one ended, or ``None`` where the job did."""
    # The first step to end after the change has begun before it.
    while (beat := run.step()) is not None:
        if beat.at_s >= since_s:
            steps -= 1
        if steps <= 0 and beat.at_s >= since_s:
            return beat.at_s
    return None


def _too_short(setting: Setting) -> Measurement:
    return Measurement(setting, status=Status.FAILED, note="the job ended before it could be measured")


def _is_enough(found: Measurement, options: MeasureOptions) -> bool:
    return (
        found.steps >= options.min_steps
        and found.samples >= options.min_samples
        and found.step_s_ci95 <= options.precision * found.step_s
        and found.power_w_ci95 <= options.precision * found.power_w
    )


def _evaluate(
    meter: Meter, setting: Setting, begun_s: float, settling: Settling, idle_w: float | None
) -> tuple[Measurement, NDArray[np.float64]] | None:
    """What is known so far, and how well each settling time explains it; ``None`` while it is nothing."""
    durations_s = meter.step_times(begun_s)
    trace = meter.trace(begun_s)
    if len(durations_s) < 2 or len(trace) < 2:
        return None
    steps = mean_after_warmup(durations_s)
    paused_s = meter.paused_s(trace.at_s)
    present = meter.present_from(trace.at_s)
    if not present.all():
        power, log_likelihood = mean_after_warmup(trace.power_w[present]), np.zeros_like(settling.log_prior)
        if power.count < PRESENT_READINGS:
            return None
    elif paused_s[-1] > 0:
        busy = _busy_power(trace, paused_s, idle_w)
        if busy is None:
            return None
        power, log_likelihood = busy, np.zeros_like(settling.log_prior)
    else:
        power, log_likelihood = mean_while_settling(*trace.mean_watts(), settling, block_s=steps.mean)
    if not power.mean > 0:
        if trace.at_s[-1] - trace.at_s[0] < SILENT_S:
            return None  # a counter may not have moved yet
        raise MeasureError(f"The power readings of {setting} average {power.mean:g} W, which cannot be.")
    settled = trace.part(power.first)
    measured = Measurement(
        setting,
        step_s=steps.mean,
        step_s_ci95=steps.ci95,
        power_w=power.mean,
        power_w_ci95=power.ci95,
        peak_w=settled.peak_w,
        energy_j=settled.energy_j,
        window_s=float(settled.at_s[-1] - settled.at_s[0]),
        steps=steps.count,
        samples=len(settled),
        missed_samples=trace.missed,
    )
    return measured, log_likelihood


def _busy_power(trace: Trace, paused_s: NDArray[np.float64], idle_w: float | None) -> Estimate | None:
    """Mean power of the steps alone, where pauses lay between them: what idling drew is taken off.

    ``None`` while there was too little work to tell.
    """
    if idle_w is None:
        raise MeasureError("Steps with pauses between them cannot be measured where idle power is not known.")
    first = int(np.searchsorted(trace.at_s, trace.at_s[0] + PAUSED_SETTLING_S))
    edges = np.unique(np.linspace(min(first, len(trace) - 2), len(trace) - 1, PAUSED_BLOCKS + 1).astype(int))
    busy = []
    for begin, end in pairwise(edges.tolist()):
        rest_s = paused_s[end] - paused_s[begin]
        part = Trace(
            trace.at_s[begin : end + 1],
            trace.power_w[begin : end + 1],
            None if trace.counter_j is None else trace.counter_j[begin : end + 1],
            0,
        )
        work_s = part.at_s[-1] - part.at_s[0] - rest_s
        if work_s > 0:
            busy.append((part.energy_j - idle_w * rest_s, work_s))
    if len(busy) < PAUSED_BLOCKS or sum(work_s for _, work_s in busy) < PAUSED_WORK_S:
        return None
    energy_j, work_s = np.array(busy).T
    mean = float(energy_j.sum() / work_s.sum())
    spread = float(np.std(energy_j - mean * work_s, ddof=1)) * math.sqrt(len(busy)) / float(work_s.sum())
    return Estimate(mean, 2.5 * spread, int(edges[0]), len(trace) - int(edges[0]))
