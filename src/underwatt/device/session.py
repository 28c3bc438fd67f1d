"""A session: whatever is set on a device while it lasts is put back when it ends, however it ends.

Exceptions, Ctrl-C, SIGTERM and a closed terminal are handled here; ``kill -9`` and a power cut by the journal, which
the next session on the device, or ``restore``, finishes. What a journal is, and a device's lock, stands in ``helper/``:
a device that keeps itself (the helper's) has its own, in the same form. The session says when it begins and ends, and
the helper puts back, also after ``kill -9``.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
from typing import TYPE_CHECKING

from underwatt.device.base import KeepsItself
from underwatt.device.registry import open_device
from underwatt.device.several import locked, parts_of
from underwatt.device.signals import SignalGates, uninterrupted
from underwatt.errors import ApplyError, DeviceBusyError, InputError, JournalError, UnderwattError
from underwatt.helper.journal import ROOTS_STATE, STATE_VARIABLE, Journal, state_dir, unreadable
from underwatt.helper.lock import DeviceLock
from underwatt.helper.snapshot import first_found

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from typing_extensions import Self

    from underwatt.device.base import Device
    from underwatt.helper.journal import JournalEntry
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
            now = {"kept": "elsewhere"} if self._holds_elsewhere else first_found(found, part.snapshot(mode))
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
        try:
            if self._holds_elsewhere and isinstance(self.device, KeepsItself):
                self._holds_elsewhere = False
                self.device.let_go()
        finally:
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
        parts = parts_of(device)  # each with its own journal, as it may be set alone before or after
        for part in parts:
            finish_killed(part, folders)
        journals = [Journal.of(part.info, "set", folders[0]) for part in parts]
        kept = [_kept(journal) for journal in journals]
        before = [dict(part.snapshot(mode)) for part in parts]
        is_kept = False
        try:
            for part, journal, first, now in zip(parts, journals, kept, before, strict=True):
                journal.write(part.info, first_found(first, now))
            is_kept = True
            device.apply(mode)
        except UnderwattError:  # leave things as they were; what cannot be undone stays in the journal
            for part, journal, first, now in zip(parts, journals, kept, before, strict=True):
                with contextlib.suppress(UnderwattError):
                    if is_kept:
                        part.restore(now)
                    if first:
                        journal.write(part.info, first)
                    else:
                        journal.remove()
            raise


def _kept(journal: Journal) -> dict[str, str]:
    """What was found before things were first set; a journal of before a reboot is forgotten."""
    if not journal.exists():
        return {}
    due = dict(journal.read().due)
    if not due:
        journal.remove()
    return due


# Where journals lie, and how those that a killed session left are finished.


def journal_folders() -> tuple[Path, ...]:
    """Where to look for journals: one's own, and root's, since a device may have been set with sudo."""
    own = state_dir()
    return (own,) if STATE_VARIABLE in os.environ or own == ROOTS_STATE else (own, ROOTS_STATE)


def pending(folders: Sequence[Path]) -> list[Journal]:
    """Every journal in some folders, the newest first: each holds what was found on top of those before it."""
    found = [Journal(folder / name) for folder in folders for name in _names(folder)]
    return sorted(found, key=_age)


def _age(journal: Journal) -> tuple[int, bool]:
    """The newest first; a session before the ``set`` beside it, which it ran on top of, whatever the clock says."""
    stem, purpose, _ = journal.path.name.rsplit(".", 2)
    beside = Journal(journal.path.with_name(f"{stem}.set.json"))
    return -max(journal.since_ns, beside.since_ns), purpose == "set"


def _names(folder: Path) -> list[str]:
    """The journals in a folder; one that cannot be looked into may hold some, so that is an error."""
    try:
        return sorted(path.name for path in folder.iterdir() if re.search(r"\.(session|set)\.json$", path.name))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as exc:
        raise unreadable(folder, exc) from exc


def restore(
    folder: Path | None = None, *, discard: bool = False, open_address: Callable[[str], Device] = open_device
) -> list[tuple[str, UnderwattError | None]]:
    """Finish every journal; returns what each was for, and the error where it could not be finished.

    ``discard`` gives up journals that are damaged, or that were tried and cannot be finished. A folder that cannot be
    looked into is an error like a journal that cannot be finished.
    """
    outcomes: list[tuple[str, UnderwattError | None]] = []
    found: list[Path] = []
    for place in (folder,) if folder else journal_folders():
        try:
            pending((place,))
            found.append(place)
        except JournalError as exc:
            outcomes.append((str(place), exc))
    unfinished: set[str] = set()
    for journal in pending(found):
        devices = _devices_of(journal)
        outcome = _waits(journal) if devices & unfinished else _outcome(journal, folder, open_address, discard=discard)
        if outcome[1] is not None:
            unfinished |= devices
        outcomes.append(outcome)
    return outcomes


def _devices_of(journal: Journal) -> set[str]:
    """By what journals of the same device are known: the name of its file, and the addresses in it."""
    name = journal.path.name.rsplit(".", 2)[0]
    try:
        return {name, *journal.read().address.split(",")}
    except JournalError:
        return {name}


def _waits(journal: Journal) -> tuple[str, UnderwattError]:
    """Put back out of turn, it would be undone by the one that is left."""
    text = "What was found earlier waits: what was set on top of it could not be put back."
    return journal.path.name, ApplyError(text, hint="Run `underwatt restore` again when the other journal is finished.")


def _outcome(
    journal: Journal, folder: Path | None, open_address: Callable[[str], Device], *, discard: bool
) -> tuple[str, UnderwattError | None]:
    name = journal.path.name
    try:
        entry = journal.read()
        name = f"{entry.device_name} ({entry.address})"
        with SignalGates():
            _finish(journal, entry, open_address, folder)
        return name, None
    except DeviceBusyError as exc:
        return name, exc  # its process lives, and puts the device back by itself
    except UnderwattError as exc:
        if discard:
            try:
                journal.remove()
            except JournalError as other:
                return name, other
            return f"{name}: given up ({exc.message})", None
        way_out = "Where that cannot be mended, `underwatt restore --discard` gives this journal up."
        hint = exc.hint if "--discard" in exc.hint else f"{exc.hint} {way_out}".strip()
        return name, type(exc)(exc.message, hint=hint)


@uninterrupted
def _finish(journal: Journal, entry: JournalEntry, open_address: Callable[[str], Device], folder: Path | None) -> None:
    device = open_address(entry.address)
    try:
        with locked(device, folder):
            device.restore(entry.due)
            journal.remove()
    finally:
        device.close()


@uninterrupted
def finish_killed(device: Device, folders: tuple[Path, ...]) -> bool:
    """Put back what a killed session left of this device; whether there was anything."""
    journals = [Journal.of(device.info, "session", folder) for folder in folders]
    left = sorted((journal for journal in journals if journal.exists()), key=_age)
    for journal in left:
        try:
            device.restore(journal.read().due)
        except ApplyError as exc:
            raise ApplyError(
                f"A killed session left {device.info.name} changed, and it cannot be put back: {exc.message}",
                hint=f"{exc.hint} `underwatt restore --discard` gives it up.".strip(),
            ) from exc
        journal.remove()
    return bool(left)
