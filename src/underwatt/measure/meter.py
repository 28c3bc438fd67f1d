"""The meter: samples a device's power in the background and takes the beats of a job.

It can stay on for a whole training: a beat is one append, a sample one sensor reading each 100 ms, and a look at the
last seconds costs no more after a day than after a minute. A reading that fails never becomes a number: one alone is
missed, and counted as such; where they go on failing, that is raised to whoever asks for watts of the time.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from underwatt.device.base import HasRecordedPower
from underwatt.device.timing import answer_within
from underwatt.errors import DeviceError, MeasureError, SensorError
from underwatt.measure.steady import SETTLING_WAIT_S
from underwatt.measure.stuck import StuckWatch

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray
    from typing_extensions import Self

    from underwatt.device.base import Device
    from underwatt.device.timing import Timer
    from underwatt.records import DeviceState, PowerMode, PowerSample

SAMPLE_PERIOD_S = 0.1
MOST_W = 100_000.0  # no device draws that much: one such reading would be waited for by the hour
KEEP_S = 3600.0  # nobody looks back further, and a run may last for weeks
KEEP_BEATS = 1_000_000
ANSWER_S = 5.0  # a sensor that takes longer to answer hangs
STATE_S = 3.0  # so does the rest; at the lowest clocks, beside a training, a Nano may need a second
STATE_AGAIN_S, LONGEST_STATE_AGAIN_S = 5.0, 300.0  # asked again so long after a failure, and longer after each more
STATE_SAID = 2  # failures in a row that are no moment any more
STALE_PERIODS, STALE_S = 10, 1.0  # readings older than so many periods and this long are no readings of now
BRIDGED_PERIODS = 4  # a gap between readings that worked may be this long
LONGEST_GAP_S = 5.0  # a reading says nothing about more time before it, unless joules are counted
COUNTER_TOLERANCE = 0.25  # between the hardware's energy counter and the readings, over a window
COUNTER_MIN_READINGS = 10  # fewer do not tell a slow counter from a broken one
COUNTER_STOPPED_S = 2.0  # one that has not moved for so long, while power is read, has stopped
IDLE_WATCH_S = 1.0
SETTLES_TIMES = 10.0  # a sensor needs so many times as long to forget something short


class EnergyIntegrator:
    """Joules from reading to reading: by the hardware's counter, unless there is none, or it has stopped."""

    def __init__(self) -> None:
        self._still_s = self._still_j = 0.0

    def between(self, before: PowerSample, after: PowerSample) -> float:
        """Joules from one reading to the next."""
        seconds = after.at_s - before.at_s
        read_j = (before.power_w + after.power_w) / 2 * seconds
        if after.energy_j is None or before.energy_j is None or after.energy_j < before.energy_j:
            return read_j
        if after.energy_j > before.energy_j:
            self._still_s = self._still_j = 0.0
            return after.energy_j - before.energy_j
        self._still_s += seconds
        if self._still_s > COUNTER_STOPPED_S:
            waiting_j, self._still_j = self._still_j, 0.0
            return waiting_j + read_j
        self._still_j += read_j
        return 0.0


