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
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from underwatt.errors import InputError
from underwatt.live.feed import Feed, LogReader
from underwatt.live.view import STATES
from underwatt.runlog.inbox import post_budget

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from prometheus_client.core import Metric
    from starlette.types import ASGIApp, Message, Receive, Scope, Send


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
    """Who may see the page: who has the token, by this machine's own host names, and no other site's scripts.

    Lets a request through to the page, or answers it with the reason why not.
    """

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


LONGEST_REQUEST = 1024
LONGEST_WAIT_S = 10.0
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_EXAMPLE = 'Send JSON such as {"budget": "7W"}.'


class _Pages:
    """What is answered to who may see the page of the run in a folder."""

    def __init__(self, feed: Feed, folder: Path) -> None:
        self._feed = feed
        self._folder = folder
        # Read once: what is not in the package cannot be asked for, whatever a path says.
        self._assets = {
            item.name: item.read_bytes()
            for item in resources.files("underwatt.live").joinpath("assets").iterdir()
            if item.name.endswith(tuple(_TYPES))
        }

    def app(self) -> Starlette:
        routes = {"/": self.index, "/assets/{name}": self.asset, "/state": self.state, "/metrics": self.metrics}
        found = [Route(path, answer) for path, answer in routes.items()]
        return Starlette(routes=[*found, Route("/budget", self.budget, methods=["POST"])])

    async def index(self, request: Request) -> Response:
        del request
        return self._asset("index.html")

    async def asset(self, request: Request) -> Response:
        return self._asset(request.path_params["name"])

    async def state(self, request: Request) -> Response:
        since = request.query_params.get("since", "0")
        found = self._feed.changes(int(since) if since.isdecimal() and len(since) < 16 else 0)
        return Response(status_code=204) if found is None else Response(found, media_type="application/json")

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
        self._feed.update()
        return JSONResponse({"asked": text}, 202)

    async def metrics(self, request: Request) -> Response:
        del request
        return Response(metrics_text(self._feed.facts()), headers={"Content-Type": CONTENT_TYPE_LATEST})

    def _asset(self, name: str) -> Response:
        found = self._assets.get(name)
        if found is None:
            return PlainTextResponse("There is no such page.\n", 404)
        return Response(found, media_type=_TYPES[name[name.rindex(".") :]])


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
    return JSONResponse({"error": error, "hint": hint}, status)


_GAUGES = {
    "power_w": ("underwatt_power_watts", "Mean power over the last second."),
    "budget_w": ("underwatt_budget_watts", "Power that the budget allows now."),
    "step_s": ("underwatt_step_seconds", "Time of a training step."),
    "batch_size": ("underwatt_batch_size", "Samples in a step."),
    "time_left_s": ("underwatt_time_left_seconds", "Time until the target is expected to be reached."),
    "score": ("underwatt_score", "Newest score of the model."),
    "target": ("underwatt_target_score", "Score at which the training is done."),
}
_COUNTERS = {
    "energy_j": ("underwatt_energy_joules", "Energy used by the run."),
    "samples": ("underwatt_samples", "Samples trained on."),
    "steps": ("underwatt_steps", "Steps trained."),
    "over_s": ("underwatt_over_budget_seconds", "Seconds in which mean power exceeded the budget by over 2%."),
    "at_s": ("underwatt_run_seconds", "Time since the run began, by the device's clock."),
}
_PHASES = ("waiting", "running", "ended", "gone")


class _Figures(Collector):
    def __init__(self, facts: dict[str, Any]) -> None:
        self._facts = facts

    def collect(self) -> Iterator[Metric]:
        """Every figure that is known."""
        facts = self._facts
        for family, named in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
            for field, (name, words) in named.items():
                if facts.get(field) is not None:
                    yield family(name, words, value=facts[field])
        yield _one_of("underwatt_state", "What the controller does.", "state", STATES, facts.get("state"))
        yield _one_of("underwatt_phase", "Whether the run goes on.", "phase", _PHASES, facts["phase"])
        if "job" in facts:
            labels = {name: str(facts[name]) for name in ("job", "device", "workload")}
            labels["simulated"] = "true" if facts["simulated"] else "false"
            yield InfoMetricFamily("underwatt_run", "Which run this is.", value=labels)


def metrics_text(facts: dict[str, Any]) -> bytes:
    """All figures in the Prometheus text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Figures(facts))
    return generate_latest(registry)


def _one_of(name: str, words: str, label: str, values: tuple[str, ...], now: str | None) -> Metric:
    family = GaugeMetricFamily(name, words, labels=[label])
    for value in values:
        family.add_metric([value], float(value == now))
    return family


HOST = "127.0.0.1"
CONNECTIONS = 256


class LiveServer:
    """Serves the page of the run in a folder; ``url`` holds the token, and nothing else shows it."""

    def __init__(self, folder: Path, port: int = 0) -> None:
        self.folder = folder
        self.token = secrets.token_urlsafe(32)
        self._socket = _listen(port)
        self.port = int(self._socket.getsockname()[1])
        self.feed = Feed(LogReader(folder / "log.jsonl"))
        app: Any = Guard(_Pages(self.feed, folder).app(), token=self.token, port=self.port)
        self._server = uvicorn.Server(
            uvicorn.Config(
                app,
                http="h11",
                ws="none",
                lifespan="off",
                access_log=False,  # it would show the token
                log_level="error",
                server_header=False,
                limit_concurrency=CONNECTIONS,
                timeout_keep_alive=30,  # a page asks each second, unless its machine is busy
                timeout_graceful_shutdown=2,
            )
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
