"""The journal: what to put back, on disk before anything is changed.

One small file a device and purpose, written whole (temporary file, fsync, rename, fsync of the folder), with a
checksum, so that after a ``kill -9`` or a power cut it is either all there or not there. Beside it lies a lock file;
the kernel drops the lock when its process dies, however it dies.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import sys
import weakref
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from underwatt._files import sync_folder, write_atomically
from underwatt.errors import DeviceBusyError, JournalError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from underwatt.records import DeviceInfo

FORMAT = 1
STATE_VARIABLE = "UNDERWATT_STATE"
_ROOTS_STATE = Path("/var/lib/underwatt")
_SHARED_LOCKS = Path("/run/lock")  # for everybody: root and a user must not set one device at once


def state_dir() -> Path:
    """Where journals are written: ``$UNDERWATT_STATE``, else a folder that outlives a reboot."""
    if configured := os.environ.get(STATE_VARIABLE):
        return Path(configured)
    if os.geteuid() == 0:
        return _ROOTS_STATE
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "underwatt"


def journal_folders() -> tuple[Path, ...]:
    """Where to look for journals: one's own, and root's, since a device may have been set with sudo."""
    own = state_dir()
    return (own,) if STATE_VARIABLE in os.environ or own == _ROOTS_STATE else (own, _ROOTS_STATE)


def _lock_dir() -> Path:
    if STATE_VARIABLE not in os.environ and os.access(_SHARED_LOCKS, os.W_OK):
        return _SHARED_LOCKS
    return state_dir()


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """What one session found: enough to open the device again and put it back."""

    address: str
    device_name: str
    process: int
    command: str
    snapshot: Mapping[str, str]


class Journal:
    """The journal file of one device for one purpose (``session`` or ``set``)."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def of(cls, info: DeviceInfo, purpose: str, folder: Path) -> Journal:
        """The journal of a device."""
        return cls(folder / f"{_slug(info.id)}.{purpose}.json")

    def exists(self) -> bool:
        """Whether there is something to put back."""
        return self.path.exists()

    def write(self, info: DeviceInfo, snapshot: Mapping[str, str]) -> None:
        """Keep a snapshot; once this returns it survives anything."""
        body = asdict(JournalEntry(info.address, info.name, os.getpid(), _command(), dict(snapshot)))
        text = json.dumps({"format": FORMAT, "sha256": _digest(body), "body": body}, indent=1)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self.path, text, durable=True)
        except OSError as exc:
            raise JournalError(
                f"The restore journal cannot be written to {self.path.parent} ({exc.strerror}), "
                "so nothing was changed on the device.",
                hint=f"Free some space there, or name another folder in {STATE_VARIABLE}.",
            ) from exc

    def read(self) -> JournalEntry:
        """What to put back; a damaged file is an error and stays where it is."""
        try:
            outer = json.loads(self.path.read_text(encoding="utf-8"))
            if outer["format"] != FORMAT:
                raise JournalError(
                    f"The journal {self.path} has format {outer['format']}, this version reads {FORMAT}.",
                    hint="Run `underwatt restore` with the version that wrote it.",
                )
            body = outer["body"]
            if outer["sha256"] != _digest(body):
                raise ValueError("its checksum does not match")
            return JournalEntry(**body)
        except (OSError, ValueError, KeyError, TypeError) as exc:
            raise JournalError(
                f"The journal {self.path} is damaged ({exc}) and was left untouched.",
                hint="A reboot brings the board's own settings back; then `underwatt restore --discard` removes it.",
            ) from exc

    def remove(self) -> None:
        """Forget: everything was put back."""
        self.path.unlink(missing_ok=True)
        sync_folder(self.path.parent)


class DeviceLock:
    """One session a device: held until released, or until this process ends in whatever way."""

    def __init__(self, info: DeviceInfo, folder: Path | None = None) -> None:
        self._path = (folder or _lock_dir()) / f"underwatt-{_slug(info.id)}.lock"
        self._device_name = info.name
        self._file: int | None = None

    def acquire(self) -> None:
        """Take the lock, or say which process has it."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            file = _open_for_all(self._path)
        except OSError as exc:
            raise JournalError(
                f"The lock {self._path} cannot be made ({exc.strerror}).",
                hint=f"Name a folder that you may write to in {STATE_VARIABLE}.",
            ) from exc
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            holder = os.pread(file, 300, 0).decode(errors="replace").strip() or "unknown"
            os.close(file)
            raise DeviceBusyError(
                f"{self._device_name} is in use by another Underwatt session (process {holder}).",
                hint="Wait for it to end, or stop it; it puts the device back by itself.",
            ) from exc
        os.ftruncate(file, 0)
        os.pwrite(file, f"{os.getpid()}: {_command()}\n".encode(), 0)
        self._file = file
        # A forked child (a data loader's worker) must not keep the lock alive after its parent was killed.
        lock = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _drop_in_child(lock))

    def release(self) -> None:
        """Let the next session in."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _open_for_all(path: Path) -> int:
    """Open a lock file that other users can open too; made only where absent, which sticky folders insist on."""
    try:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        with contextlib.suppress(OSError):
            os.fchmod(file, 0o666)  # whatever the umask says
        return file


def _drop_in_child(reference: weakref.ref[DeviceLock]) -> None:
    lock = reference()
    if lock is not None:
        lock.release()


def pending(folders: Sequence[Path]) -> list[Journal]:
    """Every journal in some folders: sessions before ``set``, because a session may have run on top of one."""
    places = [(folder, purpose) for purpose in ("session", "set") for folder in folders]
    return [Journal(path) for folder, purpose in places for path in sorted(folder.glob(f"*.{purpose}.json"))]


def _slug(device_id: str) -> str:
    """A file name for a device; the digest keeps ids apart that differ only in characters a name cannot have."""
    plain = re.sub(r"[^A-Za-z0-9_.-]+", "_", device_id)
    return plain if plain == device_id else f"{plain}-{hashlib.sha256(device_id.encode()).hexdigest()[:8]}"


def _command() -> str:
    return " ".join(sys.argv)[:200]


def _digest(body: object) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
