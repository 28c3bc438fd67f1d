"""Putting a device back after its session was killed, from the journal that the session kept."""

from __future__ import annotations

from typing import TYPE_CHECKING

from underwatt.device.journal import Journal, journal_folders, pending
from underwatt.device.registry import open_device
from underwatt.device.several import locked
from underwatt.device.signals import SignalGates, uninterrupted
from underwatt.errors import ApplyError, DeviceBusyError, JournalError, UnderwattError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from underwatt.device.base import Device
    from underwatt.device.journal import JournalEntry


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
    return outcomes + [_outcome(journal, folder, open_address, discard=discard) for journal in pending(found)]


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
    left = [journal for folder in folders if (journal := Journal.of(device.info, "session", folder)).exists()]
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
