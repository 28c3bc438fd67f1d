"""Processes to be killed, each a fork of one that has imported everything already: a start takes milliseconds."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType

BEGUN = "begun"


def serve(work: Callable[[str], None]) -> None:
    """In the script: do ``work`` in a new process for each line that comes in, one after the other.

    ``work`` calls ``begun`` when it may be killed.
    """
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            work(line.strip())
            os._exit(0)
        _, status = os.waitpid(child, 0)
        print("ended", -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status), flush=True)


def begun() -> None:
    """From now on this process may be killed."""
    print(BEGUN, os.getpid(), flush=True)


class Killable:
    """In the test: a script that calls ``serve``."""

    def __init__(self, script: Path) -> None:
        self._script = script
        self._begun = 0  # the process that has begun and was not waited for

    def __enter__(self) -> Killable:
        self._server = subprocess.Popen(
            [sys.executable, str(self._script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self._begun:  # it would be waited for for ever
            self.kill(self._begun)
        with self._server:
            assert self._server.stdin is not None
            self._server.stdin.close()

    def start(self, argument: str) -> int:
        """Start one; its process, once it has begun."""
        assert self._server.stdin is not None
        self._server.stdin.write(f"{argument}\n")
        self._server.stdin.flush()
        word, number = self._read()
        assert word == BEGUN, f"it ended with {number}"
        self._begun = number
        return number

    def kill(self, process: int) -> int:
        """Kill it, as the kernel does when memory runs out; how it ended, which may have been by itself before."""
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
        return self.wait()

    def wait(self) -> int:
        """Wait for its end: 0 where all went well, -9 where it was killed."""
        while True:
            word, number = self._read()
            if word == "ended":
                self._begun = 0
                return number

    def _read(self) -> tuple[str, int]:
        assert self._server.stdout is not None
        word, number = self._server.stdout.readline().split()
        return word, int(number)
