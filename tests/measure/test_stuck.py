from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from profile_helpers import COST
from run_world import Hurt, virtual

from underwatt.device.session import Session
from underwatt.drivers.virtual.simulated_board import VirtualClock
from underwatt.errors import SensorError
from underwatt.jobs.workloads import SimulatedWorkload
from underwatt.measure.series import run_profile
from underwatt.measure.stuck import LEAST_STEPS, StuckWatch
from underwatt.records import PowerMode, Setting, WorkloadInfo
from underwatt.store.store import Store

PERIOD_S = 0.1
HIGHEST = {"gpu_mhz": 1000.0, "cpu_mhz": 2000.0}
IDLE_W = 2.0


class Sensor:
    """Reads in whole steps what it has averaged: over a window that it publishes at its end, or following slowly."""

    def __init__(self, step_w: float, window_s: float, lag_s: float, at_first_w: float) -> None:
        self._step_w, self._window_s, self._lag_s = step_w, window_s, lag_s
        self._sum_w, self._count = 0.0, 0
        self._shown_w = at_first_w

    def see(self, power_w: float) -> float:
        self._sum_w, self._count = self._sum_w + power_w, self._count + 1
        if self._count * PERIOD_S >= self._window_s:
            mean_w = self._sum_w / self._count
            keep = math.exp(-self._count * PERIOD_S / self._lag_s) if self._lag_s else 0.0
            self._shown_w = mean_w + keep * (self._shown_w - mean_w)
            self._sum_w, self._count = 0.0, 0
        return self._step_w * round(self._shown_w / self._step_w)


def live(
    watch: StuckWatch, what: list[tuple[str, float, float]], read: Callable[[float], float], swing_w: float = 5.0
) -> bool:
    """Work, wait and change clocks as told; whether the sensor was called stuck on the way."""
    clock, share, stuck = 0.0, 0.5, False
    watch.unknown(0.0)
    for kind, seconds, value in what:
        if kind == "mode":
            share = value
            mode = PowerMode.of({name: max(1.0, share * most) for name, most in HIGHEST.items()})
            watch.changed(clock, mode, HIGHEST)
            continue
        scale = {"work": LEAST_STEPS + (1 - LEAST_STEPS) * share, "wait": 0.0, "else": value}[kind]
        for _ in range(max(1, round(seconds / PERIOD_S))):
            begin_s, clock = clock, clock + PERIOD_S
            watch.read(clock, read(IDLE_W + swing_w * scale))
            if kind == "wait":
                watch.waited(begin_s, clock)
            elif kind == "work":
                watch.worked(clock)
            else:
                watch.unknown(clock)
            stuck = stuck or watch.is_stuck
    return stuck


STRETCHES = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["work", "wait"]), st.floats(0.1, 30), st.just(0.0)),
        st.tuples(st.just("mode"), st.just(0.0), st.floats(0.05, 1.0)),
        st.tuples(st.just("else"), st.floats(0.1, 20), st.floats(0.0, 1.0)),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=150, deadline=None)
@given(STRETCHES, st.sampled_from([0.04, 0.16, 0.4]), st.sampled_from([0.1, 0.2, 1.0, 3.4]), st.floats(0.0, 2.0))
def test_a_sensor_that_works_is_never_called_stuck(
    what: list[tuple[str, float, float]], step_w: float, window_s: float, lag_s: float
) -> None:
    """Without any noise, in coarse steps: 64 or 512 conversions, a second's average of a large GPU, a slow filter."""
    sensor = Sensor(step_w, window_s, 0.0 if window_s > 1 else lag_s, IDLE_W)
    assert not live(StuckWatch(), what, sensor.see)


@settings(max_examples=50, deadline=None)
@given(STRETCHES, st.floats(0.5, 999.0))
def test_one_that_stands_still_is_found_by_work_and_a_pause(
    what: list[tuple[str, float, float]], power_w: float
) -> None:
    what = [*what, ("work", 20.0, 0.0), ("wait", 20.0, 0.0)]
    assert live(StuckWatch(), what, lambda _: power_w)


@given(st.lists(st.floats(0.1, 20), min_size=1, max_size=10))
def test_what_nothing_is_known_of_proves_nothing(seconds: list[float]) -> None:
    what = [("else", each, 0.5) for each in seconds] + [("work", 60.0, 0.0)]
    assert not live(StuckWatch(), what, lambda _: 5.0)


@given(st.lists(st.floats(0.05, 1.0), min_size=2, max_size=8), st.booleans())
def test_modes_of_which_one_clock_is_higher_and_another_lower_may_draw_the_same(
    shares: list[float], gpu_up: bool
) -> None:
    watch, clock = StuckWatch(), 0.0
    watch.unknown(0.0)
    for share in shares:
        gpu, cpu = (share, 1.05 - share) if gpu_up else (1.05 - share, share)
        watch.changed(clock, PowerMode(gpu_mhz=gpu * 1000, cpu_mhz=cpu * 2000), HIGHEST)
        for _ in range(200):
            clock += PERIOD_S
            watch.read(clock, 5.0)
            watch.worked(clock)
    between = max(min(s, 1.05 - s) for s in shares) - min(max(s, 1.05 - s) for s in shares)
    assert not watch.is_stuck or between > 0


