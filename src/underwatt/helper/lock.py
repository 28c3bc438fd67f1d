"""Who may set a device: a lock that sessions and the service share.

The kernel drops the lock when its process dies, however it dies. Other users cannot take it, and must not: they learn
who has a device from a note in a folder that everybody may write to.
"""

import contextlib
import fcntl
import os
import pwd
import stat
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import DeviceBusyError, JournalError
from .journal import STATE_VARIABLE, command_line, slug, state_dir

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from .journal import Info

_SHARED_NOTES = Path("/run/lock")  # for everybody: root and a user must not set one device at once
_LONGEST_NOTE = 1000
_MOST_NOTES = 100  # so many of one user are read: a session leaves one, and removes those of its user that nobody needs


class DeviceLock:
    """One session a device: held until released, or until this process ends in whatever way.

    ``heeds`` says whose notes count; everybody's, unless somebody must not be kept out by strangers.
    """

    def __init__(
        self, info: "Info", folder: "Path | None" = None, heeds: "Callable[[int], bool]" = lambda _user: True
    ) -> None:
        self._heeds = heeds
        self._stem = f"underwatt-{slug(info.id)}"
        self._path = (folder or state_dir()) / f"{self._stem}.lock"
        self._device_name = info.name
        self._lock = FileLock()
        # Who names a folder of their own shares the device with nobody else.
        self._notes = None if folder or STATE_VARIABLE in os.environ else _SHARED_NOTES
        self._note: Path | None = None

    def acquire(self, command: str = "") -> None:
        """Take the lock, or say which process has it; ``command`` is what others are told of this one."""
        command = command or command_line()
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            file = _open_own(self._path)
        except OSError as exc:
            raise JournalError(
                f"The lock {self._path} cannot be made ({exc.strerror}).",
                hint=f"Name a folder of your own, that you may write to, in {STATE_VARIABLE}.",
            ) from exc
        holder = os.pread(file, 300, 0).decode(errors="replace").strip() or "unknown"
        if not self._lock.take(file):
            raise self._busy(holder)
        try:
            os.ftruncate(file, 0)
            os.pwrite(file, f"{os.getpid()}: {command}\n".encode(), 0)
            # First say it, then look: of two users who begin at once, both see the other.
            self._leave_note(command)
            for others in self._others():
                raise self._busy(others)
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Let the next session in."""
        if self._note is not None:
            with contextlib.suppress(OSError):
                self._note.unlink()
            self._note = None
        self._lock.release()

    def _busy(self, holder: str) -> DeviceBusyError:
        return DeviceBusyError(
            f"{self._device_name} is in use by another Underwatt session (process {holder}).",
            hint="Wait for it to end, or stop it; it puts the device back by itself.",
        )

    def _leave_note(self, command: str) -> None:
        """Tell other users; in a folder that anybody may write to, a new name is one that nobody has prepared."""
        if self._notes is None:
            return
        note = self._notes / f"{self._stem}.{os.urandom(8).hex()}.note"
        text = f"{os.getpid()} {process_started(os.getpid())} {command}\n"
        with contextlib.suppress(OSError):  # where there is no such folder, there is nobody to tell
            file = os.open(note, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
            self._note = note
            with os.fdopen(file, "wb") as opened:
                os.fchmod(file, 0o644)  # whatever the umask says
                opened.write(text.encode()[:_LONGEST_NOTE])

    def _others(self) -> "Iterator[str]":
        """Other processes that have the device, as their notes say; notes of ours that nobody needs are removed.

        Anybody may fill that folder, so that whose a note is comes first: those of users who are not heeded are never
        opened, and of each other user only so many.
        """
        if self._notes is None:
            return
        heeded: dict[int, bool] = {}
        read: dict[int, int] = {}
        for path, owner in _notes_in(self._notes, self._stem):
            mine = owner == os.geteuid()
            if owner not in heeded:
                heeded[owner] = self._heeds(owner)
            if path == str(self._note) or not (mine or heeded[owner]) or read.get(owner, 0) >= _MOST_NOTES:
                continue
            read[owner] = read.get(owner, 0) + 1
            with contextlib.suppress(OSError, ValueError):
                writer, text = _read_note(Path(path))
                pid, started, command = text.split(" ", 2)
                if writer == owner and heeded[owner] and _is_process_of(int(pid), started, owner):
                    yield f"{pid}: {command.strip()}, of {user_name(owner)}"
                elif writer == owner and mine:
                    os.unlink(path)
                    read[owner] -= 1


def _notes_in(folder: Path, stem: str) -> "Iterator[tuple[str, int]]":
    """The notes on a device one by one, with their owners; a folder of a hundred thousand is never in memory whole."""
    with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
        for entry in stack.enter_context(os.scandir(str(folder))):
            if entry.name.startswith(f"{stem}.") and entry.name.endswith(".note"):
                with contextlib.suppress(OSError):  # its session has just ended
                    yield entry.path, entry.stat(follow_symlinks=False).st_uid


def _open_own(path: Path) -> int:
    """Open a lock file, made where it is absent: a file of this user's, and nothing that somebody else put there."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    file = os.open(path, flags, 0o600)
    found = os.fstat(file)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_nlink > 1:
        os.close(file)
        raise PermissionError(0, "it is no file of yours")
    return file


def _read_note(path: Path) -> "tuple[int, str]":
    """Whose a note is, and what it says; whatever else lies there is an ``OSError``."""
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode):
            raise OSError("it is no file")
        return found.st_uid, os.read(file, _LONGEST_NOTE).decode(errors="replace")
    finally:
        os.close(file)


def _is_process_of(pid: int, started: str, owner: int) -> bool:
    """Whether a process lives, is the one that was meant, and is of the user who says so."""
    if pid <= 0:
        return False  # which would mean groups of processes
    try:
        os.kill(pid, 0)
    except PermissionError:
        pass  # somebody else's
    except (OSError, OverflowError):
        return False
    now = process_started(pid)
    try:
        return now is None or (now == started and Path(f"/proc/{pid}").stat().st_uid == owner)
    except OSError:
        return True  # some systems hide what others run


def process_started(pid: int) -> "str | None":
    """When a process started, in the kernel's ticks: after a reboot the same number is another process."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return status.rpartition(")")[2].split()[19]


def user_name(user: int) -> str:
    """How a user is called."""
    try:
        return f"user {pwd.getpwuid(user).pw_name}"
    except KeyError:
        return f"user {user}"


class FileLock:
    """The lock of an open file or folder: held until released, or until this process ends in whatever way."""

    def __init__(self) -> None:
        self._file: int | None = None
        # A forked child (a data loader's worker) must not keep the lock alive after its parent was killed.
        lock = weakref.ref(self)
        if hasattr(os, "register_at_fork"):  # Python 3.6 has none, where only the service runs, which forks nothing
            os.register_at_fork(after_in_child=lambda: _drop_in_child(lock))  # for good: so once, not with each take

    def take(self, file: int) -> bool:
        """Take the lock of a file that was opened for it; whether nobody else has it. The file is ours to close."""
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            return False
        except BaseException:
            os.close(file)
            raise
        self._file = file
        return True

    def release(self) -> None:
        """Let the next one in."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _drop_in_child(reference: "weakref.ref[FileLock]") -> None:
    lock = reference()
    if lock is not None:
        lock.release()
