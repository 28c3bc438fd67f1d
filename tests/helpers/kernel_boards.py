"""Mounted boards that tests share: each is mounted when first asked for, and boots anew for each test."""

from __future__ import annotations

import os
import pickle
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from board_matrix import CELLS
from kernel_mount import Mount, mounted


class Boards:
    """Use as a context; all are unmounted at its end."""

    def __enter__(self) -> Boards:
        self._stack = ExitStack()
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="underwatt-boards-")))
        folder.chmod(0o755)  # a test may look as a user without rights
        self._folder = folder
        self._mounts: dict[tuple[str, str], Mount] = {}
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def board(self, name: str, release: str, *, awake: bool = True) -> Mount:
        """A board as after a start; ``awake``: something has used its GPU already."""
        cell = CELLS[name, release]
        if (name, release) not in self._mounts:
            mount = self._stack.enter_context(mounted(cell, self._folder / cell.name, faults=0.0))
            self._mounts[name, release] = mount
        mount = self._mounts[name, release]
        mount.tell("boot")
        if awake:
            mount.tell("use_gpu")
        return mount


def as_nobody(ask: Callable[[], Any]) -> Any:
    """The answer of a process of this user's without any right."""
    return as_user(ask, 65534, [65534])


def as_user(ask: Callable[[], Any], user: int, groups: Sequence[int]) -> Any:
    """The answer of a process of another user's."""
    here, there = os.pipe()
    child = os.fork()
    if child == 0:
        os.setgroups(groups)
        os.setgid(groups[0])
        os.setuid(user)
        try:
            answer = ask()
        except Exception as exc:  # noqa: BLE001 - handed to the test, whatever it is
            answer = exc
        os.write(there, pickle.dumps(answer))
        os._exit(0)
    os.close(there)
    with os.fdopen(here, "rb") as pipe:
        answer = pickle.loads(pipe.read())
    os.waitpid(child, 0)
    if isinstance(answer, Exception):
        raise answer
    return answer
