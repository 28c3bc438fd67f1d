"""Tell Underwatt, where it listens, of each training step: one file for Python 3.6 that never waits or raises.

``python -m underwatt.jobs.emitter > underwatt_beat.py`` copies it; call ``underwatt_beat.step()`` on one rank only.
"""

import atexit
import os
import pathlib
import time

FLUSH_S = 0.05  # steps quicker than this travel together, each with its own time
MOST_WAITING = 100  # so that one write stays under 4096 bytes, which Linux writes wholly or not at all
_waiting: "list[tuple[float, int]]" = []
_flushed_s, _pid, _fd = 0.0, 0, -1


def step(count: int = 1) -> None:
    """One more training step (or several) is complete."""
    if _is_heard():
        _waiting.append((time.monotonic(), count))
        if _waiting[-1][0] - _flushed_s >= FLUSH_S or len(_waiting) >= MOST_WAITING:
            _send()


def metric(value: float) -> None:
    """The model now scores this on held-out data."""
    _send(f"metric {value:.9g}\n")


def oom() -> None:
    """This batch size does not fit in memory."""
    _send("oom\n")


def _is_heard() -> bool:
    global _pid, _fd
    if os.getpid() != _pid:  # the first call, or a forked process: what waits there is its parent's to send
        _pid, _waiting[:] = os.getpid(), []
        try:
            _fd = os.open(os.environ["UNDERWATT_BEATS"], os.O_WRONLY | os.O_NONBLOCK)
        except (KeyError, OSError):
            _fd = -1
    return _fd >= 0


def _send(last: str = "") -> None:
    global _flushed_s
    if _is_heard():
        _flushed_s = time.monotonic()
        try:
            os.write(_fd, "".join([f"step {at_s:.6f} {count}\n" for at_s, count in _waiting] + [last]).encode())
            del _waiting[:]
        except OSError:  # the pipe is full, or nobody is there: keep the count, not each time
            _waiting[:] = [(_waiting[-1][0], sum(count for _, count in _waiting))] if _waiting else []


atexit.register(_send)
if __name__ == "__main__":
    print(pathlib.Path(__file__).read_text(), end="")
