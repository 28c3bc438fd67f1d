"""Between the log and the viewers: at most two updates a second, each of them only what changed."""

from __future__ import annotations

import asyncio
import json
import math
import os
import time
from typing import TYPE_CHECKING, Any

from underwatt.errors import InputError
from underwatt.events import Started
from underwatt.live.view import RunView
from underwatt.records import to_json
from underwatt.runlog.log import follow

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


# Follows a run's log: its end first, so that the page is there at once, then its history, a piece at a time.

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
            while byte == self._byte and size - byte > piece:  # one line is longer than that
                piece *= 2
                events, byte = follow(self._log, byte, piece)
            self.error = None
        except InputError as exc:
            self.error = str(exc)
            return False
        for event in events:
            if isinstance(event, Started) and building.facts["phase"] != "waiting":
                building = self._begin_anew()
            building.apply(event)
        more = byte != self._byte and byte < size
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


# Sends one message to many viewers: written once, queued for each, and a viewer that falls behind is let go.

VIEWERS = 100
BEHIND = 16  # messages; at two a second a viewer that lags eight seconds behind is better served by connecting again


def message(kind: str, number: int, content: Mapping[str, Any]) -> bytes:
    """A server-sent event; JSON has no line breaks of its own, so that one ``data`` line is enough."""
    try:
        text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    except ValueError:  # NaN is no JSON; rare enough to look for it only then
        text = json.dumps(to_json(content), separators=(",", ":"))
    return f"event: {kind}\nid: {number}\ndata: {text}\n\n".encode()


class Viewer:
    """One open page: messages wait here until its connection takes them."""

    def __init__(self) -> None:
        self._waiting: asyncio.Queue[bytes | None] = asyncio.Queue(BEHIND)
        self.gone = False

    def offer(self, text: bytes) -> bool:
        """Queue a message; ``False`` where the viewer is too far behind."""
        if self.gone or self._waiting.full():
            return False
        self._waiting.put_nowait(text)
        return True

    def drop(self) -> None:
        """Let go: what waits is forgotten, and the connection is to be closed."""
        self.gone = True
        while not self._waiting.empty():
            self._waiting.get_nowait()
        self._waiting.put_nowait(None)

    async def next(self) -> bytes | None:
        """The next message; ``None`` once the viewer was dropped."""
        return None if self.gone else await self._waiting.get()


class Hub:
    """All viewers; lives in the server's event loop."""

    def __init__(self, most: int = VIEWERS) -> None:
        self._viewers: set[Viewer] = set()
        self._most = most
        self._closed = False

    def __len__(self) -> int:
        return len(self._viewers)

    def join(self) -> Viewer | None:
        """A new viewer; ``None`` where there are as many as are served."""
        if self._closed or len(self._viewers) >= self._most:
            return None
        viewer = Viewer()
        self._viewers.add(viewer)
        return viewer

    def leave(self, viewer: Viewer) -> None:
        """Forget a viewer."""
        self._viewers.discard(viewer)

    def send(self, text: bytes) -> None:
        """To everybody; never waits for anybody."""
        for viewer in [viewer for viewer in self._viewers if not viewer.offer(text)]:
            viewer.drop()
            self._viewers.discard(viewer)

    def close(self) -> None:
        """Let everybody go, so that the server can end."""
        self._closed = True
        for viewer in self._viewers:
            viewer.drop()
        self._viewers.clear()


UPDATE_S = 0.5
HEARTBEAT_S = 5.0  # also finds connections whose other end is gone


class Feed:
    """Keeps the reader reading and the hub's viewers up to date."""

    def __init__(self, reader: LogReader, hub: Hub) -> None:
        self.reader = reader
        self.hub = hub
        self.number = 0
        self._sent_view: RunView | None = None
        self._sent_entry = 0
        self._sent_recent_s = self._sent_whole_s = -math.inf
        self._sent_width_s = 1.0
        self._sent_at_s = -math.inf
        self._snapshot: bytes | None = None

    async def run(self) -> None:
        """Follow the log until cancelled."""
        self.reader.open()
        while True:
            began_s = time.monotonic()
            before = self._mark()
            more = True
            while more and time.monotonic() - began_s < UPDATE_S:
                more = self.reader.advance()
                await asyncio.sleep(0)  # pages and budgets are served between the pieces
            if self._mark() != before or time.monotonic() - self._sent_at_s >= HEARTBEAT_S:
                self.publish()
            if not more:
                await asyncio.sleep(max(0.0, began_s + UPDATE_S - time.monotonic()))

    def publish(self) -> None:
        """Send what changed since the last time; everything where another view took its place."""
        self.number += 1
        self._snapshot = None
        view = self.reader.view
        if view is not self._sent_view:
            self._sent_view = view
            self.hub.send(self.snapshot())
        elif len(self.hub):
            self.hub.send(message("update", self.number, self._changes(view)))
        trace = view.trace
        self._sent_entry = view.entry_count
        self._sent_recent_s, self._sent_whole_s = trace.newest_s()
        self._sent_width_s = trace.width_s
        self._sent_at_s = time.monotonic()

    def snapshot(self) -> bytes:
        """All that a page needs to begin with, or to go on after its connection broke; written once an update."""
        if self._snapshot is None:
            view = self.reader.view
            content = {
                "facts": self.facts(),
                "recent": view.trace.recent(),
                "whole": {"width_s": view.trace.width_s, "rows": view.trace.whole()},
                "entries": list(view.entries),
            }
            self._snapshot = message("snapshot", self.number, content)
        return self._snapshot

    def facts(self) -> dict[str, Any]:
        """What the page's figures show."""
        reader = self.reader
        return reader.view.shown() | {
            "read_share": round(reader.read_share, 3),
            "quiet_s": round(reader.quiet_s(), 1),
            "log_error": reader.error,
        }

    def _changes(self, view: RunView) -> dict[str, Any]:
        trace = view.trace
        wider = trace.width_s != self._sent_width_s
        whole = trace.whole(-math.inf if wider else self._sent_whole_s)
        return {
            "facts": self.facts(),
            "recent": trace.recent(self._sent_recent_s),
            "whole": {"width_s": trace.width_s, "rows": whole},
            "entries": [entry for entry in view.entries if entry["number"] > self._sent_entry],
        }

    def _mark(self) -> tuple[object, ...]:
        """Changes whenever there is something to send."""
        view, reader = self.reader.view, self.reader
        facts = view.facts
        return (
            id(view),
            facts["at_s"],
            facts["phase"],
            view.entry_count,
            facts["asked"],
            reader.read_share,
            reader.error,
        )