def test_from_all_clocks_low_to_all_high_a_reading_must_move() -> None:
    what = [("mode", 0.0, 0.1), ("work", 25.0, 0.0), ("mode", 0.0, 1.0), ("work", 15.0, 0.0)]
    assert live(StuckWatch(), what, lambda _: 5.0)


def test_a_power_limit_need_not_change_anything() -> None:
    watch, clock = StuckWatch(), 0.0
    watch.unknown(0.0)
    for limit_w in (100.0, 700.0, 100.0):
        watch.changed(clock, PowerMode(power_limit_w=limit_w), {"power_limit_w": 700.0})
        for _ in range(300):
            clock += PERIOD_S
            watch.read(clock, 90.0)
            watch.worked(clock)
    assert not watch.is_stuck


def test_a_long_wait_for_data_is_no_work() -> None:
    """A loop whose first batch takes a minute draws what waiting draws."""
    watch = StuckWatch()
    watch.unknown(0.0)
    watch.waited(0.0, 30.0)
    for n in range(900):
        watch.read(n * PERIOD_S, 2.0)
    watch.worked(90.0)
    watch.worked(90.1)
    watch.worked(94.05)
    assert not watch.is_stuck


def test_steps_of_many_seconds_are_work_when_they_come_regularly() -> None:
    watch, clock = StuckWatch(), 0.0
    watch.unknown(0.0)
    for _ in range(5):
        for _ in range(80):
            clock += PERIOD_S
            watch.read(clock, 2.5)
        watch.worked(clock)
    assert watch.wants_a_pause()
    for _ in range(16):
        watch.waited(clock, clock + 1.0)
        clock += 1.0
        watch.read(clock, 2.5)
    assert watch.is_stuck


def test_a_pause_is_asked_for_ever_more_seldom_where_it_shows_that_readings_move() -> None:
    watch, asked_s, clock, reading = StuckWatch(), [], 0.0, 5.0
    watch.unknown(0.0)
    while clock < 3000:
        clock += PERIOD_S
        watch.read(clock, reading)
        if watch.wants_a_pause():
            asked_s.append(clock)
            watch.waited(clock, clock + 0.5)
            clock += 0.5
            reading = 9.0 - reading
            watch.read(clock, reading)
        watch.worked(clock)
    assert 2 <= len(asked_s) <= 5
    assert not watch.is_stuck


@pytest.mark.parametrize("power_w", [2.5, 999.0])
def test_a_profile_with_a_stuck_sensor_ends_with_that_and_keeps_nothing_false(tmp_path: Any, power_w: float) -> None:
    device: Any = Hurt(virtual("nano"))
    read = device.read_power
    device.read_power = lambda: replace(read(), power_w=power_w)
    workload = SimulatedWorkload(WorkloadInfo("small", "small"), COST, device)
    modes = [device.space.lowest, device.space.highest]
    wanted = [Setting(mode, size) for size in (8, 32) for mode in modes]
    with Store(tmp_path / "store.db") as store, Session(device) as session:
        with pytest.raises(SensorError, match="stuck"):
            run_profile(session, workload, wanted, store)
        assert not store.measurements(store.profile_id(device.info, workload.info))


def test_two_modes_of_a_virtual_board_that_draw_the_same_are_no_stuck_sensor(tmp_path: Any) -> None:
    """Read without noise, in steps of 0.4 W."""
    device: Any = Hurt(virtual("nano"))
    read = device.read_power
    device.read_power = lambda: replace(read(), power_w=0.4 * round(device.board.power_w / 0.4))
    workload = SimulatedWorkload(WorkloadInfo("small", "small"), COST, device)
    highest = device.space.highest
    knob = device.space.knob("cpu_mhz")
    wanted = [Setting(highest.with_knobs(cpu_mhz=value), 32) for value in knob.values[-3:]]
    with Store(tmp_path / "store.db") as store, Session(device) as session:
        found = run_profile(session, workload, wanted, store)
    assert len(found.measured) == 3
    assert isinstance(device.clock, VirtualClock)


@pytest.mark.parametrize("moves", [True, False])
def test_a_long_wait_with_readings_that_stand_still_asks_for_steps_and_a_pause_then_tells(moves: bool) -> None:
    watch, at_s, asked_s = StuckWatch(), 0.0, list[float]()
    watch.unknown(0.0)
    while at_s < 400.0 and not watch.is_stuck:
        begin_s, at_s = at_s, at_s + PERIOD_S
        works = watch.wants_work()
        watch.read(at_s, IDLE_W + 3.0 * (works and moves))
        if works:
            asked_s.append(at_s)
            watch.worked(at_s)
        else:
            watch.waited(begin_s, at_s)
    assert asked_s[0] > 30.0
    assert watch.is_stuck is not moves
    assert not moves or len(asked_s) < 50, "one that moves is asked less and less often"
