from __future__ import annotations

import threading
import time

from underwatt.device.timing import SystemClock


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
