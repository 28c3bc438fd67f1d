"""Sends one message to many viewers: written once, queued for each, and a viewer that falls behind is let go."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

from underwatt.records import to_json

if TYPE_CHECKING:
    from collections.abc import Mapping

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
