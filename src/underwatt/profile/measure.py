"""Measuring one setting: as short as possible, as long as its precision needs."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from underwatt.errors import InputError, OutOfMemoryError, StepError
from underwatt.profile.meter import SAMPLE_PERIOD_S, Meter
from underwatt.profile.steady import Settling, mean_after_warmup, mean_while_settling
from underwatt.records import Measurement, Setting, Status

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from underwatt.device.session import Session
    from underwatt.workload.base import Workload

CHECK_PERIOD_S = 0.2  # how often the stopping rule is looked at


@dataclass(frozen=True, slots=True)
class MeasureOptions:
    """When a measurement is good enough."""

    precision: float = 0.01  # half width of both 95% intervals, as a share of the value
    warmup_steps: int = 1  # always dropped; more are where they were slow
    min_steps: int = 6
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
    workload: Workload,
    setting: Setting,
    options: MeasureOptions | None = None,
    settling: Settling | None = None,
) -> Measurement:
    """Apply a setting, run the job until step time and power are known well enough, and say what they are.

    ``settling`` carries what is known of the device's sensor from one measurement to the next, which makes the later
    ones shorter. Running out of memory and a job that fails are answers, not exceptions; a device that fails is one.
    """
    options = options or MeasureOptions()
    clock = session.device.clock
    started_s = clock.now_s()
    session.apply(setting.mode)
    try:
        found = _run(session, workload, setting, options, settling or Settling())
    except OutOfMemoryError as exc:
        found = Measurement(setting, status=Status.OUT_OF_MEMORY, note=exc.message)
    except StepError as exc:
        found = Measurement(setting, status=Status.FAILED, note=str(exc))
    return replace(found, cost_s=clock.now_s() - started_s)


def _run(
    session: Session, workload: Workload, setting: Setting, options: MeasureOptions, settling: Settling
) -> Measurement:
    device = session.device
    reasons: dict[str, None] = {}  # ordered and unique
    run = workload.start(setting.batch_size)
    try:
        with Meter(device, options.sample_period_s) as meter:
            for _ in range(options.warmup_steps):
                if run.step() is None:
                    return _too_short(setting)
            begun_s = device.clock.now_s()
            meter.beat_at(begun_s)
            looked_s = -math.inf
            while True:
                beat = run.step()
                if beat is not None and beat.at_s >= begun_s:
                    meter.beat_at(beat.at_s, beat.steps)
                now_s = device.clock.now_s()
                if beat is not None and now_s - looked_s < CHECK_PERIOD_S:
                    continue
                looked_s = now_s
                reasons.update(dict.fromkeys(device.read_state().throttle_reasons))
                known = _evaluate(meter, setting, begun_s, settling)
                if beat is None and known is None:
                    return _too_short(setting)
                if known is not None and (
                    beat is None or now_s - begun_s >= options.limit_s or _is_enough(known[0], options)
                ):
                    break
    finally:
        run.stop()
    found, log_likelihood = known
    settling.learn(log_likelihood)
    if reasons:
        return replace(found, status=Status.THROTTLED, note=f"slowed down: {', '.join(reasons)}")
    return found


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
    meter: Meter, setting: Setting, begun_s: float, settling: Settling
) -> tuple[Measurement, NDArray[np.float64]] | None:
    """What is known so far, and how well each settling time explains it; ``None`` while it is nothing."""
    durations_s = meter.step_times(begun_s)
    trace = meter.trace(begun_s)
    if len(durations_s) < 2 or len(trace) < 2:
        return None
    steps = mean_after_warmup(durations_s)
    power, log_likelihood = mean_while_settling(*trace.mean_watts(), settling, block_s=steps.mean)
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
