"""Time as a device knows it: the system's for real ones, its own for virtual ones.

Everything that waits, times or samples goes through a ``Clock``, so that the same code measures a real board in
real seconds and a virtual one in simulated seconds.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

_ROUNDING_S = 1e-9  # sums of decimal seconds miss whole ones by less than this


class Timer(Protocol):
    """A repeating call that can be stopped."""

    def cancel(self) -> None:
        """Stop; returns when no call is under way."""
        ...


class Clock(Protocol):
    """A source of time."""

    def now_s(self) -> float:
        """Seconds since some fixed moment; never goes back."""
        ...

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        ...

    def every(self, period_s: float, call: Callable[[], None]) -> Timer:
        """Call repeatedly, each ``period_s``, until the timer is cancelled."""
        ...


class SystemClock:
    """The monotonic clock of this machine; repeating calls run in a daemon thread."""

    now_s = staticmethod(time.monotonic)  # called after every step: no frame of ours in between

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        time.sleep(max(0.0, seconds))

    def every(self, period_s: float, call: Callable[[], None]) -> Timer:
        """Call from a daemon thread on a fixed grid of times; a late call follows at once, but they do not pile up."""
        return _ThreadTimer(period_s, call)


class _ThreadTimer:
    def __init__(self, period_s: float, call: Callable[[], None]) -> None:
        self._period_s = period_s
        self._call = call
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="underwatt-timer", daemon=True)
        self._thread.start()

    def _loop(self) -> None:
        due_s = time.monotonic()
        while not self._stop.is_set():
            self._call()
            now_s = time.monotonic()
            due_s = max(due_s + self._period_s, now_s - self._period_s)
            self._stop.wait(max(0.0, due_s - now_s))

    def cancel(self) -> None:
        self._stop.set()
        if self._thread is not threading.current_thread():
            self._thread.join()


class VirtualClock:
    """A clock that moves only when told to; repeating calls happen in passing, at their exact times."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s
        self._timers: list[_VirtualTimer] = []
        self._movers: list[Callable[[float], None]] = []

    def now_s(self) -> float:
        """Simulated seconds."""
        return self._now_s

    def sleep(self, seconds: float) -> None:
        """Move time forward."""
        self.advance(seconds)

    def every(self, period_s: float, call: Callable[[], None]) -> Timer:
        """Call at each multiple of ``period_s`` from now on."""
        timer = _VirtualTimer(self, self._now_s, period_s, call)
        self._timers.append(timer)
        return timer

    def on_move(self, mover: Callable[[float], None]) -> None:
        """Have ``mover(seconds)`` called for each stretch of time that passes: this is how a board lives."""
        self._movers.append(mover)

    def advance(self, seconds: float) -> None:
        """Move time forward, stopping at each timer that falls due on the way."""
        end_s = self._now_s + max(0.0, seconds)
        while True:
            due = min(self._timers, key=lambda timer: timer.due_s, default=None)
            if due is None or due.due_s > end_s + _ROUNDING_S:
                self._move_to(end_s)
                return
            self._move_to(max(due.due_s, self._now_s))
            due.fire()

    def _move_to(self, at_s: float) -> None:
        seconds = at_s - self._now_s
        if seconds > 0:
            self._now_s = at_s
            for mover in self._movers:
                mover(seconds)


class _VirtualTimer:
    def __init__(self, clock: VirtualClock, due_s: float, period_s: float, call: Callable[[], None]) -> None:
        self.due_s = due_s
        self._start_s = due_s
        self._fired = 0
        self._clock = clock
        self._period_s = period_s
        self._call = call

    def fire(self) -> None:
        self._fired += 1
        self.due_s = self._start_s + self._fired * self._period_s
        self._call()

    def cancel(self) -> None:
        if self in self._clock._timers:
            self._clock._timers.remove(self)
