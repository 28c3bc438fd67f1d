"""A session: whatever is set on a device while it lasts is put back when it ends, however it ends.

Exceptions, Ctrl-C, SIGTERM and a closed terminal are handled here; ``kill -9`` and a power cut by the journal, which
the next session on the device, or ``underwatt restore``, finishes. A device that keeps itself (the helper's) has a lock
and a journal of its own: the session says when it begins and ends, and the helper puts back, also after ``kill -9``.
"""

from __future__ import annotations

import atexit
import contextlib
import os
from typing import TYPE_CHECKING

from underwatt.device.base import KeepsItself
from underwatt.device.journal import DeviceLock, Journal, journal_folders
from underwatt.device.recovery import finish_killed
from underwatt.device.signals import SignalGates, uninterrupted
from underwatt.errors import ApplyError, DeviceBusyError, InputError, UnderwattError

if TYPE_CHECKING:
    from pathlib import Path

    from typing_extensions import Self

    from underwatt.device.base import Device
    from underwatt.records import PowerMode

_in_use: set[int] = set()  # devices that live in this process only, so that there is no lock on disk for them


class Session:
    """Use as ``with Session(device) as session: session.apply(mode)``."""

    def __init__(self, device: Device, folder: Path | None = None) -> None:
        self.device = device
        self.recovered = False  # whether an earlier session had left something to put back
        self._folders = (folder,) if folder else journal_folders()
        self._lock = DeviceLock(device.info, folder)
        self._journal = Journal.of(device.info, "session", self._folders[0])
        self._found: dict[str, str] = {}  # the state before the first change of each thing
        self._gates = SignalGates()
        self._holds_in_process = self._holds_elsewhere = False
        self._process = os.getpid()

    def __enter__(self) -> Self:
        self._gates.renew()
        try:
            self._begin()
        except BaseException:
            self._let_go()
            raise
        return self

    @uninterrupted
    def _begin(self) -> None:
        if self.device.info.in_process:
            if id(self.device) in _in_use:
                raise DeviceBusyError(
                    f"{self.device.info.name} is in use by another session of this process.",
                    hint="Wait for it to end, or open the device anew for this one.",
                )
            _in_use.add(id(self.device))
            self._holds_in_process = True
        elif isinstance(self.device, KeepsItself):
            self.recovered = self.device.hold()
            self._holds_elsewhere = True
        else:
            self._lock.acquire()
            self.recovered = finish_killed(self.device, self._folders)
        # A signal can fall between the block and __exit__; the end of the interpreter is then the net.
        atexit.register(self.restore)

    @uninterrupted
    def apply(self, mode: PowerMode) -> None:
        """Set a power mode until the session ends; a signal waits until the device is in one piece."""
        if not mode.knobs():
            return  # a session that sets nothing has nothing to put back: it must never write
        self._gates.renew()
        found = {"kept": "elsewhere"} if self._holds_elsewhere else {**self.device.snapshot(mode), **self._found}
        if found != self._found:
            if not (self.device.info.in_process or self._holds_elsewhere):
                self._journal.write(self.device.info, found)
            self._found = found
        self.device.apply(mode)

    @uninterrupted
    def restore(self) -> None:
        """Put everything back now; what cannot be put back stays in the journal and is an error."""
        if not self._found or self._is_in_child():
            return
        try:
            self.device.restore(self._found)
        except UnderwattError as exc:
            raise ApplyError(
                f"{self.device.info.name} could not be put back as it was: {exc.message}",
                hint="What to restore is kept; run `underwatt restore` when the cause is gone.",
            ) from exc
        if not (self.device.info.in_process or self._holds_elsewhere):
            self._journal.remove()
        self._found = {}

    @uninterrupted
    def __exit__(self, *_: object) -> None:
        if self._is_in_child():
            return
        try:
            self._gates.renew()
        finally:
            try:
                self.restore()
            finally:
                self._let_go()

    def _let_go(self) -> None:
        atexit.unregister(self.restore)
        self._lock.release()
        if self._holds_in_process:
            _in_use.discard(id(self.device))
            self._holds_in_process = False
        if self._holds_elsewhere and isinstance(self.device, KeepsItself):
            self._holds_elsewhere = False
            self.device.let_go()
        self._gates.__exit__()

    def _is_in_child(self) -> bool:
        """A forked child owns nothing: neither the device nor what is to be put back."""
        return os.getpid() != self._process


def set_mode(device: Device, mode: PowerMode, folder: Path | None = None) -> None:
    """Set a mode that outlives this process; the first state found is kept for ``underwatt restore``."""
    with SignalGates():
        _set_mode(device, mode, folder)


@uninterrupted
def _set_mode(device: Device, mode: PowerMode, folder: Path | None) -> None:
    if isinstance(device, KeepsItself):
        raise InputError(
            "Through the helper nothing can be left set: it puts back what a process has set when that ends.",
            hint='`underwatt run` sets it as long as it trains; to leave it set: sudo "$(command -v underwatt)" set …',
        )
    folders = (folder,) if folder else journal_folders()
    lock = DeviceLock(device.info, folder)
    lock.acquire()
    try:
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
