from __future__ import annotations

import threading
import time

from hypothesis import given
from hypothesis import strategies as st

from underwatt.device.clock import SystemClock
from underwatt.drivers.virtual.board import VirtualClock


@given(st.lists(st.floats(0, 3), max_size=20), st.floats(0.05, 1))
def test_virtual_timers_fire_at_their_exact_times(steps: list[float], period_s: float) -> None:
    clock = VirtualClock()
    seen: list[float] = []
    moved: list[float] = []
    clock.on_move(moved.append)
    clock.every(period_s, lambda: seen.append(clock.now_s()))
    for step in steps:
        clock.advance(step)
    assert abs(sum(moved) - sum(steps)) < 1e-9
    assert abs(clock.now_s() - sum(steps)) < 1e-9
    assert all(abs(at - n * period_s) < 1e-6 for n, at in enumerate(seen))
    if steps:
        assert abs(len(seen) - (sum(steps) / period_s + 1)) <= 1 + 1e-6


def test_a_cancelled_virtual_timer_is_silent_even_when_it_cancels_itself() -> None:
    clock = VirtualClock()
    seen: list[float] = []

    def once() -> None:
        seen.append(clock.now_s())
        timer.cancel()

    timer = clock.every(1.0, once)
    clock.advance(10)
    timer.cancel()
    assert seen == [0.0]
    assert clock.now_s() == 10


def test_time_never_goes_back() -> None:
    clock = VirtualClock(5.0)
    clock.sleep(-3)
    assert clock.now_s() == 5.0


def test_system_timer_skips_instead_of_piling_up() -> None:
    clock = SystemClock()
    started = clock.now_s()
    calls: list[float] = []

    def slow() -> None:
        calls.append(clock.now_s() - started)
        time.sleep(0.05)

    timer = clock.every(0.02, slow)
    clock.sleep(0.3)
    timer.cancel()
    count = len(calls)
    assert 3 <= count <= 7
    clock.sleep(0.1)
    assert len(calls) == count


def test_a_system_timer_can_cancel_itself() -> None:
    clock = SystemClock()
    ready = threading.Event()
    calls: list[int] = []

    def once() -> None:
        ready.wait(1)
        calls.append(1)
        timer.cancel()

    timer = clock.every(0.005, once)
    ready.set()
    clock.sleep(0.1)
    assert calls == [1]
