"""The files of a log: one that is only ever appended to, and beside it the last hour in pieces, of which old ones go.

Writing is buffered; what cannot be written is kept and tried again. A line cut short by ``kill -9`` is the last one of
its file: readers skip it, and whoever goes on with the file removes it.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from typing import TYPE_CHECKING

from underwatt._files import open_plain
from underwatt.errors import InputError
from underwatt.events import from_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from underwatt.events import Line

KEEP_BYTES = 4_000_000  # hours of what waits for the disk
LONGEST_LINE = 4_000_000  # what has no end after so many bytes is no line
PIECE_S = 1200.0  # of each file of the recent part
RECENT_S = 3600.0  # for which single readings are kept, at least


class LineFile:
    """Appends whole lines to a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lines: deque[bytes] = deque()
        self._size = 0
        self._file: int | None = None

    def add(self, line: bytes) -> None:
        """Have a line written by the next ``write``; the oldest are dropped where too many wait."""
        self._lines.append(line)
        self._size += len(line)
        while self._size > KEEP_BYTES and len(self._lines) > 1:
            self._size -= len(self._lines.popleft())

    def write(self, head: Callable[[bytes], bytes] = lambda _text: b"") -> None:
        """Append what waits; a file that is new, or was removed under us, begins with ``head`` of that text."""
        if not self._lines:
            return
        text = b"".join(self._lines)
        if self._file is not None and os.fstat(self._file).st_nlink == 0:  # the file was removed under us
            self.let_go()
        if self._file is None and self.open() == 0:
            text = head(text) + text
        assert self._file is not None
        try:
            written = 0
            while written < len(text):
                written += os.write(self._file, text[written:])
        except OSError:
            self.let_go()  # a full disk may have taken half a line: opening cuts it off
            raise
        self._lines.clear()
        self._size = 0

    def open(self) -> int:
        """Open for appending, without the torn last line that a killed run leaves; gives the length."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            length = _whole_lines(file)
            if length < os.fstat(file).st_size:
                os.ftruncate(file, length)
        except OSError:
            os.close(file)
            raise
        self._file = file
        return length

    def let_go(self) -> None:
        """Close the file; the next ``write`` opens it again."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _whole_lines(file: int) -> int:
    """Length of a file up to the end of its last whole line."""
    end = os.fstat(file).st_size
    while end > 0:
        begin = max(0, end - 65_536)
        at = os.pread(file, end - begin, begin).rfind(b"\n")
        if at >= 0:
            return begin + at + 1
        end = begin
    return 0


# The recent part: files that are numbered by time, in a folder beside the log.


class RecentLines:
    """Appends lines of the last hour, and lets older ones go."""

    def __init__(self, log: Path) -> None:
        self._folder = recent_folder(log)
        self._number = -1
        self._file = LineFile(self._folder)

    def add(self, line: bytes) -> None:
        """Have a line written by the next ``write``."""
        self._file.add(line)

    def write(self, now_s: float, keep_s: float = RECENT_S) -> None:
        """Append what waits to the file of this time, and remove those that are older than ``keep_s``."""
        number = max(self._number, int(max(now_s, 0.0) // PIECE_S))
        if number != self._number:
            self._file.let_go()
            self._file.path = self._folder / f"{number:06d}.jsonl"
            self._number = number
            for old in recent_files(self._folder):
                if (int(old.stem) + 1) * PIECE_S < now_s - keep_s:
                    with contextlib.suppress(OSError):
                        old.unlink()
        self._file.write()

    def clear(self) -> None:
        """Remove what another run has left here."""
        for old in recent_files(self._folder):
            with contextlib.suppress(OSError):
                old.unlink()

    def let_go(self) -> None:
        """Close the file."""
        self._file.let_go()


def recent_folder(log: Path) -> Path:
    """Where the recent part of a log lies."""
    return log.with_suffix(".recent")


def recent_files(folder: Path) -> list[Path]:
    """The files of the recent part, oldest first."""
    return sorted((path for path in folder.glob("*.jsonl") if path.stem.isdecimal()), key=lambda path: int(path.stem))


# Reading


def read_lines(path: Path) -> Iterator[Line | InputError]:
    """What each whole line of a file holds, or why it makes no sense; kinds that are not known are left out."""
    with open_plain(path) as file:
        number = 0
        while line := file.readline(LONGEST_LINE):
            number += 1
            if not line.endswith(b"\n") and len(line) < LONGEST_LINE:
                return  # torn, or not whole yet
            if (found := parsed(line, f"{path}, line {number}")) is not None:
                yield found


def parsed(line: bytes, where: str) -> Line | InputError | None:
    """What a line holds, or why it makes no sense; nothing where its kind is not known."""
    try:
        return from_line(line)
    except ValueError:
        return InputError(f"{where} is damaged.", hint="It is left out.")
    except InputError as exc:
        return InputError(f"{where} makes no sense: {exc.message}", hint="It is left out.")
