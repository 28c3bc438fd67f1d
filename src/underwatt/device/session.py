"""A session: whatever is set on a device while it lasts is put back when it ends, however it ends.

Exceptions, Ctrl-C, SIGTERM and a closed terminal are handled here; ``kill -9`` and a power cut by the journal, which
the next session on the device, or ``underwatt restore``, finishes.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import threading
from typing import TYPE_CHECKING

from underwatt.device.journal import DeviceLock, Journal, journal_folders
from underwatt.device.recovery import ENDING_SIGNALS, finish_killed, signals_deferred
from underwatt.errors import ApplyError, UnderwattError

if TYPE_CHECKING:
    from pathlib import Path
    from types import FrameType
    from typing import Any

    from typing_extensions import Self

    from underwatt.device.base import Device
    from underwatt.records import PowerMode


class Session:
    """Use as ``with Session(device) as session: session.apply(mode)``."""

    def __init__(self, device: Device, folder: Path | None = None) -> None:
        self.device = device
        self.recovered = False  # whether an earlier session had left something to put back
        self._folders = (folder,) if folder else journal_folders()
        self._lock = DeviceLock(device.info, folder)
        self._journal = Journal.of(device.info, "session", self._folders[0])
        self._found: dict[str, str] = {}  # the state before the first change of each thing
        self._handlers: dict[int, Any] = {}
        self._process = os.getpid()

    def __enter__(self) -> Self:
        if not self.device.info.in_process:
            self._lock.acquire()
            try:
                with signals_deferred():
                    self.recovered = finish_killed(self.device, self._folders)
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
        with signals_deferred():
            found = {**self.device.snapshot(mode), **self._found}
            if found != self._found:
                if not self.device.info.in_process:
                    self._journal.write(self.device.info, found)
                self._found = found
            self.device.apply(mode)

    def restore(self) -> None:
        """Put everything back now; what cannot be put back stays in the journal and is an error."""
        if not self._found or os.getpid() != self._process:  # a forked child owns nothing
            return
        with signals_deferred():
            try:
                self.device.restore(self._found)
            except UnderwattError as exc:
                raise ApplyError(
                    f"{self.device.info.name} could not be put back as it was: {exc.message}",
                    hint="What to restore is kept; run `underwatt restore` when the cause is gone.",
                ) from exc
            if not self.device.info.in_process:
                self._journal.remove()
            self._found = {}

    def __exit__(self, *_: object) -> None:
        try:
            self.restore()
        finally:
            atexit.unregister(self.restore)
            self._lock.release()
            for number, handler in self._handlers.items():
                signal.signal(number, handler)


def set_mode(device: Device, mode: PowerMode, folder: Path | None = None) -> None:
    """Set a mode that outlives this process; the first state found is kept for ``underwatt restore``."""
    folders = (folder,) if folder else journal_folders()
    lock = DeviceLock(device.info, folder)
    lock.acquire()
    try:
        with signals_deferred():
            finish_killed(device, folders)
            journal = Journal.of(device.info, "set", folders[0])
            kept = dict(journal.read().snapshot) if journal.exists() else {}
            before = dict(device.snapshot(mode))
            journal.write(device.info, {**before, **kept})
            try:
                device.apply(mode)
            except UnderwattError:  # leave things as they were; what cannot be undone stays in the journal
                with contextlib.suppress(UnderwattError):
                    device.restore(before)
                    if kept:
                        journal.write(device.info, kept)
                    else:
                        journal.remove()
                raise
    finally:
        lock.release()


def _end_on_signals() -> dict[int, Any]:
    """Turn the signals that would end this process silently into ``SystemExit``; returns the old handlers."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    silent = [number for number in ENDING_SIGNALS if signal.getsignal(number) is signal.SIG_DFL]
    return {number: signal.signal(number, _raise_exit) for number in silent}


def _raise_exit(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
