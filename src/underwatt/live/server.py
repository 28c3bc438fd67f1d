"""The server of the live page: a process beside the training, on this machine's loopback only."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import secrets
import socket
from http.cookies import CookieError, SimpleCookie
from importlib import resources
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from underwatt.errors import InputError
from underwatt.live.feed import Feed, Hub, LogReader
from underwatt.live.metrics import CONTENT_TYPE, metrics_text
from underwatt.runlog.inbox import post_budget

if TYPE_CHECKING:
    from pathlib import Path

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from underwatt.live.feed import Viewer


# Who may see the page: the token, this machine's own host names, and no other site's scripts.

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class Guard:
    """Lets a request through to the page, or answers it with the reason why not."""

    def __init__(self, app: ASGIApp, *, token: str, port: int) -> None:
        self._app = app
        self._token = token.encode()
        self._port = port
        self._hosts = {f"{name}:{port}" for name in ("127.0.0.1", "localhost", "[::1]")}
        self._cookie = f"underwatt_{port}"  # cookies do not tell ports apart: two runs, two names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        in_query = self._is_token(_query_token(scope))
        refusal = self._wrong_sender(headers) or self._wrong_token(headers, scope["method"], in_query=in_query)

        async def send_guarded(sent: Message) -> None:
            if sent["type"] == "http.response.start":
                added = MutableHeaders(scope=sent)
                for name, value in HEADERS.items():
                    added[name] = value
                if in_query and refusal is None:
                    words = f"{self._cookie}={self._token.decode()}; Path=/; HttpOnly; SameSite=Strict"
                    added.append("Set-Cookie", words)
            await send(sent)

        await (refusal or self._app)(scope, receive, send_guarded)

    def _wrong_sender(self, headers: Headers) -> PlainTextResponse | None:
        """Refuse names that are not this machine's (DNS rebinding) and pages of other sites."""
        hosts = headers.getlist("host")
        if len(hosts) != 1 or hosts[0].lower() not in self._hosts:
            return PlainTextResponse(
                "This page answers only as 127.0.0.1 or localhost, with its own port number.\n"
                f"From another machine, forward the same port: ssh -L {self._port}:127.0.0.1:{self._port} HOST\n",
                403,
            )
        origins = headers.getlist("origin")
        if origins and {origin.lower() for origin in origins} != {f"http://{hosts[0].lower()}"}:
            return PlainTextResponse("This page answers no other site.\n", 403)
        return None

    def _wrong_token(self, headers: Headers, method: str, *, in_query: bool) -> PlainTextResponse | None:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and self._is_token(given.strip()):
            return None
        if in_query and method in ("GET", "HEAD"):
            return None
        if self._is_token(_cookie(headers, self._cookie)):
            # A browser says where a change comes from; who does not is no page, and has to show the token itself.
            if method in ("GET", "HEAD") or "origin" in headers:
                return None
            return PlainTextResponse("A change must say from which site it comes.\n", 403)
        return PlainTextResponse(
            "This needs the token: open the address that `underwatt watch` printed.\n",
            401,
            {"WWW-Authenticate": "Bearer"},
        )

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(errors="replace"), self._token)


def _query_token(scope: Scope) -> str:
    try:
        found = parse_qs(scope["query_string"].decode("ascii"), max_num_fields=8).get("token", [])
    except ValueError:
        return ""
    return found[0] if len(found) == 1 else ""


def _cookie(headers: Headers, name: str) -> str:
    try:
        found = SimpleCookie("; ".join(headers.getlist("cookie"))).get(name)
    except CookieError:
        return ""
    return found.value if found else ""


# What the server answers: the page and its assets, the stream of updates, a new budget, and the metrics.

LONGEST_REQUEST = 1024
LONGEST_WAIT_S = 10.0
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_EXAMPLE = 'Send JSON such as {"budget": "7W"}.'


