"""Signals that end a process wait for the end of the step under way: no checkpoint holds half a step."""

from __future__ import annotations

import contextlib
import signal
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    from typing_extensions import Self

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StepGuard:
    """Use as ``with StepGuard() as guard:`` around a loop, ``with guard.step():`` around each step, then ``pass_on``.

    A second signal does not wait: a step that hangs must not hold anybody up.
    """

    def __init__(self) -> None:
        self.whole = True  # whether the model is as the last step left it
        self._held: int | None = None
        self._in_step = False
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in _ENDING:
                if callable(handler := signal.getsignal(number)):  # what is ignored stays ignored
                    self._handlers[number] = handler
                    signal.signal(number, self._arrived)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """A step is under way; one that fails may have failed because of the signal, which is then what counts."""
        self._in_step = True
        try:
            yield
        except Exception:
            self.pass_on()
            raise
        finally:
            self._in_step = False

    def pass_on(self) -> None:
        """The step is over and counted: a signal that came meanwhile takes effect now."""
        if self._held is not None:
            held, self._held = self._held, None
            self._handlers[held](held, None)

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """The model is being changed; it is whole again only where this comes to its end."""
        self.whole = False
        yield
        self.whole = True

    def _arrived(self, number: int, frame: FrameType | None) -> None:
        if self._in_step and self._held is None:
            self._held = number
        else:
            self._handlers[number](number, frame)
