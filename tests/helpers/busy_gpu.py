"""A GPU on a busy machine, simulated: its counter moves ten times a second, and whoever asks for it is kept waiting.

Time is simulated, and shared by threads: the thread that reads power runs beside the one that trains, one at a time, in
the order in which they wake up. So a minute takes a second, and every run is the same. What is modelled is what was
seen on an H200 beside twelve busy processes: a look at the counter takes milliseconds, the one after a move longer, and
now and then another thread has the interpreter for a tenth of a second.
"""

from __future__ import annotations

import contextlib
import random
import threading
from typing import TYPE_CHECKING, Any

from fake_nvml import FakeNvml

if TYPE_CHECKING:
    from collections.abc import Callable

BEAT_S, PHASE_S = 0.1, 0.037
IDLE_W = 128.0


class SharedClock:
    """Simulated time of several threads: it moves on when all of them sleep, to when the first one wakes up."""

    def __init__(self) -> None:
        self._now_s = 100.0
        self._main = threading.get_ident()
        self._wakes: dict[int, tuple[float, int, threading.Event]] = {}
        self._turns = 0
        self.lived: list[Callable[[float], None]] = []

    def now_s(self) -> float:
        return self._now_s

    def sleep(self, seconds: float) -> None:
        """Whoever is no sampling thread sleeps for the one that trains, which waits for it."""
        mine = threading.get_ident()
        mine = mine if mine in self._timers() else self._main
        woken = threading.Event()
        self._turns += 1
        self._wakes[mine] = (self._now_s + max(0.0, seconds), self._turns, woken)
        self._pass_on()
        woken.wait()
        if mine != self._main and threading.current_thread().stopped:  # type: ignore[attr-defined]
            raise _Ended

    def _timers(self) -> set[int | None]:
        return {thread.ident for thread in threading.enumerate() if isinstance(thread, _Timer) and thread.clock is self}

    def _pass_on(self) -> None:
        """Let the one run that wakes up first."""
        who = min(self._wakes, key=lambda one: self._wakes[one][:2])
        wake_s, _, woken = self._wakes.pop(who)
        if wake_s > self._now_s:
            for live in self.lived:
                live(wake_s)
            self._now_s = wake_s
        woken.set()

    def every(self, period_s: float, call: Callable[[], None]) -> _Timer:
        timer = _Timer(self, period_s, call)
        timer.begin()
        return timer


class _Ended(BaseException):
    """The timer was cancelled in the middle of a reading."""


class _Timer(threading.Thread):
    def __init__(self, clock: SharedClock, period_s: float, call: Callable[[], None]) -> None:
        super().__init__(daemon=True)
        self.clock, self.stopped = clock, False
        self._period_s, self._call = period_s, call
        self._ready = threading.Event()

    def begin(self) -> None:
        self.start()
        self._ready.wait()

    def run(self) -> None:
        clock, first = self.clock, threading.Event()
        clock._turns += 1
        clock._wakes[self.ident or 0] = (clock.now_s(), clock._turns, first)
        self._ready.set()
        first.wait()
        due_s = clock.now_s()
        with contextlib.suppress(_Ended):
            while not self.stopped:
                self._call()
                now_s = clock.now_s()
                due_s = max(due_s + self._period_s, now_s - self._period_s)
                clock.sleep(due_s - now_s)

    def cancel(self) -> bool:
        self.stopped = True
        if (waking := self.clock._wakes.pop(self.ident or 0, None)) is not None:
            waking[2].set()
        self.join()
        return True


class BusyGpu(FakeNvml):
    """Draws what it is told to; its counter and its instant power are what such a card shows."""

    def __init__(self, clock: SharedClock, seed: int = 0, *, busy: bool = True) -> None:
        super().__init__()
        self.clock, self.busy = clock, busy
        self.drawn_w, self.drawn_j = IDLE_W, 0.0  # now, and in all
        self._chance = random.Random(seed)
        self._lived_s = clock.now_s()
        self._counted_j, self._told_j = 0.0, -1.0  # of the counter, at its last move, and as it was last told
        self.moves: list[tuple[float, float]] = []  # when it moved, and joules
        clock.lived.append(self._live)

    def _live(self, until_s: float) -> None:
        while (move_s := PHASE_S + BEAT_S * (1 + int((self._lived_s - PHASE_S) / BEAT_S + 1e-9))) <= until_s:
            self.drawn_j += self.drawn_w * (move_s - self._lived_s)
            self._lived_s, self._counted_j = move_s, self.drawn_j
            self.moves.append((move_s, self.drawn_j))
        self.drawn_j += self.drawn_w * (until_s - self._lived_s)
        self._lived_s = until_s

    def _wait(self) -> None:
        """For the interpreter: for a few milliseconds usually, and now and then for much longer."""
        if not self.busy:
            return
        chance = self._chance.random()
        usual_s = self._chance.uniform(0.0, 0.005)
        rare_s = self._chance.choice((0.02, 0.03, 0.05) if chance < 0.999 else (0.1, 0.4))
        self.clock.sleep(usual_s if chance < 0.99 else rare_s)

    def nvmlDeviceGetTotalEnergyConsumption(self, _: str) -> int:
        self.clock.sleep(0.0025)
        counted_j = self._counted_j
        if self.busy and counted_j != self._told_j and self._chance.random() < 0.5:
            self.clock.sleep(0.012)  # somebody else asks the driver too, whenever there is news
        self._told_j = counted_j
        self._wait()
        return round(1000 * counted_j)

    def nvmlDeviceGetFieldValues(self, _: str, fields: list[int]) -> list[Any]:
        self.power_mw = round(1000 * self.drawn_w)
        self._wait()
        return super().nvmlDeviceGetFieldValues(_, fields)
