"""What a run knows: settings as they were measured, and how the device has drifted since.

Heat, another process or a colder room change what every setting draws and takes. That is kept apart from the
measurements: so many watts more, so many times slower, for all settings alike.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from underwatt.measure.steady import SENSOR_LAG_S
from underwatt.planning.problem import Problem, Projection, project
from underwatt.records import Measurement, PowerMode, Setting, Status

if TYPE_CHECKING:
    from collections.abc import Iterable

    from underwatt.measure.meter import Meter
    from underwatt.predict.base import Floats, SettingArray


# A device draws at most this share of the budget less than when it was measured: less than that is a throttled clock.
LARGEST_RELIEF = 0.05
# So much less, with steps that take no longer: another process drew power while the setting was measured.
DISTURBED = 0.1
# More than this share at once is another process, or one that ended, and no error of a measurement.
LEAP = 0.04
# Standard deviations, as shares of power: of the drift between two looks, of one second of readings, and of what a
# setting is at best known to.
DRIFT_STD, SEEN_STD, LEAST_STD = 0.004, 0.008, 0.002
RIDGE = 0.1  # of the watts that a knob adds to waiting
IDLE_LEARNED = 0.5  # what is seen of a pause weighs so much against what was seen before


RETURNED = 0.5  # of a leap, that may be left where the device is as it was before


@dataclass(frozen=True, slots=True)
class Drift:
    """How the device differs from when its settings were measured."""

    extra_w: float = 0.0
    slow_factor: float = 1.0

    def seen_from(self, measurement: Measurement) -> Measurement:
        """A measurement made in this drift as it would have been without."""
        if not measurement.usable:
            return measurement
        return replace(
            measurement,
            power_w=max(measurement.power_w - self.extra_w, 1e-3),
            peak_w=max(measurement.peak_w - self.extra_w, 1e-3),
            step_s=measurement.step_s / self.slow_factor,
        )

    def marked(self, measurement: Measurement) -> Measurement:
        """A measurement as it is to be kept for other times: beside much drift it says little of them."""
        extra_w, slow = self.extra_w, self.slow_factor
        if not measurement.usable or (abs(extra_w) <= DISTURBED * measurement.power_w and slow <= 1 + DISTURBED):
            return measurement
        note = f"measured while the device drew {extra_w:+.2f} W and took {slow:.2f}× the time of before"
        return replace(measurement, status=Status.DISTURBED, note=note)


@dataclass(slots=True)
class _Leap:
    """The device seemed to change when a setting was taken into use: did it, or was that setting mistaken?"""

    setting: Setting
    before: Drift
    added: list[Setting] = field(default_factory=list)  # what was measured since then


class Knowledge:
    """The newest measurement of each setting, and which settings may be used now."""

    def __init__(self, problem: Problem, known: Iterable[Measurement] = ()) -> None:
        sizes, rows = np.unique(problem.candidates.batch_size, return_index=True)
        self._rows = dict(zip(sizes.astype(int).tolist(), rows.tolist(), strict=True))  # of each size, any one
        self._known: dict[Setting, Measurement] = {}
        self._refused: set[PowerMode] = set()
        self._too_large = math.inf
        # What pauses draw without drift, and what steps draw there; and where that was seen as lately as ``_unsure``.
        self._idle_w: dict[PowerMode, tuple[float, float]] = {}
        self._unsure_idle: set[PowerMode] = set()
        self.drift = Drift()
        self._drift_std_w = 0.0
        self._unsure: list[Setting] = []  # measured since the device was last seen to be as it was taken to be
        self._agreed: Setting | None = None  # the last that was as it was known to be
        self._leap: _Leap | None = None  # that nothing has confirmed yet
        self.mistaken = False  # whether settings were found to be other than known, until a search has heard of it
        for measurement in known:
            self.add(measurement)
        self._unsure.clear()

    def add(self, measurement: Measurement) -> None:
        """Take in a measurement, as it would be without drift."""
        size = measurement.setting.batch_size
        if measurement.status is Status.OUT_OF_MEMORY:
            self._too_large = min(self._too_large, size)
        elif measurement.usable and size in self._rows:
            self._known[measurement.setting] = measurement
            self._unsure.append(measurement.setting)
            waits_w, busy_w = self._idle_w.get(measurement.setting.mode, (0.0, 0.0))
            if math.isnan(busy_w):
                self._idle_w[measurement.setting.mode] = waits_w, measurement.power_w
            if self._leap is not None:
                self._leap.added.append(measurement.setting)

    def is_leap(self, setting: Setting, power_w: float, blur_w: float = 0.0) -> bool:
        """Whether watts differ from what is known by more than measurements err: the device has changed."""
        known = self._known[setting]
        doubt_w = _half_width(known.power_w_ci95) + 2 * math.hypot(self._drift_std_w, blur_w)
        return abs(power_w - known.power_w - self.drift.extra_w) > LEAP * known.power_w + doubt_w

    def observe(
        self,
        setting: Setting,
        power_w: float,
        step_s: float,
        seconds: float,
        blur_w: float = 0.0,
        busy_share: float = 1.0,
    ) -> bool:
        """Watts and time of a known setting, seen over some seconds of training; whether the device has changed.

        Either may be NaN where it was not seen; ``blur_w`` is a standard deviation of the watts beyond that of the
        readings. What differs a little is shared between the setting, whose measurement was short, and the device,
        which drifts; a leap is the device's alone. How large it is shows only later, for sensors lag. What leapt draws
        in pauses too, and what it draws there was taken for the steps': they had ``busy_share`` of the time.
        """
        known = self._known[setting]
        drift = self.drift
        left_w = power_w - known.power_w - drift.extra_w if math.isfinite(power_w) else 0.0
        slow = step_s / known.step_s / drift.slow_factor if math.isfinite(step_s) else 1.0
        leaps = math.isfinite(power_w) and self.is_leap(setting, power_w, blur_w)
        if leaps or abs(slow - 1) > 2 * LEAP + _half_width(known.step_s_ci95) / known.step_s:
            extra_w = max(drift.extra_w + busy_share * left_w, -LARGEST_RELIEF * known.power_w)
            self.drift = Drift(extra_w, min(max(drift.slow_factor * slow, 0.5), 20.0))
            self._drift_std_w = LEAP * known.power_w
            while self._unsure_idle:  # it may have been seen after the leap
                self._idle_w.pop(self._unsure_idle.pop(), None)
            if not self._was_mistaken(setting, drift):
                self._forget_unsure(setting)
            return True
        if not math.isfinite(power_w):
            return False
        self._agreed = setting
        self._unsure.clear()
        self._unsure_idle.clear()
        if self._leap is not None and setting not in (self._leap.setting, *self._leap.added):
            self._leap = None  # confirmed
        setting_std = max(_half_width(known.power_w_ci95) / 2, LEAST_STD * known.power_w)
        drift_std = math.hypot(self._drift_std_w, DRIFT_STD * known.power_w)
        seen_std = math.hypot(SEEN_STD * known.power_w / math.sqrt(max(seconds, 0.1)), blur_w)
        variance = setting_std**2 + drift_std**2 + seen_std**2
        own, common = setting_std**2 / variance, drift_std**2 / variance
        self.drift = replace(drift, extra_w=drift.extra_w + common * left_w)
        self._drift_std_w = drift_std * math.sqrt(1 - common)
        self._known[setting] = replace(
            known, power_w=known.power_w + own * left_w, power_w_ci95=2 * setting_std * math.sqrt(1 - own)
        )
        return False

    def _was_mistaken(self, setting: Setting, before: Drift) -> bool:
        """After a leap that came with a change of setting, and another one back with the next, the first was none.

        Then that setting was mistaken, such as one that was measured beside a process which ended unseen. Without this,
        the device would seem to drift to and fro whenever such a setting is used.
        """
        leap, now = self._leap, self.drift
        if leap is not None and leap.setting == setting:
            return False  # the rest of it: sensors lag
        self._leap = None if self._agreed in (None, setting) else _Leap(setting, before)
        if leap is None or self._leap is None:
            return False
        is_back = abs(now.extra_w - leap.before.extra_w) < RETURNED * abs(before.extra_w - leap.before.extra_w)
        if not is_back:
            return False
        self._leap, self.mistaken = None, True
        more_w, slower = before.extra_w - leap.before.extra_w, before.slow_factor / leap.before.slow_factor
        for wrong in ({leap.setting, *leap.added} - {setting}) & self._known.keys():
            self._known[wrong] = Drift(-more_w, 1 / slower).seen_from(self._known[wrong])
        return True

    def _forget_unsure(self, setting: Setting) -> None:
        """After a leap at a setting: what was measured since that one may have been measured after the leap as well."""
        unsure, self._unsure = self._unsure, []
        after = unsure[len(unsure) - unsure[::-1].index(setting) :] if setting in unsure else unsure
        for wrong in ({*after} - {setting}) & self._known.keys():
            del self._known[wrong]
            self.mistaken = True

    def was_disturbed(self, setting: Setting, power_w: float, step_s: float) -> bool:
        """Whether a known setting draws so much less now, at the same pace, that something else drew then."""
        known = self._known[setting]
        return power_w < (1 - DISTURBED) * known.power_w and step_s <= (1 + LEAP) * known.step_s

    def start_over(self, seen: Iterable[Measurement]) -> None:
        """Forget what was measured beside something else; ``seen`` is as the device is by itself."""
        self._known.clear()
        self._idle_w.clear()
        self.drift, self._drift_std_w, self._agreed, self._leap = Drift(), 0.0, None, None
        self._unsure.clear()
        for measurement in seen:
            self.add(measurement)

    def saw_peak(self, setting: Setting, peak_w: float) -> None:
        """One reading of a known setting was this high."""
        known = self._known[setting]
        self._known[setting] = replace(known, peak_w=max(known.peak_w, peak_w - self.drift.extra_w))

    def saw_idle(self, setting: Setting, idle_w: float) -> None:
        """Pauses at a known setting were seen to draw so much; a clock that is held high draws more."""
        own_w = idle_w - self.drift.extra_w
        before_w, _ = self._idle_w.get(setting.mode, (own_w, 0.0))
        self._idle_w[setting.mode] = (before_w + IDLE_LEARNED * (own_w - before_w), self._known[setting].power_w)
        self._unsure_idle.add(setting.mode)

    def saw_waiting(self, mode: PowerMode, idle_w: float) -> None:
        """Waiting at a mode, none of whose settings was measured yet, was seen to draw so much."""
        self._idle_w[mode] = idle_w - self.drift.extra_w, math.nan

    def waits_w(self, mode: PowerMode) -> float | None:
        """What pauses at a mode draw, where that was seen."""
        seen = self._idle_w.get(mode)
        return seen and seen[0] + self.drift.extra_w

    def seen_waiting_w(self) -> dict[PowerMode, float]:
        """What waiting draws, at all modes at which that was seen."""
        return {mode: idle_w + self.drift.extra_w for mode, (idle_w, _) in list(self._idle_w.items())}

    def waiting_w(self, modes: SettingArray) -> Floats | None:
        """What waiting is reckoned to draw at each of some settings: so much more for each knob that is higher.

        ``None`` where it was seen nowhere.
        """
        from scipy.optimize import nnls  # here: few runs come to that, and it takes long to load

        seen = [([*mode.knobs().values()], idle_w) for mode, (idle_w, _) in list(self._idle_w.items())]
        if not seen:
            return None
        most = modes.values.max(axis=0)
        values, watts = (np.array(column) for column in zip(*seen, strict=True))
        # No knob lowers it, and one of which nothing is known adds nothing: a small ridge.
        columns = np.vstack([np.column_stack([values / most, np.ones(len(watts))]), RIDGE * np.eye(len(most) + 1)[:-1]])
        found, _ = nnls(columns, np.concatenate([watts, np.zeros(len(most))]))
        return np.asarray(modes.values / most @ found[:-1] + found[-1] + self.drift.extra_w)

    def idle_w(self, known: Measurement) -> float | None:
        """What pauses at a measured setting draw, as they did there or at the nearest one; ``None`` if none were seen.

        Between modes, waiting draws more where steps do, but less than in proportion.
        """
        if (waits_w := self.waits_w(known.setting.mode)) is not None:
            return waits_w
        seen = [(idle_w, busy_w) for idle_w, busy_w in list(self._idle_w.values()) if not math.isnan(busy_w)]
        if not seen:
            return None
        near_w, busy_w = min(seen, key=lambda one: abs(math.log(known.power_w / one[1])))
        return near_w * math.sqrt(known.power_w / busy_w) + self.drift.extra_w

    def refuse(self, mode: PowerMode) -> None:
        """The device did not take this mode: it is not offered again."""
        self._refused.add(mode)

    def of(self, setting: Setting) -> Measurement | None:
        """What is known of a setting."""
        return self._known.get(setting)

    def expected_w(self, known: Measurement) -> float:
        """What a measured setting draws now."""
        return known.power_w + self.drift.extra_w

    def step_s(self, setting: Setting) -> float:
        """What a step at a setting takes now; 0 where that is not known."""
        known = self._known.get(setting)
        return known.step_s * self.drift.slow_factor if known else 0.0

    def measurements(self) -> tuple[Measurement, ...]:
        """Everything that may be used."""
        # The thread that reads power asks too, while this one grows: a copy is made at once.
        return tuple(m for m in list(self._known.values()) if self.usable(m.setting))

    def usable(self, setting: Setting) -> bool:
        """Whether a setting may be tried."""
        return setting.batch_size < self._too_large and not self.is_refused(setting.mode)

    def is_refused(self, mode: PowerMode) -> bool:
        """Whether the device did not take a mode."""
        return mode in self._refused

    def outcome(self, setting: Setting, problem: Problem) -> Projection | None:
        """What a known setting takes under the problem's budget."""
        known = self._known.get(setting)
        return self._project(problem, known) if known else None

    def _project(self, problem: Problem, known: Measurement) -> Projection:
        if problem.idle_w is not None and (idle_w := self.idle_w(known)) is not None:
            problem = replace(problem, idle_w=idle_w)
        return project(problem, self._rows[known.setting.batch_size], known)

    def best(self, problem: Problem, highest_gpu_mhz: float = math.inf) -> Projection | None:
        """The best measured setting under the problem's budget; where none keeps it, the one that draws least.

        Where pauses may have to, it is the one with the shortest steps of those that draw about as little.
        """
        found = [
            self._project(problem, m) for m in self.measurements() if (m.setting.mode.gpu_mhz or 0) <= highest_gpu_mhz
        ]
        fitting = [item for item in found if item.fits]
        if fitting:
            return min(fitting, key=lambda item: item.score(problem.goal))
        reached = [item for item in found if math.isfinite(item.time_s)]
        least = min(reached, key=lambda item: item.measurement.power_w, default=None)
        if least is None or problem.idle_w is None:
            return least
        near = [item for item in reached if item.measurement.power_w <= (1 + LEAP) * least.measurement.power_w]
        return min(near, key=lambda item: item.measurement.step_s)


