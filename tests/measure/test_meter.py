from __future__ import annotations

import math
import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from profile_helpers import COST, virtual
from run_world import NET, Hurt

from underwatt.device.timing import SystemClock
from underwatt.drivers.virtual.simulated_board import VirtualClock
from underwatt.errors import MeasureError, NotPermittedError, SensorError
from underwatt.measure.meter import IDLE_WATCH_S, Meter, Trace, _sound_counter, measure_idle
from underwatt.measure.steady import SETTLING_WAIT_S
from underwatt.records import PowerSample


class Scripted:
    """Only what a meter needs of a device: a clock and a power reading."""

    def __init__(self, clock: VirtualClock | SystemClock, *, counter: bool = False) -> None:
        self.clock = clock
        self.power_w = 10.0
        self.counter = counter
        self.counted_w = 9.0
        self.broken: type[Exception] | None = None
        self.info = SimpleNamespace(name="scripted device")

    def read_power(self) -> PowerSample:
        if self.broken:
            raise self.broken("The sensor is gone.")
        now_s = self.clock.now_s()
        return PowerSample(now_s, self.power_w, self.counted_w * now_s if self.counter else None)


def test_energy_is_the_integral_of_power() -> None:
    device = Scripted(VirtualClock())
    with Meter(device) as meter:  # type: ignore[arg-type]
        device.clock.sleep(1.0)
        device.power_w = 20.0
        device.clock.sleep(1.0)
    trace = meter.trace()
    assert len(trace) == 21
    assert trace.energy_j == pytest.approx(30, abs=1.1)
    assert meter.trace(1.5).at_s[0] == pytest.approx(1.5)
    assert trace.peak_w == 20
    assert trace.missed == 0


def test_the_hardware_counter_is_preferred() -> None:
    device = Scripted(VirtualClock(), counter=True)
    with Meter(device) as meter:  # type: ignore[arg-type]
        device.clock.sleep(2.0)
    trace = meter.trace()
    assert trace.energy_j == pytest.approx(18)
    assert trace.integrated_j == pytest.approx(20)
    at_s, watts = trace.mean_watts()
    assert len(at_s) == len(trace) - 1
    assert watts == pytest.approx(np.full(20, 9.0))


def test_a_sensor_that_vanishes_is_raised_and_never_zero_watts() -> None:
    device = Scripted(VirtualClock())
    with Meter(device) as meter:  # type: ignore[arg-type]
        device.clock.sleep(0.5)
        device.broken = SensorError
        device.clock.sleep(0.5)
        with pytest.raises(SensorError, match="gone"):
            meter.trace()


@pytest.mark.parametrize("counted_w", [0.0, -9.0, 3.0])
def test_a_counter_that_stands_still_or_contradicts_the_readings_is_not_used(counted_w: float) -> None:
    device = Scripted(VirtualClock(), counter=True)
    device.counted_w = counted_w
    with Meter(device) as meter:  # type: ignore[arg-type]
        device.clock.sleep(2.0)
    assert meter.trace().counter_j is None
    assert meter.trace().energy_j == pytest.approx(20)


@pytest.mark.parametrize("error", [SensorError, NotPermittedError, RuntimeError])
def test_whatever_ends_the_sampling_thread_is_raised_as_a_sensor_error(error: type[Exception]) -> None:
    device = Scripted(SystemClock())
    with Meter(device, 0.01) as meter:  # type: ignore[arg-type]
        time.sleep(0.05)
        device.broken = error
        time.sleep(0.15)
        with pytest.raises(SensorError):
            meter.trace()


def test_a_sensor_that_hangs_is_an_error() -> None:
    device = Scripted(SystemClock())
    with Meter(device, 0.01) as meter:  # type: ignore[arg-type]
        time.sleep(0.05)
        read, hang = device.read_power, threading.Event()
        device.read_power = lambda: hang.wait(5) and read()  # type: ignore[method-assign,assignment,return-value]
        time.sleep(1.3)
        with pytest.raises(SensorError, match="last read"):
            meter.trace()
        hang.set()
    assert len(meter.trace()) > 3, "after the meter has stopped its trace can still be looked at"


