"""The server of the live page: a process beside the training, on this machine's loopback only."""

from __future__ import annotations

import asyncio
import secrets
import socket
from typing import TYPE_CHECKING, Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from underwatt.errors import InputError
from underwatt.report.live.feed import Feed
from underwatt.report.live.guard import Guard
from underwatt.report.live.hub import Hub
from underwatt.report.live.page import make_app
from underwatt.report.live.reader import LogReader

if TYPE_CHECKING:
    from pathlib import Path

HOST = "127.0.0.1"
STUCK_S = 10.0  # a client that takes nothing, or asks for nothing, for this long is cut off
CONNECTIONS = 256
_KERNEL_BUFFER = 1 << 16  # what the kernel may hold for a client that does not read


class _Connection(H11Protocol):
    """A connection that is cut off when its other end stops reading, or never asks: neither may hold memory.

    Two clocks: who keeps sending still has to read, and who begins another request has to end it.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._asking, self._reading = (_Patience(self.loop, transport) for _ in range(2))
        self._asking.start()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete:  # a request has begun, and is not whole yet
            self._asking.start()
        else:
            self._asking.stop()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._reading.start()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._reading.stop()

    def connection_lost(self, exc: Exception | None) -> None:
        self._asking.stop()
        self._reading.stop()
        super().connection_lost(exc)


class _Patience:
    """Aborts a connection unless it is stopped in time; starting it again gives no more time."""

    def __init__(self, loop: asyncio.AbstractEventLoop, transport: asyncio.Transport) -> None:
        self._loop, self._transport = loop, transport
        self._end: asyncio.TimerHandle | None = None

    def start(self) -> None:
        if self._end is None:
            self._end = self._loop.call_later(STUCK_S, self._transport.abort)

    def stop(self) -> None:
        if self._end is not None:
            self._end.cancel()
            self._end = None


class _Server(uvicorn.Server):
    """Lets the viewers go when it is asked to end: their streams have no end of their own."""

    def __init__(self, config: uvicorn.Config, hub: Hub) -> None:
        super().__init__(config)
        self._hub = hub

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._hub.close()
        await super().shutdown(sockets)


class LiveServer:
    """Serves the page of the run in a folder; ``url`` holds the token, and nothing else shows it."""

    def __init__(self, folder: Path, port: int = 0) -> None:
        self.folder = folder
        self.token = secrets.token_urlsafe(32)
        self._socket = _listen(port)
        self.port = int(self._socket.getsockname()[1])
        self.feed = Feed(LogReader(folder / "log.jsonl"), Hub())
        app: Any = Guard(make_app(self.feed, folder), token=self.token, port=self.port)
        self._server = _Server(
            uvicorn.Config(
                app,
                http=_Connection,
                ws="none",
                lifespan="off",
                access_log=False,  # it would show the token
                log_level="error",
                server_header=False,
                limit_concurrency=CONNECTIONS,
                timeout_keep_alive=5,
                timeout_graceful_shutdown=2,
            ),
            self.feed.hub,
        )

    @property
    def url(self) -> str:
        """The address for a browser, with the token."""
        return f"http://{HOST}:{self.port}/?token={self.token}"

    def run(self) -> None:
        """Serve until asked to end; Ctrl-C comes out as ``KeyboardInterrupt``."""
        asyncio.run(self._serve())

    def stop(self) -> None:
        """Ask a running server to end; any thread may."""
        self._server.should_exit = True

    async def _serve(self) -> None:
        feeding = asyncio.create_task(self.feed.run())
        feeding.add_done_callback(lambda _: self.stop())  # without its feed the page would stand still and not say so
        try:
            await self._server.serve(sockets=[self._socket])
        finally:
            feeding.cancel()
        if feeding.done():
            feeding.result()  # raises what ended it


def _listen(port: int) -> socket.socket:
    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _KERNEL_BUFFER)  # connections inherit it
    try:
        listening.bind((HOST, port))
        listening.listen(CONNECTIONS)  # the address is printed before the server is up: who is quick waits
    except (OSError, OverflowError) as exc:
        listening.close()
        raise InputError(
            f"The port {port} cannot be used ({exc.strerror if isinstance(exc, OSError) else exc}).",
            hint="Leave --port out to get a free one.",
        ) from exc
    return listening
