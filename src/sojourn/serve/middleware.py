"""What every request passes before its route: a name for the log, Host and Origin, the API key, the body within its
limits. It ends a request whose client goes away, and logs and counts each."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import urlsplit

import anyio

from sojourn.serve.auth import ApiKey
from sojourn.serve.errors import CLIENT_CLOSED, ApiError
from sojourn.serve.gateway import Gateway, Record
from sojourn.web.address import is_loopback

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN = ("/health",)
_READS = ("GET", "HEAD", "OPTIONS")


class Entrance:
    def __init__(self, app: App, gateway: Gateway) -> None:
        self._app, self._gateway = app, gateway
        self._local = is_loopback(gateway.settings.host)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        await _Visit(self._app, self._gateway, self._local, scope, receive, send).run()


class _Visit:
    """One request."""

    def __init__(
        self, app: App, gateway: Gateway, local: bool, scope: Scope, receive: Receive, send: Send
    ) -> None:  # fmt: skip
        self._app, self._gateway, self._local, self._scope = app, gateway, local, scope
        self._receive, self._raw_send = receive, send
        self._headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        self._id, self._start, self._status, self._done = secrets.token_hex(12), time.monotonic(), 0, False
        self._record: Record | None = None
        self._held = 0

    async def run(self) -> None:
        self._scope.setdefault("state", {})
        try:
            self._check_address()
            key = self._authenticate()
            self._record = self._scope["state"]["record"] = Record(self._id, key)
            body = await self._read_body()
            await self._answer(body)
        except ApiError as error:
            await error.response()(self._scope, self._receive, self._send)
        except Exception as error:
            self._gateway.log.failed("internal_error", error, id=self._id, route=self._route)
            if not self._status:
                found = ApiError(500, "an internal error; the server's log has it", code="internal_error")
                await found.response()(self._scope, self._receive, self._send)
            else:
                raise
        finally:
            self._gateway.body_bytes -= self._held
            self._log()

    # -- Checks --

    def _check_address(self) -> None:
        """A web page elsewhere must not reach a server on this machine: neither through a name that it has resolved to
        it (DNS rebinding), nor by sending a form to it."""
        settings = self._gateway.settings
        host = _hostname("//" + self._headers["host"]) if "host" in self._headers else None
        if self._local and host is not None and not is_loopback(host) and host not in settings.hosts:
            message = f"the Host header {host[:100]!r} is not this machine; allow it with --allowed-host"
            raise ApiError(403, message, code="host_not_allowed")
        origin = self._headers.get("origin")
        if origin is None or self._scope["method"] in _READS or origin in settings.origins or "*" in settings.origins:
            return
        if origin.partition("://")[2] != self._headers.get("host"):
            raise ApiError(403, f"the origin {origin[:100]!r} is not allowed; see --cors-origin", code="origin")

    def _authenticate(self) -> ApiKey:
        path = self._scope["path"]
        key = self._gateway.keys.find(self._headers.get("authorization"))
        if key is not None:
            return key
        if path in OPEN:
            return ApiKey("nobody", b"")
        is_page = self._scope["method"] in ("GET", "HEAD") and not path.startswith("/v1")
        scheme = 'Basic realm="sojourn: the API key as password"' if is_page else "Bearer"
        missing = "authorization" not in self._headers
        message = "an API key is needed: Authorization: Bearer KEY" if missing else "incorrect API key"
        raise ApiError(401, message, code="invalid_api_key", headers={"www-authenticate": scheme})

    async def _read_body(self) -> bytes:
        """All of it, before anything else is done: a slow or endless body holds no slot."""
        if self._scope["method"] in _READS:
            return b""
        most, length = self._gateway.settings.max_body_bytes, self._headers.get("content-length", "0")
        too_large = ApiError(
            413, f"the body is larger than {most:,} bytes", code="body_too_large", headers={"connection": "close"}
        )
        if not (length.isascii() and length.isdigit()) or int(length[:20]) > most:
            raise too_large
        chunks, size = [], 0
        with anyio.move_on_after(self._gateway.settings.body_seconds):
            while True:
                message = await self._receive()
                if message["type"] == "http.disconnect":
                    self._status = CLIENT_CLOSED
                    raise ApiError(CLIENT_CLOSED, "the client went away")
                chunks.append(message.get("body", b""))
                size += len(chunks[-1])
                self._hold(len(chunks[-1]))
                if size > most:
                    raise too_large
                if not message.get("more_body", False):
                    return b"".join(chunks)
        raise ApiError(408, "the body did not come in time", code="body_timeout", headers={"connection": "close"})

    def _hold(self, size: int) -> None:
        """Memory for bodies is bounded, however many come at a time."""
        self._held += size
        self._gateway.body_bytes += size
        if self._gateway.body_bytes > self._gateway.settings.max_all_bodies_bytes:
            raise ApiError(
                429, "too many large bodies at a time; try again later", code="server_overloaded", retry_after=5,
                headers={"connection": "close"},
            )  # fmt: skip

    # -- The answer --

    async def _answer(self, body: bytes) -> None:
        """Until it is complete or the client goes away, whichever is first."""
        given = False
        gone = anyio.Event()

        async def receive() -> MutableMapping[str, Any]:
            nonlocal given
            if not given:
                given = True
                return {"type": "http.request", "body": body, "more_body": False}
            await gone.wait()
            return {"type": "http.disconnect"}

        async def watch() -> None:
            while (await self._receive())["type"] != "http.disconnect":
                pass
            if not self._done:
                self._status = CLIENT_CLOSED
                gone.set()
                running.cancel()

        with anyio.CancelScope() as running:
            watching = asyncio.create_task(watch())
            try:
                await self._app(self._scope, receive, self._send)
            finally:
                watching.cancel()

    async def _send(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self._status = self._status or message["status"]
            message.setdefault("headers", [])
            message["headers"] = [*message["headers"], (b"x-request-id", self._id.encode())]
        elif message["type"] == "http.response.body" and not message.get("more_body", False):
            self._done = True
        if self._status != CLIENT_CLOSED:
            await self._raw_send(message)

    # -- Afterwards --

    @property
    def _route(self) -> str:
        """The route's own path: a made-up one must not become a label of its own."""
        route = self._scope.get("route")
        return f"{self._scope['method']} {getattr(route, 'path', None) or 'other'}"[:100]

    def _log(self) -> None:
        state, record = self._scope["state"], self._record
        error = state.get("stream_error")
        status = error.status if error is not None else self._status
        self._gateway.metrics.requests[self._route, status] += 1
        path = self._scope["path"]
        if path in ("/health", "/metrics"):  # asked every few seconds
            return
        used = (
            {} if record is None else {name: value for name, value in vars(record).items() if name not in ("id", "key")}
        )
        client, seconds = self._scope.get("client"), round(time.monotonic() - self._start, 4)
        self._gateway.log.write(
            "request", id=self._id, client=client[0] if client else None, key=record.key.name if record else None,
            method=self._scope["method"], path=path[:200], status=status, seconds=seconds,
            **used,
        )  # fmt: skip


def _hostname(address: str) -> str:
    try:
        return urlsplit(address).hostname or ""
    except ValueError:
        return ""