@pytest.mark.parametrize("power_w", [0.0, -3.0, math.nan, math.inf, -math.inf, 1e12])
def test_watts_that_cannot_be_are_no_reading_whoever_wrote_the_driver(power_w: float) -> None:
    device = Scripted(VirtualClock())
    with Meter(device) as meter:  # type: ignore[arg-type]
        device.clock.sleep(1.0)
        device.power_w = power_w
        device.clock.sleep(1.0)
        with pytest.raises(SensorError, match="which cannot be") as caught:
            meter.trace()
        assert caught.value.hint
        device.power_w = 10.0
        device.clock.sleep(1.0)
        assert set(meter.trace(2.2).power_w.tolist()) == {10.0}
    device.power_w = power_w
    with pytest.raises(SensorError, match="which cannot be"), Meter(device):  # type: ignore[arg-type]
        pass


def test_a_sensor_that_never_worked_is_raised_at_once() -> None:
    device = Scripted(VirtualClock())
    device.broken = SensorError
    with pytest.raises(SensorError), Meter(device):  # type: ignore[arg-type]
        pass


def test_missed_samples_are_counted() -> None:
    device = Scripted(SystemClock())
    slow = device.read_power

    def read_slowly() -> PowerSample:
        if len(meter._samples) == 3:
            time.sleep(0.11)
        return slow()

    meter = Meter(device, 0.02)  # type: ignore[arg-type]
    device.read_power = read_slowly  # type: ignore[method-assign]
    with meter:
        time.sleep(0.4)
    assert 3 <= meter.trace().missed <= 9


@given(st.lists(st.tuples(st.floats(0.001, 5), st.integers(1, 4)), min_size=1, max_size=20))
def test_step_times_are_the_distances_between_beats(steps: list[tuple[float, int]]) -> None:
    meter = Meter(Scripted(VirtualClock()))  # type: ignore[arg-type]
    at_s = 3.0
    meter.beat_at(at_s)
    for seconds, count in steps:
        at_s += seconds * count
        meter.beat_at(at_s, count)
    assert meter.step_times() == pytest.approx([seconds for seconds, count in steps for _ in range(count)])
    assert len(meter.step_times(since_s=at_s + 1)) == 0


def test_beats_are_stamped_in_the_devices_time() -> None:
    device = virtual()
    with Meter(device) as meter:
        for _ in range(3):
            device.run_step(COST, 4)
            meter.beat()
    times_s = meter.step_times()
    assert times_s == pytest.approx(device.board.true_step_s(COST, device.board.mode, 4), rel=0.05)


def test_nonsense_period_is_refused() -> None:
    with pytest.raises(MeasureError):
        Meter(virtual(), 0)


def test_a_part_keeps_the_count_of_missed_samples() -> None:
    trace = Trace(np.arange(4.0), np.ones(4), None, 2)
    assert trace.part(2).missed == 2
    assert len(trace.part(2)) == 2


# Pauses, and looking while it goes on


@given(
    st.lists(st.tuples(st.floats(0.001, 2.0), st.floats(0.0, 1.0)), min_size=2, max_size=20),
    st.integers(0, 10),
)
def test_step_times_are_without_the_pauses_between_them(steps: list[tuple[float, float]], since: int) -> None:
    meter = Meter(Scripted(VirtualClock()))  # type: ignore[arg-type]
    at_s, beats = 1.0, [1.0]
    meter.beat_at(at_s)
    for busy_s, pause_s in steps:
        if pause_s > 0:
            meter.pause(at_s, at_s + pause_s)
        at_s += pause_s + busy_s
        meter.beat_at(at_s)
        beats.append(at_s)
    since = min(since, len(beats) - 1)
    assert meter.step_times(beats[since]) == pytest.approx([busy_s for busy_s, _ in steps[since:]], abs=1e-9)
    paused_s = meter.paused_s(np.array(beats))
    assert paused_s == pytest.approx(np.concatenate([[0.0], np.cumsum([pause_s for _, pause_s in steps])]), abs=1e-9)
    assert len(meter.paused_s(np.empty(0))) == 0


def test_a_pause_counts_for_the_part_of_it_that_has_passed() -> None:
    meter = Meter(Scripted(VirtualClock()))  # type: ignore[arg-type]
    meter.pause(2.0, 4.0)
    meter.pause(6.0, 7.0)
    assert meter.paused_s(np.array([0.0, 3.0, 4.0, 5.0, 6.5, 9.0])) == pytest.approx([0, 1, 2, 2, 2.5, 3])
    assert meter.paused_s(np.array([3.0, 6.5])) == pytest.approx([0, 1.5])