@dataclass(frozen=True, slots=True)
class Trace:
    """Power over a stretch of time: readings, their times, and how many were missed."""

    at_s: NDArray[np.float64]
    power_w: NDArray[np.float64]
    counter_j: NDArray[np.float64] | None  # the hardware's energy counter, where there is one
    missed: int

    def __len__(self) -> int:
        return len(self.at_s)

    @property
    def peak_w(self) -> float:
        """The highest reading."""
        return float(np.max(self.power_w))

    @property
    def energy_j(self) -> float:
        """Joules from the first reading to the last: by the hardware counter where there is one, else by trapezoid."""
        if self.counter_j is not None:
            return float(self.counter_j[-1] - self.counter_j[0])
        return self.integrated_j

    @property
    def integrated_j(self) -> float:
        """Joules from the first reading to the last by trapezoid, whether or not there is a counter."""
        return float(np.sum(self._trapezoids_j))

    @property
    def gained_j(self) -> NDArray[np.float64]:
        """Joules between each reading and the next."""
        return self._trapezoids_j if self.counter_j is None else np.diff(self.counter_j)

    @property
    def _trapezoids_j(self) -> NDArray[np.float64]:
        return np.asarray((self.power_w[1:] + self.power_w[:-1]) / 2 * np.diff(self.at_s))

    def mean_watts(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Times and watts to average: what the counter gained between readings, where there is one, else readings."""
        if self.counter_j is None:
            return self.at_s, self.power_w
        return self.at_s[1:], np.diff(self.counter_j) / np.diff(self.at_s)

    def part(self, first: int, last: int | None = None) -> Trace:
        """The part from a reading on, up to and with another one; missed readings are counted for the whole."""
        part = slice(first, None if last is None else last + 1)
        counter = None if self.counter_j is None else self.counter_j[part]
        return Trace(self.at_s[part], self.power_w[part], counter, self.missed)


class Meter:
    """Use as ``with Meter(device) as meter: … meter.beat()`` after each step."""

    def __init__(
        self,
        device: Device,
        period_s: float = SAMPLE_PERIOD_S,
        watch: StuckWatch | None = None,
        states: StateReader | None = None,
    ) -> None:
        """``watch`` and ``states``: what another meter of the same device has seen of its sensor and state so far."""
        if period_s <= 0:
            raise MeasureError(f"The sampling period must be positive, not {period_s:g} s.")
        self._device = device
        self._watch = watch or StuckWatch()
        self.states = states or StateReader(device)  # for all who ask while steps go on
        self._may_stick = not isinstance(device, HasRecordedPower)
        self._period_s = period_s
        self._now_s = device.clock.now_s
        self._samples: deque[PowerSample] = deque()
        # A bare time is one step, which is what a training loop reports: its cost is one append.
        self._beats: deque[float | tuple[float, int]] = deque(maxlen=KEEP_BEATS)
        self.keep_beat = self._beats.append
        self._pauses: deque[tuple[float, float]] = deque(maxlen=KEEP_BEATS)
        self._absences: deque[tuple[float, float]] = deque()
        self._failing: tuple[float, SensorError] | None = None  # since the last reading that worked
        self._failed: tuple[float, SensorError] | None = None  # the newest that left too long a gap
        self._missed = 0
        self._joules = EnergyIntegrator()
        self.energy_j = 0.0  # drawn since the first reading, as far as it was read
        self._listeners: list[Callable[[PowerSample], None]] = []
        self._timer: Timer | None = None
        self._stopped = False
        self.counts_joules = False  # whether the hardware does; known once it was read
        self.hangs = False  # whether a reading was still under way, for long, when the meter stopped

    def __enter__(self) -> Self:
        """A sensor that does not work is an error now, not an empty trace later."""
        try:
            first = answer_within(ANSWER_S, self._read)
        except TimeoutError as exc:
            raise SensorError(
                f"The power of {self._device.info.name} could not be read within {ANSWER_S:g} s.",
                hint="The sensor hangs; often a restart of the machine helps.",
            ) from exc
        self.counts_joules = first.energy_j is not None
        self._stopped = False
        self._watch.unknown(self._now_s())
        self._timer = self._device.clock.every(self._period_s, self._sample)
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped = True  # what a reading that hangs says later, nobody hears
        if self._timer is not None:
            self.hangs = not self._timer.cancel()
            self._timer = None

    def beat(self) -> None:
        """A step is complete, now."""
        self.keep_beat(self._now_s())

    def beat_at(self, at_s: float, steps: int = 1) -> None:
        """Some steps were complete at a moment that somebody else noted."""
        self.keep_beat(at_s if steps == 1 else (at_s, steps))

    @property
    def newest(self) -> PowerSample | None:
        """The last reading that worked."""
        return self._samples[-1] if self._samples else None

    @property
    def failure(self) -> SensorError | None:
        """Why the newest failed reading failed."""
        found = self._failing or self._failed
        return found[1] if found else None

    def highest_after(self, at_s: float) -> float:
        """The highest reading after a moment; ``-inf`` where there was none."""
        return max((sample.power_w for sample in self.readings_after(at_s)), default=-np.inf)

    def readings_after(self, at_s: float) -> list[PowerSample]:
        """The readings that worked after a moment, oldest first."""
        return _newest(self._samples, lambda sample: sample.at_s > at_s)

    def pause(self, begin_s: float, end_s: float) -> None:
        """No step was under way for a while: that time belongs to none."""
        rested_s = self._pauses[-1][1] if self._pauses else math.inf
        has_stepped = bool(self._beats) and _at_s(self._beats[-1]) > rested_s
        self._pauses.append((begin_s, end_s))
        # Between two pauses without a step nothing was done: work that is none would hide a sensor that is stuck.
        self._watch.waited(begin_s if has_stepped else min(begin_s, rested_s), end_s)

    def absence(self, begin_s: float, end_s: float) -> None:
        """Something else than steps went on for a while, such as a test: neither its time nor its watts are theirs."""
        self._pauses.append((begin_s, end_s))
        self._absences.append((begin_s, end_s))
        self._watch.worked(begin_s)
        self._watch.unknown(end_s)

    def changed(self, mode: PowerMode) -> None:
        """A power mode was set, now."""
        highest = {knob.name: max(knob.values) for knob in self._device.space.knobs}
        self._watch.changed(self._now_s(), mode, highest)

    def check_sensor(self, *, after_step: bool = True) -> None:
        """Raise ``SensorError`` where readings stand still while steps, pauses and modes do not."""
        if after_step:
            self._watch.worked(self._now_s())
        if self._watch.is_stuck and self._may_stick:
            raise SensorError(
                f"The power of {self._device.info.name} reads {self._watch.power_w:g} W whatever it does: "
                "its sensor is stuck, and nobody can say what is drawn.",
                hint="Often a restart of the machine helps; then go on where the training stopped.",
            )

    def stands_still(self, since_s: float) -> bool:
        """Whether all readings since a moment are the same, and it is not known whether they can move."""
        return self._may_stick and self._watch.is_unproven(since_s)

    def wants_a_pause(self) -> bool:
        """Whether readings stand still for so long that a pause should show whether they can move."""
        return self._may_stick and self._watch.wants_a_pause()

    def wants_work(self) -> bool:
        """Whether readings stand still for so long in a wait that steps should show whether they can move."""
        return self._may_stick and self._watch.wants_work()

    def listen(self, listener: Callable[[PowerSample], None]) -> None:
        """Have every reading handed on, from the sampling thread."""
        self._listeners.append(listener)

    def _read(self) -> PowerSample:
        """A reading; what no device can draw while it runs is no reading, whoever wrote its driver."""
        sample = self._device.read_power()
        if not 0 < sample.power_w < MOST_W:
            raise SensorError(
                f"{self._device.info.name} reads {sample.power_w:g} W, which cannot be.",
                hint="Often a restart of the machine helps; `underwatt devices` shows what its sensor reads.",
            )
        return sample

    def _sample(self) -> None:
        try:
            sample = self._read()
        except Exception as exc:  # noqa: BLE001 - whatever ends the sampling must reach whoever asks for watts
            error = exc
            if not isinstance(error, SensorError):
                what = f"The power of {self._device.info.name} cannot be read any more ({exc})."
                error = SensorError(what, hint="Often a restart of the machine helps.")
                error.__cause__ = exc
            self._failing = (self._now_s(), error)
            return
        if self._stopped:
            return
        newest = self.newest
        gap_s = sample.at_s - newest.at_s if newest else 0.0
        drawn_j = self._joules.between(newest, sample) if newest else 0.0
        self.energy_j += drawn_j
        if gap_s > 0 and sample.energy_j is not None:
            sample = replace(sample, counted_w=drawn_j / gap_s)
        self._missed += max(0, round(gap_s / self._period_s) - 1)
        if self._failing is not None:
            if gap_s > BRIDGED_PERIODS * self._period_s:
                self._failed = self._failing
            self._failing = None
        self._samples.append(sample)
        self._watch.read(sample.at_s, sample.power_w)
        self._forget(sample.at_s - KEEP_S)
        for listener in self._listeners:
            listener(sample)

    def _forget(self, before_s: float) -> None:
        """Let go of what is old; readers begin at the newest, and try again where a deque has changed meanwhile."""
        while self._samples[0].at_s < before_s:
            self._samples.popleft()
        for spans in (self._pauses, self._absences):
            while spans and spans[0][1] < before_s:
                spans.popleft()
        while self._beats and _at_s(self._beats[0]) < before_s:
            self._beats.popleft()

    def trace(self, since_s: float = -np.inf) -> Trace:
        """The readings from a moment on; raises the sensor's error where it failed for longer than a moment."""
        if self._failed is not None and self._failed[0] >= since_s:
            raise self._failed[1]
        newest, failing = self.newest, self._failing
        bridged_s = BRIDGED_PERIODS * self._period_s
        if failing is not None and (newest is None or failing[0] - newest.at_s >= bridged_s):
            raise failing[1]
        if self._timer and newest and self._now_s() - newest.at_s > STALE_PERIODS * self._period_s + STALE_S:
            raise SensorError(
                f"The power of {self._device.info.name} was last read {self._now_s() - newest.at_s:.1f} s ago.",
                hint="The sensor hangs, or this machine is too busy to sample it.",
            )
        samples = _newest(self._samples, lambda sample: sample.at_s >= since_s)
        at_s = np.array([sample.at_s for sample in samples])
        power_w = np.array([sample.power_w for sample in samples])
        counter_j = None
        if samples and all(sample.energy_j is not None for sample in samples):
            counter_j = _sound_counter(at_s, power_w, np.array([sample.energy_j for sample in samples], float))
        return Trace(at_s, power_w, counter_j, self._missed)

    def step_times(self, since_s: float = -np.inf) -> NDArray[np.float64]:
        """How long each step took, pauses left out, for beats from a moment on; the first beat only starts the watch.

        A beat that stands for several steps gives each of them the same share of its time.
        """
        beats = _newest(self._beats, lambda beat: _at_s(beat) >= since_s)
        if len(beats) < 2:
            return np.empty(0)
        pairs = [beat if isinstance(beat, tuple) else (beat, 1) for beat in beats]
        at_s = np.array([at for at, _ in pairs])
        steps = np.array([count for _, count in pairs[1:]])
        return np.repeat((np.diff(at_s) - np.diff(self.paused_s(at_s))) / steps, steps)

    def present_from(self, at_s: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Which moments lie outside of absences, and long enough after one for a sensor to have settled."""
        present = np.ones(len(at_s), dtype=bool)
        for begin_s, end_s in _newest(self._absences, lambda absence: len(at_s) > 0 and absence[1] > at_s[0]):
            settled_s = end_s + min(SETTLING_WAIT_S, SETTLES_TIMES * (end_s - begin_s))  # a short one moves it little
            present &= (at_s < begin_s) | (at_s >= settled_s)
        return present

    def absences_in(self, at_s: NDArray[np.float64]) -> int:
        """How many of them there were between the first and the last of these moments."""
        ended = _newest(self._absences, lambda absence: len(at_s) > 0 and absence[0] > at_s[0])
        return sum(end_s <= at_s[-1] for _, end_s in ended)

    def paused_s(self, at_s: NDArray[np.float64]) -> NDArray[np.float64]:
        """Seconds paused until each moment, counted from the first of them."""
        pauses = _newest(self._pauses, lambda pause: pause[1] > at_s[0]) if len(at_s) else []
        if not pauses:
            return np.zeros(len(at_s))
        ends = np.array(pauses).ravel()  # begin, end, begin, end, …: paused time grows from each begin to its end
        grown = np.cumsum(np.diff(ends, prepend=ends[0]) * (np.arange(len(ends)) % 2))
        until = np.interp(at_s, ends, grown)
        return np.asarray(until - until[0])


def _at_s(beat: float | tuple[float, int]) -> float:
    return beat[0] if isinstance(beat, tuple) else beat


_Item = TypeVar("_Item")


def _newest(items: deque[_Item], wanted: Callable[[_Item], bool]) -> list[_Item]:
    """The items at the end that are wanted, oldest first; a sampling thread may append meanwhile."""
    while True:
        try:
            return list(takewhile(wanted, reversed(items)))[::-1]
        except RuntimeError:  # the deque grew while it was read
            continue


def _sound_counter(
    at_s: NDArray[np.float64], power_w: NDArray[np.float64], counter_j: NDArray[np.float64]
) -> NDArray[np.float64] | None:
    """The energy counter, unless it stands still, runs backwards, or contradicts the readings: then they count."""
    if len(counter_j) < COUNTER_MIN_READINGS:
        return counter_j
    mean_w = (counter_j[-1] - counter_j[0]) / (at_s[-1] - at_s[0])
    # Between the lowest and the highest of them: single readings of short steps and pauses have another mean.
    least_w, most_w = (1 - COUNTER_TOLERANCE) * np.min(power_w), (1 + COUNTER_TOLERANCE) * np.max(power_w)
    return counter_j if np.all(np.diff(counter_j) >= 0) and least_w <= mean_w <= most_w else None


def read_state(device: Device) -> DeviceState:
    """What a device is doing; raises ``SensorError`` where it does not answer: whoever asks has a training to go on."""
    try:
        return answer_within(STATE_S, device.read_state)
    except TimeoutError as exc:
        raise SensorError(
            f"The state of {device.info.name} could not be read within {STATE_S:g} s.",
            hint="The device hangs; often a restart of the machine helps. Then go on where the training stopped.",
        ) from exc


class StateReader:
    """Asks what a device is doing while a training goes on; one that hangs or fails is asked ever more rarely.

    Each question to a device that hangs holds a step up for seconds, so that all who ask in a run share one of these.
    """

    def __init__(self, device: Device) -> None:
        self._device, self._now_s = device, device.clock.now_s
        self._next_s, self._again_s = -math.inf, STATE_AGAIN_S
        self._failures = 0  # in a row
        self._news: tuple[str, str] | None = None
        self._is_said = False

    def ask(self) -> DeviceState | None:
        """What it is doing; ``None`` where it does not say, or did not when it was asked not long ago."""
        if self._now_s() < self._next_s:
            return None
        try:
            state = read_state(self._device)
        except DeviceError as exc:
            self._failures += 1
            self._next_s = self._now_s() + self._again_s  # from now: it may have hung for a while
            self._again_s = min(2 * self._again_s, LONGEST_STATE_AGAIN_S)
            if self._failures == STATE_SAID and not self._is_said:
                self._is_said = True
                unseen = "Whether it slows itself down is not seen, and it is asked ever more rarely."
                self._news = "warning", f"{exc.message} {unseen}"
            return None
        self._failures, self._again_s = 0, STATE_AGAIN_S
        return state

    def take_news(self) -> tuple[str, str] | None:
        """Level and words, once in a run, where it goes on failing and nobody was told yet."""
        news, self._news = self._news, None
        return news


def measure_idle(device: Device, watch_s: float = IDLE_WATCH_S) -> float:
    """What pauses draw: mean power over a moment in which nothing is trained; whoever calls sees to that."""
    with Meter(device) as meter:
        device.clock.sleep(SETTLING_WAIT_S + watch_s)
        trace = meter.trace(device.clock.now_s() - watch_s)
    if len(trace) < 2:
        raise SensorError(
            f"{device.info.name} gave no power reading in {watch_s:g} s.",
            hint="The sensor hangs, or this machine is too busy to sample it.",
        )
    return trace.energy_j / float(trace.at_s[-1] - trace.at_s[0])
