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
from underwatt.device.several import locked, parts_of
from underwatt.device.signals import SignalGates, uninterrupted
from underwatt.errors import ApplyError, DeviceBusyError, InputError, JournalError, UnderwattError

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
        self._parts = parts_of(device)
        self._locks = [DeviceLock(part.info, folder) for part in self._parts]
        self._journals = [Journal.of(part.info, "session", self._folders[0]) for part in self._parts]
        # Of each part the state before the first change of each thing.
        self._found: list[dict[str, str]] = [{} for _ in self._parts]
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
            for lock in self._locks:
                lock.acquire()
            for part in self._parts:
                self.recovered |= finish_killed(part, self._folders)
        # A signal can fall between the block and __exit__; the end of the interpreter is then the net.
        atexit.register(self.restore)

    @uninterrupted
    def apply(self, mode: PowerMode) -> None:
        """Set a power mode until the session ends; a signal waits until the device is in one piece."""
        if not mode.knobs():
            return  # a session that sets nothing has nothing to put back: it must never write
        self._gates.renew()
        for at, (part, found) in enumerate(zip(self._parts, self._found, strict=True)):
            now = {"kept": "elsewhere"} if self._holds_elsewhere else {**part.snapshot(mode), **found}
            if now != found and not (part.info.in_process or self._holds_elsewhere):
                self._journals[at].write(part.info, now)
            self._found[at] = now
        self.device.apply(mode)

    @uninterrupted
    def restore(self) -> None:
        """Put everything back now; what cannot be put back stays in the journal and is an error."""
        if self._is_in_child():
            return
        failure: Exception | None = None
        for at, part in enumerate(self._parts):
            if not self._found[at]:
                continue
            try:
                part.restore(self._found[at])
                if not (part.info.in_process or self._holds_elsewhere):
                    self._journals[at].remove()
                self._found[at] = {}
            except Exception as exc:  # noqa: BLE001 - it is raised when the others are back
                failure = failure or exc
        if isinstance(failure, UnderwattError) and not isinstance(failure, JournalError):
            raise ApplyError(
                f"{self.device.info.name} could not be put back as it was: {failure.message}",
                hint="What to restore is kept; run `underwatt restore` when the cause is gone.",
            ) from failure
        if failure is not None:
            raise failure

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
        for lock in self._locks:
            lock.release()
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
    with locked(device, folder):
        for part in parts_of(device):
            finish_killed(part, folders)
        journal = Journal.of(device.info, "set", folders[0])
        kept = dict(journal.read().due) if journal.exists() else {}
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
