"""From the log to the page: the log is followed a piece at a time, and who asks gets only what changed."""

from __future__ import annotations

import asyncio
import json
import math
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from underwatt._files import open_plain
from underwatt.errors import InputError
from underwatt.events import Started
from underwatt.live.view import RunView
from underwatt.records import to_json
from underwatt.runlog.inbox import is_alive
from underwatt.runlog.line_files import LONGEST_LINE, recent_files, recent_folder
from underwatt.runlog.log import follow

if TYPE_CHECKING:
    from pathlib import Path

    from underwatt.events import Line

PIECE_BYTES = 1 << 17  # some milliseconds of work, so that pages are served in between
TAIL_BYTES = 1 << 18  # some minutes
_LOOK_FOR_PROCESS_S = 2.0
UPDATE_S = 0.5
HEARTBEAT_S = 5.0  # so often there is an update that says for how long the run has been silent
_KEEP_MARKS = 32  # updates; a page that is further behind gets everything


class LogReader:
    """The view of one run, kept up to date by calling ``advance`` often.

    Of a long log the end is read first, so that the page is there at once, then its history. What lasts of a run is in
    its log, and what it did in the last hour, by the second, in files beside that: these are read after it.
    """

    def __init__(self, log: Path) -> None:
        self.view = RunView()
        self.error: str | None = None  # why the log cannot be read at the moment
        self.read_share = 1.0  # how much of the history is in the view
        self._log = log
        self._byte = 0
        self._recent: Path | None = None  # the file of the last hour that is being read
        self._recent_byte = 0
        self._history: RunView | None = None  # what becomes the view once everything is read
        self._looked_at_s = 0.0

    def open(self) -> None:
        """Read how a long log began and how it ends; a short one is left to ``advance``."""
        size = _size(self._log)
        if size < 8 * TAIL_BYTES:
            return
        try:
            with open_plain(self._log) as file:
                head = file.readline(TAIL_BYTES)
                file.seek(size - TAIL_BYTES)
                file.readline(TAIL_BYTES)  # the line that the jump fell into
                tail_byte = file.tell()
            first, _ = follow(self._log, 0, len(head))
            tail, _ = follow(self._log, tail_byte)
            for path in recent_files(recent_folder(self._log))[-1:]:
                tail += follow(path)[0]
        except (OSError, InputError):
            return  # ``advance`` meets it again, and says so
        for event in first + tail:
            self.view.apply(event)
        self._history, self.read_share = RunView(), 0.0

    def advance(self) -> bool:
        """Read the next piece; says whether there may be more of it right now."""
        building = self._history or self.view
        size = _size(self._log)
        try:
            events, byte = _next(self._log, self._byte)
            more = byte != self._byte and byte < size
            for event in events:
                if isinstance(event, Started) and building.facts["phase"] != "waiting":  # another run in the folder
                    building, self._history, self._recent = RunView(), None, None
                    self.view = building
                building.apply(event)
            self._byte = byte
            if not more:
                more = self._advance_recent(building)
            self.error = None
        except InputError as exc:
            self.error = str(exc)
            return False
        if self._history is not None:
            self.read_share = min(byte / size, 0.999) if size and more else 1.0
            if not more:
                self.view, self._history = self._history, None
        if not more:
            self._look_for_process()
        return more

    def _advance_recent(self, building: RunView) -> bool:
        """The next piece of the last hour; the minute that the log does not have yet is in its last two files."""
        files = recent_files(recent_folder(self._log))
        if self._recent not in files:
            self._recent, self._recent_byte = next(iter(files[-2:]), None), 0
        if self._recent is None:
            return False
        events, byte = _next(self._recent, self._recent_byte)
        for event in events:
            building.apply(event)
        moved, self._recent_byte = byte != self._recent_byte, byte
        if not moved and self._recent != files[-1]:
            self._recent, self._recent_byte = files[files.index(self._recent) + 1], 0
            return True
        return moved

    def quiet_s(self) -> float:
        """How long nothing was written to the log."""
        try:
            return max(0.0, time.time() - self._log.stat().st_mtime)
        except OSError:
            return 0.0

    def _look_for_process(self) -> None:
        """A run that was killed cannot say so: its process is missing, and its log does not grow."""
        now = time.monotonic()
        pid = self.view.facts.get("pid")
        if self.view.facts["phase"] != "running" or now - self._looked_at_s < _LOOK_FOR_PROCESS_S or not pid:
            return
        self._looked_at_s = now
        # Where somebody writes it, the process may be one of another machine.
        if self.quiet_s() >= _LOOK_FOR_PROCESS_S and not is_alive(pid):
            self.view.lose()