def test_the_newest_reading_and_those_after_a_moment() -> None:
    device = Scripted(VirtualClock())
    meter = Meter(device)  # type: ignore[arg-type]
    assert meter.newest is None
    assert meter.readings_after(0.0) == []
    with meter:
        device.clock.sleep(1.0)
        assert meter.newest is not None
        assert meter.newest.at_s == pytest.approx(1.0)
        assert [sample.at_s for sample in meter.readings_after(0.75)] == pytest.approx([0.8, 0.9, 1.0])
        assert len(meter.readings_after(-1.0)) == 11
        assert meter.readings_after(meter.newest.at_s) == []


def test_readings_that_go_on_failing_spoil_only_the_time_that_holds_them() -> None:
    device = Scripted(VirtualClock())
    with Meter(device) as meter:  # type: ignore[arg-type]
        device.clock.sleep(1.05)
        device.broken = SensorError
        device.clock.sleep(0.5)
        with pytest.raises(SensorError, match="gone"):
            meter.trace()
        device.broken = None
        device.clock.sleep(1.0)
        with pytest.raises(SensorError, match="gone"):
            meter.trace(1.0)
        after = meter.trace(1.55)
        assert len(after) == 10
        assert after.missed == 5
        assert meter.newest is not None
        assert meter.newest.at_s == pytest.approx(2.5)


def test_one_reading_that_fails_now_and_then_is_missed_and_no_more() -> None:
    device = Scripted(VirtualClock())
    with Meter(device) as meter:  # type: ignore[arg-type]
        device.clock.sleep(1.05)
        for _ in range(3):
            device.broken = SensorError
            device.clock.sleep(0.1)
            assert len(meter.trace()) >= 10
            device.broken = None
            device.clock.sleep(0.9)
        assert meter.trace().missed == 3


def test_listeners_hear_every_reading() -> None:
    device = Scripted(VirtualClock())
    heard: list[PowerSample] = []
    meter = Meter(device)  # type: ignore[arg-type]
    meter.listen(heard.append)
    with meter:
        device.clock.sleep(1.0)
    assert heard == meter.readings_after(-1.0)


def test_a_look_at_the_last_seconds_is_as_quick_after_a_day_as_after_a_minute() -> None:
    costs_s = []
    for count in (600, 864_000):
        device = Scripted(VirtualClock())
        meter = Meter(device)  # type: ignore[arg-type]
        meter._samples.extend([PowerSample(0.0, 10.0)] * (count - 100))
        meter._samples.extend(PowerSample(0.1 * i, 10.0) for i in range(count - 100, count))
        meter._beats.extend(0.1 * i for i in range(count))
        meter._pauses.extend((0.1 * i, 0.1 * i + 0.01) for i in range(count - min(count, 100_000), count))
        since_s, rounds_s = 0.1 * count - 4.0, []
        for _ in range(7):
            begun_s = time.perf_counter()
            trace = meter.trace(since_s)
            meter.step_times(since_s)
            meter.paused_s(trace.at_s)
            meter.readings_after(since_s)
            rounds_s.append(time.perf_counter() - begun_s)
        costs_s.append(min(rounds_s))
        assert len(trace) == 40
    assert costs_s[1] < 5 * costs_s[0] + 1e-3


@pytest.mark.parametrize("board", ["nano", "tx2-nx", "orin-nano"])
def test_idle_power_is_true_even_right_after_work(board: str) -> None:
    device = virtual(board)
    begun_s = device.clock.now_s()
    for _ in range(20):
        device.run_step(NET, 32)
    worked_s = device.clock.now_s() - begun_s
    work_w = device.board.true_power_w(NET, device.board.mode, 32)
    found_w = measure_idle(device, watch_s=4.0)
    assert device.clock.now_s() - begun_s - worked_s == pytest.approx(SETTLING_WAIT_S + 4.0)
    # The sensor still remembers the work: so much of the difference, on average over what was watched.
    lag_s, idle_w = device.board.spec.sensor.lag_s, device.board.power_w
    remembered = math.exp(-SETTLING_WAIT_S / lag_s) * lag_s / 4.0
    assert found_w == pytest.approx(idle_w + remembered * (work_w - idle_w), rel=0.03)


def test_it_takes_two_seconds() -> None:
    device = virtual()
    measure_idle(device)
    assert device.clock.now_s() == pytest.approx(SETTLING_WAIT_S + IDLE_WATCH_S)


def test_a_sensor_that_fails_meanwhile_is_an_error() -> None:
    device: Any = Hurt(virtual())
    device.silent = lambda: device.clock.now_s() > 0.5
    with pytest.raises(SensorError):
        measure_idle(device)


