"""Where journals lie, and which are to be finished; what a journal is, and a device's lock, stands in ``helper/``.

The helper keeps what it found in root's folder and in the same form: who restores finds one kind of journal.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from underwatt.helper.journal import (
    ROOTS_STATE,
    STATE_VARIABLE as STATE_VARIABLE,
    Journal as Journal,
    JournalEntry as JournalEntry,
    state_dir as state_dir,
    unreadable,
)
from underwatt.helper.lock import DeviceLock as DeviceLock, process_started as process_started

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


def journal_folders() -> tuple[Path, ...]:
    """Where to look for journals: one's own, and root's, since a device may have been set with sudo."""
    own = state_dir()
    return (own,) if STATE_VARIABLE in os.environ or own == ROOTS_STATE else (own, ROOTS_STATE)


def pending(folders: Sequence[Path]) -> list[Journal]:
    """Every journal in some folders: sessions before ``set``, because a session may have run on top of one."""
    found = [(folder / name, name.split(".")[-2]) for folder in folders for name in _names(folder)]
    return [Journal(path) for wanted in ("session", "set") for path, purpose in found if purpose == wanted]


def _names(folder: Path) -> list[str]:
    """The journals in a folder; one that cannot be looked into may hold some, so that is an error."""
    try:
        return sorted(path.name for path in folder.iterdir() if re.search(r"\.(session|set)\.json$", path.name))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as exc:
        raise unreadable(folder, exc) from exc
