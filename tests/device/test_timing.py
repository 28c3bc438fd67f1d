from __future__ import annotations

import threading
import time

import pytest

from underwatt.device.timing import SystemClock, answer_within


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


def test_a_call_that_hangs_is_left_behind_when_its_timer_is_cancelled() -> None:
    clock, hang, begun = SystemClock(), threading.Event(), threading.Event()

    def call() -> None:
        begun.set()
        hang.wait(30)

    timer = clock.every(0.005, call)
    assert begun.wait(1)
    cancelled_s = clock.now_s()
    assert not timer.cancel()
    assert clock.now_s() - cancelled_s < 2
    hang.set()


def test_an_answer_is_handed_on_whatever_it_is_and_waited_for_no_longer_than_allowed() -> None:
    hang = threading.Event()
    assert answer_within(1.0, lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        answer_within(1.0, lambda: 1 // 0)
    with pytest.raises(TimeoutError):
        answer_within(0.05, lambda: hang.wait(30))
    hang.set()