def _half_width(ci95: float) -> float:
    """Of an interval; 0 where none was recorded."""
    return ci95 if math.isfinite(ci95) else 0.0


# What the meter has seen of the steps lately.

FEWEST_READINGS = FEWEST_STEPS = 3
MOST_PAUSED = 0.5  # mostly idle, readings say little about steps
LEAST_PAUSED = 0.4  # mostly busy, readings say little about pauses
WAITED = 0.03  # of the sensor's lag, what may be missing where nothing but waiting went on
IDLE_DOUBT = 0.15  # standard deviation of what a pause draws, as a share: it hangs on the clocks


def mean_reading_w(meter: Meter, since_s: float) -> float:
    """Mean of the newest readings; NaN where there are none. Cheap: it is asked a few times a second."""
    watts = [reading.mean_w for reading in meter.readings_after(since_s)]
    return sum(watts) / len(watts) if watts else math.nan


@dataclass(frozen=True, slots=True)
class SeenSteps:
    """Mean power of steps and their mean time, NaN where too little was seen; and how far pauses blur the power."""

    power_w: float
    step_s: float
    blur_w: float
    busy_share: float = 1.0  # of the time, which was not paused


def seen_idle_w(meter: Meter, since_s: float, busy_w: float) -> float | None:
    """What pauses since a moment drew; ``None`` where too little was paused to tell.

    Long pauses are read as they are, once the sensor shows nothing else; of short ones the steps between are taken off.
    """
    trace = meter.trace(since_s)
    if len(trace) < FEWEST_READINGS or not meter.present_from(trace.at_s).all():
        return None
    paused = meter.paused_s(trace.at_s)
    before = np.interp(trace.at_s - SENSOR_LAG_S, trace.at_s, paused, left=np.inf)
    waiting = paused - before > (1 - WAITED) * SENSOR_LAG_S
    if waiting.sum() >= FEWEST_READINGS:
        return float(trace.power_w[waiting].mean())
    seconds, paused_s = float(trace.at_s[-1] - trace.at_s[0]), float(paused[-1])
    if paused_s < LEAST_PAUSED * seconds:
        return None
    return max((trace.energy_j - busy_w * (seconds - paused_s)) / paused_s, 0.0)


