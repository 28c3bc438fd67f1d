"""Follows a run's log: its end first, so that the page is there at once, then its history, a piece at a time."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from underwatt.errors import InputError
from underwatt.report.live.view import RunView
from underwatt.run.log import follow

if TYPE_CHECKING:
    from pathlib import Path

PIECE_BYTES = 1 << 17  # some milliseconds of work, so that pages are served in between
TAIL_BYTES = 1 << 18  # some minutes
_LOOK_FOR_PROCESS_S = 2.0


class LogReader:
    """The view of one run, kept up to date by calling ``advance`` often."""

    def __init__(self, log: Path) -> None:
        self.view = RunView()
        self.error: str | None = None  # why the log cannot be read at the moment
        self.read_share = 1.0  # how much of the history is in the view
        self._log = log
        self._byte = 0
        self._history: RunView | None = None  # what becomes the view once everything is read
        self._looked_at_s = 0.0

    def open(self) -> None:
        """Read how a long log began and how it ends; a short one is left to ``advance``."""
        size = self._size()
        if size < 8 * TAIL_BYTES:
            return
        try:
            with self._log.open("rb") as file:
                head = file.readline()
                file.seek(size - TAIL_BYTES)
                file.readline()  # the line that the jump fell into
                tail_byte = file.tell()
            tail, _ = follow(self._log, tail_byte)
            first, _ = follow(self._log, 0, len(head))
        except (OSError, InputError):
            return  # ``advance`` meets it again, and says so
        for event in first + tail:
            self.view.apply(event)
        self._history, self.read_share = RunView(), 0.0

    def advance(self) -> bool:
        """Read the next piece; says whether there may be more of it right now."""
        building = self._history or self.view
        size, piece = self._size(), PIECE_BYTES
        try:
            events, byte = follow(self._log, self._byte, piece)
            while not events and size - byte > piece:  # one line is longer than that
                piece *= 2
                events, byte = follow(self._log, byte, piece)
            self.error = None
        except InputError as exc:
            self.error = str(exc)
            return False
        for event in events:
            if event["kind"] == "start" and building.facts["phase"] != "waiting":
                building = self._begin_anew()
            building.apply(event)
        more = bool(events) and byte < size
        self._byte = byte
        if self._history is not None:
            self.read_share = byte / size if size and more else 1.0
            if not more:
                self.view, self._history = self._history, None
        if not more:
            self._look_for_process()
        return more

    def quiet_s(self) -> float:
        """How long nothing was written to the log."""
        try:
            return max(0.0, time.time() - self._log.stat().st_mtime)
        except OSError:
            return 0.0

    def _begin_anew(self) -> RunView:
        """Another run was begun in the same folder."""
        self.view, self._history = RunView(), None
        return self.view

    def _size(self) -> int:
        try:
            return self._log.stat().st_size
        except OSError:
            return 0

    def _look_for_process(self) -> None:
        """A run that was killed cannot say so: its process is missing, and its log does not grow."""
        now = time.monotonic()
        pid = self.view.facts.get("pid")
        if self.view.facts["phase"] != "running" or now - self._looked_at_s < _LOOK_FOR_PROCESS_S or not pid:
            return
        self._looked_at_s = now
        if self.quiet_s() < _LOOK_FOR_PROCESS_S:
            return  # somebody writes it: the process may be one of another machine
        try:
            os.kill(pid, 0)
        except PermissionError:
            return  # alive, and somebody else's
        except (OSError, OverflowError, TypeError):
            self.view.lose()
