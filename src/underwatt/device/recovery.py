"""Putting a device back after its session was killed, from the journal that the session kept."""

from __future__ import annotations

import signal
import threading
from typing import TYPE_CHECKING

from underwatt.device.journal import DeviceLock, Journal, journal_folders, pending
from underwatt.device.registry import open_device
from underwatt.errors import ApplyError, DeviceBusyError, UnderwattError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from typing import Any

    from underwatt.device.base import Device
    from underwatt.device.journal import JournalEntry

ENDING_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
_DEFERRED_SIGNALS = (signal.SIGINT, *ENDING_SIGNALS)


def restore(
    folder: Path | None = None, *, discard: bool = False, open_address: Callable[[str], Device] = open_device
) -> list[tuple[str, UnderwattError | None]]:
    """Finish every journal; returns what each was for, and the error where it could not be finished.

    ``discard`` gives up journals that are damaged, or that were tried and cannot be finished.
    """
    outcomes: list[tuple[str, UnderwattError | None]] = []
    for journal in pending((folder,) if folder else journal_folders()):
        name = journal.path.name
        try:
            entry = journal.read()
            name = f"{entry.device_name} ({entry.address})"
            _finish(journal, entry, open_address, folder)
            outcomes.append((name, None))
        except DeviceBusyError as exc:
            outcomes.append((name, exc))  # its process lives, and puts the device back by itself
        except UnderwattError as exc:
            if discard:
                journal.remove()
                outcomes.append((f"{name}: given up ({exc.message})", None))
            else:
                way_out = "Where that cannot be mended, `underwatt restore --discard` gives this journal up."
                hint = exc.hint if "--discard" in exc.hint else f"{exc.hint} {way_out}".strip()
                outcomes.append((name, type(exc)(exc.message, hint=hint)))
    return outcomes


def _finish(journal: Journal, entry: JournalEntry, open_address: Callable[[str], Device], folder: Path | None) -> None:
    device = open_address(entry.address)
    lock = DeviceLock(device.info, folder)
    lock.acquire()
    try:
        with signals_deferred():
            device.restore(entry.snapshot)
            journal.remove()
    finally:
        lock.release()
        device.close()


def finish_killed(device: Device, folders: tuple[Path, ...]) -> bool:
    """Put back what a killed session left of this device; whether there was anything."""
    left = [journal for folder in folders if (journal := Journal.of(device.info, "session", folder)).exists()]
    for journal in left:
        try:
            device.restore(journal.read().snapshot)
        except ApplyError as exc:
            raise ApplyError(
                f"A killed session left {device.info.name} changed, and it cannot be put back: {exc.message}",
                hint=f"{exc.hint} `underwatt restore --discard` gives it up.".strip(),
            ) from exc
        journal.remove()
    return bool(left)


class signals_deferred:  # noqa: N801 - reads as a verb phrase in a with statement
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