def seen_steps(meter: Meter, since_s: float, idle_w: float) -> SeenSteps:
    """What the steps since a moment drew and took, pauses between them, tests and the like taken off."""
    trace = meter.trace(since_s)
    if len(trace) < FEWEST_READINGS:
        return SeenSteps(math.nan, math.nan, 0.0)
    times_s = meter.step_times(since_s)
    step_s = float(np.mean(times_s)) if len(times_s) >= FEWEST_STEPS else math.nan
    present = meter.present_from(trace.at_s)
    of_steps = present[1:] & present[:-1]  # a test draws other watts than a step or a pause, and a sensor lags behind
    if of_steps.sum() < FEWEST_READINGS - 1:
        return SeenSteps(math.nan, step_s, 0.0)
    paused_s = float(np.diff(meter.paused_s(trace.at_s))[of_steps].sum())
    seconds = float(np.diff(trace.at_s)[of_steps].sum())
    busy_s = max(seconds - paused_s, 1e-9)
    energy_j = float(trace.gained_j[of_steps].sum())
    power_w = (energy_j - idle_w * paused_s) / busy_s if paused_s <= MOST_PAUSED * seconds else math.nan
    return SeenSteps(power_w, step_s, IDLE_DOUBT * idle_w * paused_s / busy_s, busy_s / (busy_s + paused_s))
