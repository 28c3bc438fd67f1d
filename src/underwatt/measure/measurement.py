"""Measuring one setting: as short as possible, as long as its precision needs."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from underwatt.errors import InputError, MeasureError, OutOfMemoryError, StepError
from underwatt.measure.meter import Meter, StateReader, Trace
from underwatt.measure.steady import SETTLING_WAIT_S, Estimate, Settling, mean_after_warmup, mean_while_settling
from underwatt.records import Measurement, Setting, Status

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from underwatt.device.base import Device
    from underwatt.device.session import Session
    from underwatt.measure.stuck import StuckWatch
    from underwatt.measure.workload import StepRun

# The stopping rule is looked at after each tenth more time, but not more often than this: a look costs the CPU
# milliseconds, which a job in this process, or on few cores, would feel.
LOOK_PERIOD_S = 0.2
LOOK_GROWTH = 0.1
SILENT_S = 5.0
EQUAL_S = 10.0
FEWEST_READINGS = 6  # of the steps alone
# Tests that come so often that, between so many of them, few readings are of steps alone: what both draw together is
# what the budget bounds, and is measured then.
OFTEN, FEW = 3, 0.5
PAUSED_BLOCKS = 6
PAUSED_WORK_S = 0.5
THROTTLE_PERIOD_S = 1.0  # how often the device is asked whether it slows itself down


@dataclass(frozen=True, slots=True)
class MeasureOptions:
    """When a measurement is good enough."""

    precision: float = 0.01  # half width of both 95% intervals, as a share of the value
    min_steps: int = 8
    limit_s: float = 60.0  # give what is known after this long, once there are two steps
    min_readings: int = FEWEST_READINGS  # of watts that had settled: fewer where the interval alone is to say

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
    watch: StuckWatch | None = None,
    states: StateReader | None = None,
) -> Measurement:
    """Apply a setting to a job under way and go on until step time and power are known well enough.

    ``run`` must be at the setting's batch size; it goes on running afterwards, so that the next mode need not start it
    again. ``settling`` and ``watch`` carry what is known of the device's sensor from one measurement to the next: how
    quickly it settles, which makes the later ones shorter, and whether it moves at all; ``states`` whether it says what
    it is doing. Running out of memory, and a job that fails, are answers; a device that fails is an exception.
    """
    clock = session.device.clock
    started_s = clock.now_s()
    session.apply(setting.mode)
    try:
        meter = Meter(session.device, watch=watch, states=states)
        found = _follow(meter, session.device, run, setting, options or MeasureOptions(), settling or Settling())
    except OutOfMemoryError as exc:
        found = Measurement(setting, status=Status.OUT_OF_MEMORY, note=exc.message)
    except StepError as exc:
        found = Measurement(setting, status=Status.FAILED, note=str(exc))
    return replace(found, cost_s=clock.now_s() - started_s)


def _follow(
    meter: Meter, device: Device, run: StepRun, setting: Setting, options: MeasureOptions, settling: Settling
) -> Measurement:
    too_short = Measurement(setting, status=Status.FAILED, note="the job ended before it could be measured")
    # The first step to end after the change has begun before it: it is dropped; more are where they were slow.
    applied_s = device.clock.now_s()
    while (beat := run.step()) is not None and beat.at_s < applied_s:
        pass
    if beat is None:
        return too_short
    with meter:
        meter.changed(setting.mode)
        meter.beat_at(beat.at_s)
        measuring = Measuring(device, meter, setting, beat.at_s, options, settling)
        while (beat := run.step()) is not None:
            meter.beat_at(beat.at_s, beat.steps)
            meter.check_sensor()
            if measuring.is_enough() or meter.wants_a_pause():
                break
        return measuring.end() or too_short


@dataclass(eq=False)
class Measuring:
    """A setting that is being measured while somebody else runs its steps and beats the meter."""

    device: Device
    meter: Meter
    setting: Setting
    begun_s: float
    options: MeasureOptions
    settling: Settling
    idle_w: float | None = None

    def __post_init__(self) -> None:
        self.so_far: Measurement | None = None  # what was known at the last look
        self._now_s = self.device.clock.now_s
        self._reasons: dict[str, None] = {}  # for throttling: ordered and unique
        self._may_ask = True
        self._ask_for_throttling()
        self._next_look_s = self.begun_s + LOOK_PERIOD_S

    def is_enough(self) -> bool:
        """Whether time and power are known well enough; to be asked after each step, looks only now and then."""
        now_s = self._now_s()
        if now_s < self._next_look_s:
            return False
        self._next_look_s = now_s + max(LOOK_PERIOD_S, LOOK_GROWTH * (now_s - self.begun_s))
        if now_s - self._asked_s >= THROTTLE_PERIOD_S:
            self._ask_for_throttling()
        known, options = self._evaluate(), self.options
        self.so_far = found = known[0] if known else None
        # Equal readings do not say how far they scatter, nor whether the sensor works; somebody may find that out.
        stands_still = self.meter.stands_still(self.begun_s)
        over = now_s - self.begun_s >= options.limit_s + stands_still * EQUAL_S
        if found is None:
            if over and not len(self.meter.trace(self.begun_s)):
                raise MeasureError(f"{self.device.info.name} gave no power reading in {options.limit_s:g} s.")
            return False
        return over or (
            found.steps >= options.min_steps
            and found.samples >= options.min_readings
            and not stands_still
            and found.step_s_ci95 <= options.precision * found.step_s
            and found.power_w_ci95 <= options.precision * found.power_w
        )

    def end(self) -> Measurement | None:
        """All that is known; ``None`` where that is nothing."""
        known = self._evaluate()
        if known is None:
            return None
        self._ask_for_throttling()
        found, log_likelihood = known
        self.settling.learn(log_likelihood)
        if self._reasons:
            return replace(found, status=Status.THROTTLED, note=f"slowed down: {', '.join(self._reasons)}")
        return found

    def _ask_for_throttling(self) -> None:
        """One that does not say is asked no more; one that hung held up a step, and what counts begins after it."""
        if not self._may_ask:
            return
        self._asked_s = asked_s = self._now_s()
        if (state := self.meter.states.ask()) is None:
            self._may_ask = False
            if self._now_s() - asked_s > LOOK_PERIOD_S:
                self.begun_s = self._now_s()
            return
        self._reasons |= dict.fromkeys(state.throttle_reasons)

    def _evaluate(self) -> tuple[Measurement, NDArray[np.float64]] | None:
        """What is known so far, and how well each settling time explains it; ``None`` while it is nothing."""
        durations_s = self.meter.step_times(self.begun_s)
        trace = self.meter.trace(self.begun_s)
        if len(durations_s) < 2 or len(trace) < 2:
            return None
        steps = mean_after_warmup(durations_s)
        found = self._mean_power(trace, steps.mean)
        if found is None:
            return None
        power, log_likelihood = found
        if not power.mean > 0:
            if trace.at_s[-1] - trace.at_s[0] < SILENT_S:
                return None  # a counter may not have moved yet
            raise MeasureError(f"The power readings of {self.setting} average {power.mean:g} W, which cannot be.")
        window = trace.part(power.first)
        measured = Measurement(
            self.setting,
            step_s=steps.mean,
            step_s_ci95=steps.ci95,
            power_w=power.mean,
            power_w_ci95=power.ci95,
            peak_w=max(window.peak_w, power.mean),  # with pauses between them, readings show less than steps draw
            energy_j=window.energy_j,
            window_s=float(window.at_s[-1] - window.at_s[0]),
            steps=steps.count,
            samples=len(window),
            missed_samples=trace.missed,
        )
        return measured, log_likelihood

    def _mean_power(self, trace: Trace, step_s: float) -> tuple[Estimate, NDArray[np.float64]] | None:
        """Mean power of the steps, and how well each settling time explains the readings."""
        nothing_learned = np.zeros_like(self.settling.log_prior)
        paused_s = self.meter.paused_s(trace.at_s)
        present = self.meter.present_from(trace.at_s)
        comes_often = present.mean() < FEW and self.meter.absences_in(trace.at_s) >= OFTEN
        if not present.all() and not comes_often:
            if np.diff(paused_s)[present[1:] & present[:-1]].any():  # pauses too: what steps draw is seen since then
                back = int(np.flatnonzero(~present)[-1]) + 1
                busy = _busy_power(trace.part(back), paused_s[back:], self.idle_w) if len(trace) > back + 1 else None
                return None if busy is None else (replace(busy, first=back + busy.first), nothing_learned)
            power = mean_after_warmup(trace.power_w[present])
            return None if power.count < FEWEST_READINGS else (power, nothing_learned)
        if paused_s[-1] > 0 and not comes_often:
            # A sensor that lags shows the pauses of a while ago: where their share changes, that is another share.
            lag_s = 0.0 if self.meter.counts_joules else min(self.settling.typical_s, SETTLING_WAIT_S)
            busy = _busy_power(trace, self.meter.paused_s(trace.at_s - lag_s), self.idle_w, lag_s)
            return None if busy is None else (busy, nothing_learned)
        return mean_while_settling(*trace.mean_watts(), self.settling, block_s=step_s)


def _busy_power(
    trace: Trace, paused_s: NDArray[np.float64], idle_w: float | None, lag_s: float = 0.0
) -> Estimate | None:
    """Mean power of the steps alone, where pauses lay between them; ``None`` after too little work to tell.

    What a sensor that lags shows of the first steps is left out for so much longer.
    """
    if idle_w is None:
        raise MeasureError("Steps with pauses between them cannot be measured where idle power is not known.")
    first = int(np.searchsorted(trace.at_s, trace.at_s[0] + SETTLING_WAIT_S + lag_s))
    edges = np.unique(np.linspace(min(first, len(trace) - 2), len(trace) - 1, PAUSED_BLOCKS + 1).astype(int))
    busy = []
    for begin, end in pairwise(edges.tolist()):
        rest_s = paused_s[end] - paused_s[begin]
        part = trace.part(begin, end)
        work_s = part.at_s[-1] - part.at_s[0] - rest_s
        if work_s > 0:
            busy.append((part.energy_j - idle_w * rest_s, work_s))
    if len(busy) < PAUSED_BLOCKS or sum(work_s for _, work_s in busy) < PAUSED_WORK_S:
        return None
    energy_j, work_s = np.array(busy).T
    mean = float(energy_j.sum() / work_s.sum())
    spread = float(np.std(energy_j - mean * work_s, ddof=1)) * math.sqrt(len(busy)) / float(work_s.sum())
    return Estimate(mean, 2.5 * spread, int(edges[0]), len(trace) - int(edges[0]))
