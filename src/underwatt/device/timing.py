"""Time as a device knows it: the system's for real ones, their own for simulated ones (``drivers.virtual``).

Everything that waits, times or samples goes through a ``Clock``, so that the same code measures a real board in
real seconds and a virtual one in simulated seconds.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

_Answer = TypeVar("_Answer")

# A call that is under way when its timer is cancelled has so long to come back. Whoever cancels may have a device to
# put back, and a sensor that hangs must not keep it from that.
LAST_CALL_S = 0.5


class Timer(Protocol):
    """A repeating call that can be stopped."""

    def cancel(self) -> bool:
        """Stop; whether no call is under way any more. One that hangs is waited for a moment, and then left behind."""


class Clock(Protocol):
    """A source of time."""

    def now_s(self) -> float:
        """Seconds since some fixed moment; never goes back."""

    def sleep(self, seconds: float) -> None:
        """Let time pass."""

    def every(self, period_s: float, call: Callable[[], None]) -> Timer:
        """Call repeatedly, each ``period_s``, until the timer is cancelled."""


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

    def cancel(self) -> bool:
        self._stop.set()
        if self._thread is not threading.current_thread():
            self._thread.join(LAST_CALL_S)
        return not self._thread.is_alive() or self._thread is threading.current_thread()


def answer_within(limit_s: float, call: Callable[[], _Answer]) -> _Answer:
    """What a call returns or raises; raises ``TimeoutError`` where it hangs, and leaves it behind in a thread."""
    answers: list[_Answer] = []
    errors: list[BaseException] = []

    def ask() -> None:
        try:
            answers.append(call())
        except BaseException as exc:  # noqa: BLE001 - handed on below
            errors.append(exc)

    thread = threading.Thread(target=ask, name="underwatt-first-reading", daemon=True)
    thread.start()
    thread.join(limit_s)
    if errors:
        raise errors[0]
    if not answers:
        raise TimeoutError(f"no answer in {limit_s:g} s")
    return answers[0]