def test_a_reading_that_hangs_is_left_behind_and_what_it_says_later_is_not_heard() -> None:
    device = Scripted(SystemClock())
    heard: list[PowerSample] = []
    meter = Meter(device, 0.01)  # type: ignore[arg-type]
    meter.listen(heard.append)
    with meter:
        time.sleep(0.05)
        assert not meter.hangs
        read, hang, hung = device.read_power, threading.Event(), threading.Event()

        def hangs() -> PowerSample:
            hung.set()
            hang.wait(30)
            return read()

        device.read_power = hangs  # type: ignore[method-assign]
        assert hung.wait(1)
        begun_s = time.monotonic()
    assert time.monotonic() - begun_s < 2
    assert meter.hangs
    before = len(heard)
    hang.set()
    time.sleep(0.1)
    assert len(heard) == len(meter.trace()) == before


def test_a_sensor_that_hangs_from_the_start_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("underwatt.measure.meter.ANSWER_S", 0.05)
    device, hang = Scripted(SystemClock()), threading.Event()
    device.read_power = lambda: hang.wait(30)  # type: ignore[method-assign,assignment,return-value]
    with pytest.raises(SensorError, match="could not be read within"), Meter(device):  # type: ignore[arg-type]
        pass
    hang.set()


def test_peak_watts_are_the_highest_reading_however_many_are_lower() -> None:
    watts = np.full(1000, 5.0)
    watts[123] = 11.2
    assert Trace(np.arange(1000.0), watts, None, 0).peak_w == 11.2


def test_the_highest_reading_after_a_moment() -> None:
    device = Scripted(VirtualClock())
    with Meter(device) as meter:  # type: ignore[arg-type]
        assert meter.highest_after(0.0) == -np.inf
        device.clock.sleep(1.0)
        device.power_w = 20.0
        device.clock.sleep(0.1)
        device.power_w = 8.0
        device.clock.sleep(3.0)
        assert meter.highest_after(0.0) == 20.0
        assert meter.highest_after(2.0) == 8.0


def test_nothing_is_kept_for_longer_than_an_hour() -> None:
    device = Scripted(VirtualClock())
    with Meter(device, 1.0) as meter:  # type: ignore[arg-type]
        for at_s in range(3 * 3600):
            device.clock.sleep(0.5)
            meter.beat_at(device.clock.now_s(), 1 + at_s % 2)
            device.clock.sleep(0.5)
            meter.pause(device.clock.now_s() - 0.1, device.clock.now_s())
            if at_s % 60 == 0:
                meter.absence(device.clock.now_s() - 0.1, device.clock.now_s())
    assert len(meter.trace()) == pytest.approx(3600, abs=2)
    assert len(meter._beats) == pytest.approx(3600, abs=2)
    assert len(meter._pauses) == pytest.approx(3660, abs=2)
    assert len(meter._absences) == pytest.approx(60, abs=2)
    assert meter.energy_j == pytest.approx(3 * 36_000, rel=0.001), "what was drawn is counted all the same"


def test_a_counter_is_not_doubted_where_single_readings_miss_what_pauses_draw() -> None:
    """Readings between steps and pauses had a mean 30% beside the counter's, which then counted no more."""
    at_s = np.arange(30) / 10
    power_w = np.where(np.arange(30) % 3 == 0, 128.0, 500.0)  # 376 W, where the counter gains 250
    counter_j = 250.0 * at_s
    assert _sound_counter(at_s, power_w, counter_j) is counter_j
    assert _sound_counter(at_s, np.full(30, 500.0), counter_j) is None  # nothing was drawn that explains it
    assert _sound_counter(at_s, power_w, 1000 * counter_j) is None


def test_a_reading_tells_the_mean_since_the_one_before_by_the_counter() -> None:
    clock, counted = VirtualClock(), iter((0.0, 10.0, 35.0, 60.0, 85.0, 110.0))
    device = Scripted(clock)
    device.read_power = lambda: PowerSample(clock.now_s(), 400.0, next(counted))  # type: ignore[method-assign]
    with Meter(device) as meter:  # type: ignore[arg-type]
        clock.sleep(0.35)
        readings = meter.readings_after(-1.0)
    assert readings[0].mean_w == 400.0
    assert [reading.mean_w for reading in readings[1:]] == pytest.approx([250.0] * (len(readings) - 1))
