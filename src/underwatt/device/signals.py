"""Signals that end a process, and a device half way between two states: they wait until it is in one piece.

Whether they wait is decided by where they arrive, not by a handler that is put in place at the beginning of a piece of
work: between any two lines there would be a moment in which a second signal breaks into it.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
import threading
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from typing_extensions import Self

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
_ENDING = (signal.SIGTERM, signal.SIGHUP)  # end a process without a word, unless somebody handles them
# With the last one PyTorch says that a loader's worker has died: its handler raises wherever this process is.
_GATED = (signal.SIGINT, *_ENDING, signal.SIGCHLD)
_waiting: list[_Gate] = []  # that arrived where they may not interrupt
_AGAIN_S, _MOST_TIMES = 0.05, 100  # a signal comes again, and so often: who trains while a module is imported can end


def uninterrupted(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Have signals wait until a function has returned; it must be called while there are ``SignalGates``."""

    @functools.wraps(function)
    def in_one_piece(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        try:
            return function(*args, **kwargs)
        finally:
            _let_through()

    return in_one_piece


def interruptible(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Let signals through again in a part of an uninterrupted function, one that may hang and holds no device."""

    @functools.wraps(function)
    def in_pieces(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        return function(*args, **kwargs)

    return in_pieces


# All functions that a decorator returns share their code.
_IN_ONE_PIECE, _IN_PIECES = uninterrupted(bool).__code__, interruptible(bool).__code__


def _must_wait(frame: FrameType | None) -> bool:
    """Whether an uninterrupted function is under way; of two inside each other, the inner one counts."""
    while frame is not None:
        if frame.f_code is _IN_PIECES:
            return False
        if frame.f_code is _IN_ONE_PIECE:
            return True
        frame = frame.f_back
    return False


def _is_half_done(frame: FrameType | None) -> bool:
    """Whether a module is half imported or a process half forked.

    Interrupted there, the module can be imported neither now nor while all ends, and what holds the locks that a fork
    takes, such as that of ``logging``, never lets go of them.
    """
    while frame is not None:
        code, frame = frame.f_code, frame.f_back
        if code.co_filename == "<frozen importlib._bootstrap>":
            return True
        if code.co_name == "_bootstrap" and code.co_filename.endswith("multiprocessing/process.py"):
            return False  # of the process that was forked, all of whose life is within the fork
        if code.co_name == "_launch" and code.co_filename.endswith("popen_fork.py"):
            return True
    return False


def _let_through() -> None:
    """An uninterrupted function returns: what waited for it takes effect, unless it is part of another one."""
    if not _waiting or threading.current_thread() is not threading.main_thread():
        return
    outside = sys._getframe(1).f_back
    if _must_wait(outside):
        return
    arrived = sorted(set(_waiting), key=lambda gate: gate.number == signal.SIGCHLD)  # those that end come first
    _waiting.clear()
    for gate in arrived:
        gate.act(outside)


class _Gate:
    """Stands before the handler of one signal."""

    def __init__(self, number: int, handler: Any) -> None:
        self.number, self._handler = number, handler
        self._process, self._times_put_off = os.getpid(), 0

    def __call__(self, _number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            self._act_in_child(frame)
        elif _must_wait(frame or sys._getframe()):
            _waiting.append(self)
        elif self._times_put_off < _MOST_TIMES and _is_half_done(frame):
            self._times_put_off += 1
            again = threading.Timer(_AGAIN_S, os.kill, (self._process, self.number))
            again.daemon = True
            again.start()
        else:
            self.act(frame)

    def act(self, frame: FrameType | None) -> None:
        """What the signal would have done; one that would have ended the process silently ends it in good order."""
        if callable(self._handler):
            self._handler(self.number, frame)
        else:
            raise SystemExit(128 + self.number)

    def _act_in_child(self, frame: FrameType | None) -> None:
        """A forked child, such as a loader's worker, owns no device: it ends as if there were no gate."""
        if callable(self._handler):
            self._handler(self.number, frame)
        else:
            signal.signal(self.number, self._handler)
            signal.raise_signal(self.number)


class SignalGates:
    """Use as ``with SignalGates():`` where uninterrupted functions are called; SIGTERM and SIGHUP raise SystemExit."""

    def __init__(self) -> None:
        self._before: list[tuple[_Gate, Any]] = []

    def __enter__(self) -> Self:
        self.renew()
        return self

    def renew(self) -> None:
        """Stand before handlers, also those that others have put in place since; only the main thread can."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in _GATED:
            handler = signal.getsignal(number)
            if not isinstance(handler, _Gate) and (
                callable(handler) or (number in _ENDING and handler is signal.SIG_DFL)
            ):
                gate = _Gate(number, handler)
                self._before.append((gate, handler))
                signal.signal(number, gate)

    def __exit__(self, *_: object) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        for gate, handler in reversed(self._before):
            if signal.getsignal(gate.number) == gate:  # what others have put in place since stays
                signal.signal(gate.number, handler)
        self._before.clear()