def _next(path: Path, from_byte: int) -> tuple[list[Line | InputError], int]:
    """The next piece of a file, longer where one line is longer than that."""
    piece = PIECE_BYTES
    while True:
        events, byte = follow(path, from_byte, piece)
        if byte != from_byte or piece > LONGEST_LINE or _size(path) - byte <= piece:
            return events, byte
        piece *= 2


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


class _Mark(NamedTuple):
    """How far an update went: what came later is what changed since."""

    view: RunView
    entry: int
    recent_s: float
    whole_s: float
    width_s: float
    scores: tuple[int, int]
    course: tuple[int, int]

    @classmethod
    def of(cls, view: RunView) -> _Mark:
        trace = view.trace
        return cls(view, view.entry_count, *trace.newest_s(), trace.width_s, view.scores.mark, view.course.mark)


class Feed:
    """Keeps the reader reading, counts its updates, and answers what changed since any of the last ones."""

    def __init__(self, reader: LogReader) -> None:
        self.reader = reader
        self.number = 1
        self._marks = {self.number: _Mark.of(reader.view)}
        self._answers: dict[int, bytes] = {}  # of this update: fifty pages that ask cost one answer
        self._updated_at_s = -math.inf

    async def run(self) -> None:
        """Follow the log until cancelled."""
        self.reader.open()
        self.update()
        while True:
            began_s = time.monotonic()
            before = self._state()
            more = True
            while more and time.monotonic() - began_s < UPDATE_S:
                more = self.reader.advance()
                await asyncio.sleep(0)  # pages and budgets are served between the pieces
            if self._state() != before or time.monotonic() - self._updated_at_s >= HEARTBEAT_S:
                self.update()
            if not more:
                await asyncio.sleep(max(0.0, began_s + UPDATE_S - time.monotonic()))

    def update(self) -> None:
        """There is something new to tell."""
        self.number += 1
        self._marks[self.number] = _Mark.of(self.reader.view)
        self._marks.pop(self.number - _KEEP_MARKS, None)
        self._answers.clear()
        self._updated_at_s = time.monotonic()

    def changes(self, since: int) -> bytes | None:
        """JSON of what changed since an update, everything where too much did; ``None`` where nothing did."""
        if since == self.number:
            return None
        mark, view = self._marks.get(since), self.reader.view
        if mark is None or mark.view is not view:
            since, mark = 0, _Mark(view, 0, -math.inf, -math.inf, view.trace.width_s, (0, 0), (0, 0))
        if since not in self._answers:
            trace = view.trace
            content = {
                "number": self.number,
                "everything": since == 0,
                "facts": self.facts(),
                "recent": trace.recent(mark.recent_s),
                "width_s": trace.width_s,
                "whole": trace.whole(mark.whole_s if mark.width_s == trace.width_s else -math.inf),
                "scores": view.scores.since(mark.scores),
                "course": view.course.since(mark.course),
                "entries": [entry for entry in view.entries if entry["number"] > mark.entry],
            }
            self._answers[since] = json.dumps(to_json(content), separators=(",", ":")).encode()
        return self._answers[since]

    def facts(self) -> dict[str, Any]:
        """What the page's figures show."""
        reader = self.reader
        return reader.view.shown() | {
            "read_share": round(reader.read_share, 3),
            "quiet_s": round(reader.quiet_s(), 1),
            "log_error": reader.error,
        }

    def _state(self) -> tuple[object, ...]:
        """Changes whenever there is something to tell."""
        view, reader = self.reader.view, self.reader
        told = (view.facts["at_s"], view.facts["phase"], view.facts["asked"], view.entry_count)
        return id(view), *told, reader.read_share, reader.error
