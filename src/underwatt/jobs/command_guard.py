"""The process between Underwatt and a job: whatever happens to Underwatt, the job and all it started are ended.

Started as ``COMMAND LIFELINE GRACE_S`` and the job's words, with a pipe whose other end Underwatt holds. When that end
closes, because Underwatt asked or because it was killed, every descendant gets SIGTERM, and SIGKILL after the grace
time. When the job ends by itself, what it left behind is ended the same way. Needs only the standard library, and is
run by its path, so that it starts in a few hundredths of a second.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

COMMAND = (sys.executable, "-I", "-S", __file__)  # as it is started, without site packages
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
NOT_FOUND = 127


def main(lifeline: int, grace_s: float, command: list[str]) -> int:
    """Run the command until it ends or the lifeline closes; returns its exit code, 128 + n for signal n."""
    libc = ctypes.CDLL(None, use_errno=True)
    # Daemonised grandchildren become children of this process, so that none can get away.
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for ignored in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(ignored, lambda *_: None)  # a handler, not SIG_IGN, which the job would inherit
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    try:
        job = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            # Safe here, in a process of one thread: should this guard be killed, the job is too.
            preexec_fn=lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0),
        )
    except OSError as exc:
        print(f"{command[0]}: {exc.strerror}", file=sys.stderr)
        return NOT_FOUND
    while job.poll() is None:
        ready, _, _ = select.select([lifeline, wake_read], [], [])
        if lifeline in ready:
            break
        os.read(wake_read, 4096)
    end_all(grace_s, job)
    with contextlib.suppress(OSError):  # pipes that nobody else removes where Underwatt was killed
        for variable in ("UNDERWATT_BEATS", "UNDERWATT_ANSWERS"):
            Path(os.environ[variable]).unlink()
        Path(os.environ["UNDERWATT_BEATS"]).parent.rmdir()
    code = job.wait()
    return 128 - code if code < 0 else code


def end_all(grace_s: float, job: subprocess.Popen[bytes]) -> None:
    """End every descendant: politely, then not; new ones that appear meanwhile too."""
    deadline_s = time.monotonic() + grace_s
    asked: set[int] = set()
    while alive := descendants(os.getpid()):
        force = time.monotonic() >= deadline_s
        for pid in alive:
            if force or pid not in asked:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL if force else signal.SIGTERM)
                asked.add(pid)
        time.sleep(0.01)
        job.poll()  # collected through its Popen, which keeps the exit code
        for pid in set(alive) - {job.pid}:
            with contextlib.suppress(ChildProcessError):  # not adopted: its parent collects it
                os.waitpid(pid, os.WNOHANG)


def descendants(pid: int) -> list[int]:
    """All processes below this one, from one look at the process table."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, ValueError):  # a process may end while it is looked at
                # The name, in brackets, may hold anything; the state and the parent follow it.
                state_and_parent = (entry / "stat").read_text().rpartition(")")[2].split()
                children.setdefault(int(state_and_parent[1]), []).append(int(entry.name))
    found: list[int] = []
    todo = [pid]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]))