def make_app(feed: Feed, folder: Path) -> Starlette:
    """The page of the run in a folder; who may see it is decided in front of it."""
    pages = _Pages(feed, folder)
    return Starlette(
        routes=[
            Route("/", pages.index),
            Route("/assets/{name}", pages.asset),
            Route("/events", pages.events),
            Route("/budget", pages.budget, methods=["POST"]),
            Route("/metrics", pages.metrics),
        ]
    )


class _Pages:
    def __init__(self, feed: Feed, folder: Path) -> None:
        self._feed = feed
        self._folder = folder
        # Read once: what is not in the package cannot be asked for, whatever a path says.
        self._assets = {
            item.name: item.read_bytes()
            for item in resources.files("underwatt.live").joinpath("assets").iterdir()
            if item.name.endswith(tuple(_TYPES))
        }

    async def index(self, request: Request) -> Response:
        del request
        return self._asset("index.html")

    async def asset(self, request: Request) -> Response:
        return self._asset(request.path_params["name"])

    async def events(self, request: Request) -> Response:
        del request
        viewer = self._feed.hub.join()
        if viewer is None:
            return PlainTextResponse("Too many viewers; try again in a while.\n", 503, {"Retry-After": "10"})
        return _Stream(self._feed, viewer)

    async def budget(self, request: Request) -> Response:
        try:
            body = await asyncio.wait_for(_short_body(request), LONGEST_WAIT_S)
        except asyncio.TimeoutError:
            return _refused(408, "The request did not come to its end.", _EXAMPLE)
        if body is None:
            return _refused(413, "The request is too long for a budget.", _EXAMPLE)
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            return _refused(415, "A budget is sent as application/json.", _EXAMPLE)
        try:
            content = json.loads(body)
            text = content["budget"]
            if not isinstance(text, str):
                raise TypeError("no text")
        except (ValueError, TypeError, KeyError, RecursionError):
            return _refused(400, "The request holds no budget.", _EXAMPLE)
        view = self._feed.reader.view
        if view.facts["phase"] in ("ended", "gone"):
            return _refused(409, "The run has ended.", "Give the next one its budget when you start it.")
        try:
            await asyncio.to_thread(post_budget, self._folder, text, "page")
        except InputError as exc:
            return _refused(400, exc.message, exc.hint)
        view.ask(text)
        self._feed.publish()
        return JSONResponse({"asked": text}, 202)

    async def metrics(self, request: Request) -> Response:
        del request
        return Response(metrics_text(self._feed.facts), headers={"Content-Type": CONTENT_TYPE})

    def _asset(self, name: str) -> Response:
        found = self._assets.get(name)
        if found is None:
            return PlainTextResponse("There is no such page.\n", 404)
        return Response(found, media_type=_TYPES[name[name.rindex(".") :]])


class _Stream(Response):
    """Server-sent events until the viewer leaves or is let go."""

    def __init__(self, feed: Feed, viewer: Viewer) -> None:
        super().__init__(media_type="text/event-stream")
        del self.headers["content-length"]  # nobody knows
        self._feed = feed
        self._viewer = viewer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send everything there is, then every update."""
        del scope
        listening = asyncio.create_task(self._until_disconnected(receive))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await _send_part(send, b"retry: 2000\n\n" + self._feed.snapshot())
            while (text := await self._viewer.next()) is not None:
                await _send_part(send, text)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._feed.hub.leave(self._viewer)
            listening.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await listening

    async def _until_disconnected(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._viewer.drop()


async def _send_part(send: Send, text: bytes) -> None:
    await send({"type": "http.response.body", "body": text, "more_body": True})


async def _short_body(request: Request) -> bytes | None:
    """The body; ``None`` as soon as it is known to be too long, without reading the rest."""
    said = request.headers.get("content-length", "0")
    if not said.isdecimal() or int(said) > LONGEST_REQUEST:
        return None
    body = b""
    with contextlib.suppress(ClientDisconnect):
        async for part in request.stream():
            body += part
            if len(body) > LONGEST_REQUEST:
                return None
    return body


def _refused(status: int, error: str, hint: str) -> Response:
    content: dict[str, Any] = {"error": error, "hint": hint}
    return JSONResponse(content, status)


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
