"""An HTTP client that only keeps what comes, and when, and reads it when the load is over: one that reads each token
while others wait would measure itself."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from typing import Any

_TIMEOUT = 3600.0  # seconds


@dataclass(frozen=True)
class Address:
    """Of a server on this machine: a port, or the path of a socket."""

    port: int = 0
    path: str = ""


@dataclass
class Answer:
    """`status` 0: there was none. `pieces` of the body, with seconds since the request was sent."""

    status: int
    pieces: list[tuple[float, bytes]]
    seconds: float

    @property
    def body(self) -> bytes:
        return b"".join(data for _, data in self.pieces)


class _Exchange(asyncio.Protocol):
    """One request and what came back, in a connection of its own."""

    def __init__(self, request: bytes) -> None:
        self._request, self.began, self.received = request, 0.0, list[tuple[float, bytes]]()
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        self.began = time.perf_counter()
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.received.append((time.perf_counter(), data))

    def connection_lost(self, exc: Exception | None) -> None:
        if self.closed.done():
            return
        if exc is None:
            self.closed.set_result(None)
        else:
            self.closed.set_exception(exc)


class Sent:
    """A request whose answer has come whole, unread."""

    def __init__(self, exchange: _Exchange) -> None:
        self._began, self._received, self._ended = exchange.began, exchange.received, time.perf_counter()

    def read(self) -> Answer:
        import httptools

        answer = Answer(0, [], self._ended - self._began)
        came = 0.0

        class Reader:
            def on_body(self, body: bytes) -> None:
                answer.pieces.append((came - began, body))

        began, parser = self._began, httptools.HttpResponseParser(Reader())
        for came, data in self._received:  # noqa: B007 -- on_body reads it
            parser.feed_data(data)
        if self._received:
            answer.status = parser.get_status_code()
        return answer


async def post(server: Address, path: str, body: dict[str, Any]) -> Sent:
    """Raises OSError or asyncio.TimeoutError where the connection fails."""
    data, loop = json.dumps(body).encode(), asyncio.get_running_loop()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\n"
    request = f"{head}content-length: {len(data)}\r\n\r\n".encode() + data
    if server.path:
        transport, exchange = await loop.create_unix_connection(lambda: _Exchange(request), server.path)
    else:
        transport, exchange = await loop.create_connection(lambda: _Exchange(request), "127.0.0.1", server.port)
    try:
        await asyncio.wait_for(exchange.closed, _TIMEOUT)
    finally:
        transport.close()
    return Sent(exchange)
