"""The board, its one holder, and what is to be put back for it: the part of the service that changes anything.

What was found is in the journal, and synced, before the first change. A hold ends when its holder says so, when its
connection or its process ends, and when its lease runs out; each end puts everything back.
"""

import os
import select
import sys
import time
from typing import TYPE_CHECKING, Any

from .errors import DeviceBusyError, DeviceError, LeaseError, ModeError
from .journal import Journal, state_dir
from .lock import DeviceLock, process_started, user_name
from .snapshot import first_found

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from .board import JetsonBoard

LONGEST_LEASE_S = 600.0
LOOK_S = 0.05  # how often it is looked whether the holder still lives, where the kernel does not tell
AGAIN_S = (5.0, 30.0, 300.0)  # what cannot be put back is tried again so much later; then whoever holds next tries
_PIDFD_OPEN = 434  # the same number on every architecture


class Process:
    """A process whose end is to be seen, also while a child of it keeps its connection open."""

    def __init__(self, pid: int, *, told: bool = True) -> None:
        self.pid = pid
        self._started = process_started(pid)
        self.file = _pidfd(pid) if told else None  # can be read once the process has ended

    def has_ended(self) -> bool:
        """Whether it has ended; one that nobody has waited for yet has ended, too."""
        if self.file is not None:
            return bool(select.select([self.file], [], [], 0)[0])
        return self._started is None or process_started(self.pid) != self._started or _is_dead(self.pid)

    def forget(self) -> None:
        """Let go of it."""
        if self.file is not None:
            os.close(self.file)
            self.file = None


def _pidfd(pid: int) -> "int | None":
    """A file that tells of a process' end, where the kernel has such (5.3 up)."""
    try:
        if hasattr(os, "pidfd_open"):
            return os.pidfd_open(pid)
        import ctypes

        file = int(ctypes.CDLL(None).syscall(_PIDFD_OPEN, pid, 0))
    except (OSError, ImportError):
        return None
    return file if file >= 0 else None


def _is_dead(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] in (b"Z", b"X", b"x")
    except (OSError, IndexError):
        return True


class Hold:
    """Who may set the board now, until when, and what was found before its first change."""

    def __init__(self, owner: object, process: Process, user: int, lease_s: float) -> None:
        self.owner, self.process, self.user, self.lease_s = owner, process, user, lease_s
        self.lease = os.urandom(16).hex()
        self.until_s = 0.0
        self.found: dict[str, str] = {}

    def __str__(self) -> str:
        return f"process {self.process.pid} of {user_name(self.user)}"


class Keeper:
    """Sets the board for one holder at a time; ``heeds`` says whose sessions beside the helper's count."""

    def __init__(
        self,
        board: "JetsonBoard",
        heeds: "Callable[[int], bool]" = lambda _user: True,
        now_s: "Callable[[], float]" = time.monotonic,
    ) -> None:
        self.board, self._now_s = board, now_s
        self.hold: Hold | None = None
        self.trouble = ""  # why the board is not as it was found
        self._journal = Journal.of(board.identity, "session", state_dir())
        self._lock = DeviceLock(board.identity, heeds=heeds)
        self._tries, self._again_s = 0, 0.0

    def begin(self, owner: object, process: Process, user: int, lease_s: float) -> "tuple[Hold, bool]":
        """Give the board to a process; and whether something that was killed had to be put back first."""
        if self.hold is not None:
            hint = "Wait for it to end, or stop it; the helper then puts the board back."
            raise DeviceBusyError(f"{self.board.identity.name} is held by {self.hold}.", hint=hint)
        hold = Hold(owner, process, user, min(max(lease_s, 1.0), LONGEST_LEASE_S))
        self._lock.acquire(f"underwatt-helper for {hold}")
        try:
            recovered = self._finish_journal()
        except BaseException:
            self._lock.release()
            raise
        self.hold = self._renewed(hold)
        say(f"{hold} holds the board")
        return hold, recovered

    def held_by(self, owner: object, lease: Any) -> Hold:
        """The hold that somebody claims; the claim renews it."""
        hold = self.hold
        if hold is None or hold.owner is not owner or lease != hold.lease:
            raise LeaseError("You do not hold the board, or no longer; what you had set was put back.")
        return self._renewed(hold)

    def apply(self, hold: Hold, mode: "Mapping[str, float]") -> None:
        """Set the board, once it is on disk what it was."""
        if not mode:
            raise ModeError("A mode that names no knob sets nothing.")
        self.board.check(mode)
        before = self.board.snapshot()
        found = first_found(hold.found, before)
        if found != hold.found:
            self._journal.write(self.board.identity, found)
            hold.found = found
        self.board.apply(mode, before)
        self._renewed(hold)

    def put_back(self, hold: Hold) -> None:
        """Put everything back, and leave the hold as it is; what cannot be put back stays in the journal."""
        if hold.found:
            self._put_back(hold.found)
            hold.found = {}

    def end(self, why: str) -> None:
        """Put everything back and let the next one in."""
        hold, self.hold = self.hold, None
        if hold is None:
            return
        try:
            self.put_back(hold)
            say(f"{hold} {why}: the board is as it was found")
        finally:
            self._lock.release()

    def finish_killed(self) -> None:
        """Put back what was left by a session that was killed, the helper's or root's own."""
        # A note that any member could leave must not keep it from putting back.
        lock = DeviceLock(self.board.identity, heeds=lambda user: user == 0)
        lock.acquire("underwatt-helper")
        try:
            self._finish_journal()
        finally:
            lock.release()

    def tick(self) -> None:
        """What time brings: a lease that has run out, a holder that has ended, another try to put something back."""
        hold, now_s = self.hold, self._now_s()
        if hold is None:
            if self._again_s and now_s >= self._again_s:
                self._again_s = 0.0
                self.finish_killed()
        elif hold.process.has_ended():
            self.end("has ended")
        elif now_s >= hold.until_s:
            self.end(f"gave no sign of life for {hold.lease_s:g} s")

    @property
    def wait_s(self) -> "float | None":
        """How long ``tick`` has nothing to do, unless a process ends that the kernel tells of."""
        if self.hold is None:
            return max(0.0, self._again_s - self._now_s()) if self._again_s else None
        left_s = max(0.0, self.hold.until_s - self._now_s())
        return left_s if self.hold.process.file is not None else min(LOOK_S, left_s)

    def _renewed(self, hold: Hold) -> Hold:
        hold.until_s = self._now_s() + hold.lease_s
        return hold

    def _finish_journal(self) -> bool:
        if not self._journal.exists():
            self._well()
            return False
        self._put_back()
        say("what a killed process had set was put back")
        return True

    def _put_back(self, found: "Mapping[str, str] | None" = None) -> None:
        """Put back what was found, or what the journal says; nothing, where the machine has started anew since."""
        try:
            if found is None:
                entry = self._journal.read()
                found = {} if entry.is_of_before_a_reboot else entry.snapshot
            self.board.restore(found)
            self._journal.remove()
        except DeviceError as exc:
            self.trouble = str(exc)
            if self._tries < len(AGAIN_S):
                self._again_s = self._now_s() + AGAIN_S[self._tries]
                self._tries += 1
            raise
        self._well()

    def _well(self) -> None:
        self.trouble, self._tries, self._again_s = "", 0, 0.0


def say(text: str) -> None:
    """A line for the log, which is standard error."""
    print(f"underwatt-helper: {text}", file=sys.stderr, flush=True)
