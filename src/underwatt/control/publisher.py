"""Telling of a run: events go to its log and to whoever listens, measurements to a store, progress once a second.

The core says here what it needs of a log and of a store; ``runlog`` and ``store`` have them.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Protocol

from underwatt.control.live_budget import MayFail
from underwatt.device.base import foreign_changes
from underwatt.device.timing import answer_within
from underwatt.errors import DeviceError
from underwatt.events import Measured, Noted
from underwatt.measure.meter import STATE_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from underwatt.control.live_budget import BudgetSource
    from underwatt.device.base import Device
    from underwatt.events import Event
    from underwatt.measure.meter import StateReader
    from underwatt.records import Measurement

PERIOD_S, LATE_S = 1.0, 0.5
STATE_PERIOD_S, LONGEST_STATE_PERIOD_S = 5.0, 300.0  # clocks and heat are worth a look so often; where that fails, less


class EventLog(MayFail, Protocol):
    """Where a run's events and readings go; writing never ends a training."""

    def write(self, event: Event) -> None:
        """Note an event."""

    def power(self, at_s: float, power_w: float) -> None:
        """Note a reading."""

    def flush(self) -> None:
        """Write what was noted."""


class Keeper(MayFail, Protocol):
    """Where measurements outlive the run; keeping them never holds up a training."""

    def add(self, measurement: Measurement) -> None:
        """Keep a measurement, sooner or later."""

    def close(self) -> int:
        """Wait until all is kept, or cannot be; how many measurements could not."""


class Publisher:
    """Tells everybody; what fails on the way ends no training, but is said when it begins, and when it is over."""

    def __init__(
        self,
        log: EventLog | None,
        keeper: Keeper | None,
        listener: Callable[[Event], None] | None,
        inbox: BudgetSource | None,
        states: StateReader,
    ) -> None:
        self.log = log
        self._keeper, self._listener, self._states = keeper, listener, states
        self._may_fail: list[MayFail] = [part for part in (log, inbox, keeper, states) if part is not None]
        self._next_s = self._next_here_s = -math.inf
        self.seen: dict[str, Any] = {}  # clocks as they ran and the hottest part, when the device was last asked
        self._next_state_s, self._state_period_s = -math.inf, STATE_PERIOD_S
        self._changes: deque[str] = deque()  # what others did at the knobs, to be said
        self._thread = threading.get_ident()
        self._failure: Exception | None = None  # of a listener on another thread, such as the one that samples power

    def tell(self, event: Event) -> None:
        """Something happened."""
        if self.log is not None:
            self.log.write(event)
        if self._listener is not None:
            with self.outlived():
                self._listener(event)
        if isinstance(event, Measured) and self._keeper is not None:
            self._keeper.add(event.measurement)

    @contextlib.contextmanager
    def outlived(self) -> Iterator[None]:
        """What is raised on another thread than the training's, which must not end by it, waits for that one."""
        try:
            yield
        except Exception as exc:
            if threading.get_ident() == self._thread:
                raise
            self._failure = exc

    def raise_failure(self) -> None:
        """Raise on the training's thread what was raised on another one."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def news(self) -> list[Noted]:
        """What there is to say of a log, store or inbox that fails, or works again, and of others at the knobs."""
        said = [news for part in self._may_fail if (news := part.take_news())]
        said += [("warning", self._changes.popleft()) for _ in range(len(self._changes))]
        return [Noted(level=level, text=text) for level, text in said]

    def is_progress_due(self, now_s: float, late_s: float = 0.0) -> bool:
        """Once a second of the device, or of whoever watches a simulated one; steps ask ``late_s`` later."""
        return now_s >= self._next_s + late_s or time.monotonic() >= self._next_here_s + late_s

    def look_at(self, device: Device, now_s: float) -> None:
        """Ask now and then what the device is doing and what others did; one that does not say is asked more rarely."""
        if now_s < self._next_state_s:
            return
        self._next_state_s = now_s + STATE_PERIOD_S
        if self.log is not None:
            if (state := self._states.ask()) is None:
                return
            hottest_c = max(state.temperatures_c.values(), default=None)
            self.seen = {"running": state.running, "temperature_c": hottest_c}
        try:
            answer_within(STATE_S, lambda: self._changes.extend(foreign_changes(device)))  # also what is said later
            self._state_period_s = STATE_PERIOD_S
        except (DeviceError, TimeoutError):
            self._state_period_s = min(2 * self._state_period_s, LONGEST_STATE_PERIOD_S)
            self._next_state_s = device.clock.now_s() + self._state_period_s  # from now: it may have taken a while

    def progress_told(self, now_s: float) -> None:
        """The next progress is due in a second."""
        self._next_s, self._next_here_s = now_s + PERIOD_S, time.monotonic() + PERIOD_S

    def close(self) -> Noted | None:
        """No measurement comes any more; what there is to say of those that could not be kept."""
        left = self._keeper.close() if self._keeper is not None else 0
        text = f"{left} measurements could not be stored; this log holds them."
        return Noted(level="warning", text=text) if left else None
