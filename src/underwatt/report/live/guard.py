"""Who may see the page: the token, this machine's own host names, and no other site's scripts."""

from __future__ import annotations

import hmac
from http.cookies import CookieError, SimpleCookie
from typing import TYPE_CHECKING
from urllib.parse import parse_qs

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse

if TYPE_CHECKING:
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
