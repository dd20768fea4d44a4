"""What every request passes before its route.

On this machine anybody may look; actions need the token of the page, which another web page cannot read. Where others
can reach the board, everything but /health needs the token that the start line shows. A Host header with another name
is refused (DNS rebinding), and so is a form of another origin.
"""

from __future__ import annotations

import hmac
import json
import traceback
from collections.abc import Awaitable, Callable, MutableMapping
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qs, urlsplit

from sojourn.board.chinese import localized
from sojourn.web.address import is_loopback

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

COOKIE = "sojourn-board"
HEADER = "x-sojourn-token"
MOST_BODY = 1 << 20
MOST_UPLOAD = 4 << 30
_READS = ("GET", "HEAD")
_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
)


class Guard:
    """`local`: only this machine can reach it. `hosts`: further names of this machine."""

    def __init__(self, app: App, token: str, local: bool, hosts: tuple[str, ...] = ()) -> None:
        self._app, self._token, self._local, self._hosts = app, token, local, hosts

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        refusal = self._refusal(scope, headers)
        if refusal is not None:
            status, message = refusal
            await _answer(send, status, localized(message, headers.get("accept-language", "")))
            return
        if not self._local and scope["path"] == "/" and self._matches(_token_in_address(scope)):
            await _answer(send, 303, "", ((b"location", b"/"), (b"set-cookie", self._cookie())))
            return
        try:
            await self._app(scope, receive, _with_headers(send))
        except Exception:  # the page has got a 500 by now
            traceback.print_exc()

    def _refusal(self, scope: Message, headers: dict[str, str]) -> tuple[int, str] | None:
        host = _hostname(headers.get("host", ""))
        if self._local and not (is_loopback(host) or host in self._hosts):
            return 403, f"the Host header {host[:100]!r} is not this machine"
        if scope["path"] == "/health":
            return None
        if not self._local and not self._knows_token(scope, headers):
            return 401, "open the address that `sojourn board` has printed, with its token"
        if scope["method"] in _READS:
            return None
        origin = headers.get("origin")
        if origin is not None and origin.partition("://")[2] != headers.get("host"):
            return 403, f"the origin {origin[:100]!r} is not allowed"
        if not self._matches(headers.get(HEADER, "")):
            return 403, "the page is of an earlier start of the board; load it again"
        length = headers.get("content-length", "0")
        most = MOST_UPLOAD if scope["path"] == "/api/upload" else MOST_BODY
        if not (length.isascii() and length.isdigit()) or int(length[:20]) > most:
            return 413, f"the body is larger than {most:,} bytes"
        return None

    def _knows_token(self, scope: Message, headers: dict[str, str]) -> bool:
        try:
            cookie = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
        except CookieError:
            cookie = None
        bearer = headers.get("authorization", "").removeprefix("Bearer ")
        given = (cookie.value if cookie is not None else "", bearer, _token_in_address(scope))
        return any(self._matches(one) for one in given)

    def _matches(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self._token.encode())

    def _cookie(self) -> bytes:
        return f"{COOKIE}={self._token}; HttpOnly; SameSite=Strict; Path=/".encode()


def _token_in_address(scope: Message) -> str:
    query = parse_qs(scope.get("query_string", b"").decode("latin-1"))
    return query.get("token", [""])[0] if scope["path"] == "/" else ""


def _hostname(host: str) -> str:
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _with_headers(send: Send) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            names = {name for name, _ in message.get("headers", ())}
            message["headers"] = [*message.get("headers", ()), *(one for one in _HEADERS if one[0] not in names)]
        await send(message)

    return sending


async def _answer(send: Send, status: int, error: str, headers: tuple[tuple[bytes, bytes], ...] = ()) -> None:
    body = json.dumps({"error": error}).encode() if error else b""
    about = ((b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()))
    await send({"type": "http.response.start", "status": status, "headers": [*about, *_HEADERS, *headers]})
    await send({"type": "http.response.body", "body": body})
