"""Between the log and the viewers: at most two updates a second, each of them only what changed."""

from __future__ import annotations

import asyncio
import math
import time
from typing import TYPE_CHECKING, Any

from underwatt.report.live.hub import Hub, message

if TYPE_CHECKING:
    from underwatt.report.live.reader import LogReader
    from underwatt.report.live.view import RunView

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
