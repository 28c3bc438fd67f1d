"""What the server answers: the page and its assets, the stream of updates, a new budget, and the metrics."""

from __future__ import annotations

import asyncio
import contextlib
import json
from importlib import resources
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from underwatt.errors import InputError
from underwatt.report.live.metrics import CONTENT_TYPE, metrics_text
from underwatt.run.inbox import post_budget

if TYPE_CHECKING:
    from pathlib import Path

    from starlette.types import Receive, Scope, Send

    from underwatt.report.live.feed import Feed
    from underwatt.report.live.hub import Viewer

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
            for item in resources.files("underwatt.report.live").joinpath("assets").iterdir()
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
