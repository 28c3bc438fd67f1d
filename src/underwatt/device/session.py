"""A session: whatever is set on a device while it lasts is put back when it ends, however it ends.

Exceptions, Ctrl-C, SIGTERM and a closed terminal are handled here; ``kill -9`` and a power cut by the journal, which
the next session on the device, or ``underwatt restore``, finishes.
"""

from __future__ import annotations

import atexit
import os
import signal
import threading
from typing import TYPE_CHECKING

from underwatt.device.journal import DeviceLock, Journal, pending, state_dir
from underwatt.device.registry import open_device
from underwatt.errors import ApplyError, UnderwattError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path
    from types import FrameType, TracebackType
    from typing import Any

    from typing_extensions import Self

    from underwatt.device.base import Device
    from underwatt.records import PowerMode

_ENDING_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
_DEFERRED_SIGNALS = (signal.SIGINT, *_ENDING_SIGNALS)


class Session:
    """Use as ``with Session(device) as session: session.apply(mode)``."""

    def __init__(self, device: Device, folder: Path | None = None) -> None:
        self.device = device
        self.recovered = False  # whether an earlier session had left something to put back
        self._folder = folder or state_dir()
        self._lock = DeviceLock(device.info, self._folder)
        self._journal = Journal.of(device.info, "session", self._folder)
        self._found: Mapping[str, str] | None = None  # the state before the first apply
        self._handlers: dict[int, Any] = {}
        self._process = os.getpid()

    def __enter__(self) -> Self:
        in_process = self.device.info.in_process
        if not in_process:
            self._lock.acquire()
        try:
            with _signals_deferred():
                if not in_process and self._journal.exists():
                    self.device.restore(self._journal.read().snapshot)
                    self._journal.remove()
                    self.recovered = True
        except BaseException:
            self._lock.release()
            raise
        # A signal can fall between the block and __exit__; the end of the interpreter is then the net.
        atexit.register(self.restore)
        self._handlers = _end_on_signals()
        return self

    def apply(self, mode: PowerMode) -> None:
        """Set a power mode until the session ends; a signal waits until the device is in one piece."""
        if not mode.knobs():
            return  # a session that sets nothing has nothing to put back: it must never write
        with _signals_deferred():
            if self._found is None:
                found = self.device.snapshot()
                if not self.device.info.in_process:
                    self._journal.write(self.device.info, found)
                self._found = found
            self.device.apply(mode)

    def restore(self) -> None:
        """Put everything back now; what cannot be put back stays in the journal and is an error."""
        if self._found is None or os.getpid() != self._process:  # a forked child owns nothing
            return
        with _signals_deferred():
            try:
                self.device.restore(self._found)
            except UnderwattError as exc:
                raise ApplyError(
                    f"{self.device.info.name} could not be put back as it was: {exc.message}",
                    hint="What to restore is kept; run `underwatt restore` when the cause is gone.",
                ) from exc
            if not self.device.info.in_process:
                self._journal.remove()
            self._found = None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.restore()
        finally:
            atexit.unregister(self.restore)
            self._lock.release()
            for number, handler in self._handlers.items():
                signal.signal(number, handler)


def set_and_leave(device: Device, mode: PowerMode, folder: Path | None = None) -> None:
    """Set a mode that outlives this process; the first state found is kept for ``underwatt restore``."""
    folder = folder or state_dir()
    lock = DeviceLock(device.info, folder)
    lock.acquire()
    try:
        # A session that was killed left its settings behind: they are not the state to come back to.
        left_behind = Journal.of(device.info, "session", folder)
        if left_behind.exists():
            device.restore(left_behind.read().snapshot)
            left_behind.remove()
        journal = Journal.of(device.info, "set", folder)
        with _signals_deferred():
            if not journal.exists():
                journal.write(device.info, device.snapshot())
            device.apply(mode)
    finally:
        lock.release()


def restore_all(
    folder: Path | None = None, *, discard: bool = False, open_address: Callable[[str], Device] = open_device
) -> list[tuple[str, UnderwattError | None]]:
    """Finish every journal; returns what each was for, and the error where it could not be finished.

    ``discard`` removes damaged journals instead of reporting them; sound ones are always restored.
    """
    outcomes: list[tuple[str, UnderwattError | None]] = []
    for journal in pending(folder or state_dir()):
        name = journal.path.name
        try:
            try:
                entry = journal.read()
            except UnderwattError:
                if not discard:
                    raise
                journal.remove()
                outcomes.append((f"{name} (damaged, discarded)", None))
                continue
            name = f"{entry.device_name} ({entry.address})"
            device = open_address(entry.address)
            lock = DeviceLock(device.info, journal.path.parent)
            lock.acquire()
            try:
                with _signals_deferred():
                    device.restore(entry.snapshot)
                    journal.remove()
            finally:
                lock.release()
                device.close()
            outcomes.append((name, None))
        except UnderwattError as exc:
            outcomes.append((name, exc))
    return outcomes


def _end_on_signals() -> dict[int, Any]:
    """Turn the signals that would end this process silently into ``SystemExit``; returns the old handlers."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    replaced: dict[int, Any] = {}
    for number in _ENDING_SIGNALS:
        if signal.getsignal(number) is signal.SIG_DFL:
            replaced[number] = signal.signal(number, _raise_exit)
    return replaced


def _raise_exit(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


class _signals_deferred:  # noqa: N801 - reads as a verb phrase in a with statement
    """Hold back the signals that end a process while the device is half way between two states."""

    def __enter__(self) -> None:
        self._held: list[int] = []
        self._handlers: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            for number in _DEFERRED_SIGNALS:
                self._handlers[number] = signal.signal(number, lambda held, _frame: self._held.append(held))

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            # A handler that was not installed from Python reads as None and cannot be put back by Python.
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        for number in dict.fromkeys(self._held):
            signal.raise_signal(number)
