"""Server-sent events. The status is sent with the first event, so that an error before it has its own status."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from starlette.responses import Response

from sojourn.serve.errors import ApiError

Write = Callable[[bytes], Awaitable[None]]
Message = MutableMapping[str, Any]

DONE = b"data: [DONE]\n\n"
_HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}


def event(body: dict[str, Any], name: str | None = None) -> bytes:
    data = json.dumps(body, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return (f"event: {name}\n" if name else "").encode() + b"data: " + data.encode("utf-8", "replace") + b"\n\n"


class TextEvents:
    """The events of a stream that have new text and nothing else: nearly all of them. Only the text is encoded anew."""

    def __init__(self, envelope: dict[str, Any], choice: dict[str, Any]) -> None:
        """`choice`: with TEXT where its text is, and INDEX for its index."""
        whole = event({**envelope, "choices": [choice]})
        self._head, rest = whole.split(_encode(INDEX))
        self._middle, self._tail = rest.split(_encode(TEXT))

    def __call__(self, index: int, text: str) -> bytes:
        return b"".join((self._head, b"%d" % index, self._middle, _encode(text), self._tail))


TEXT, INDEX = "\x00text", "\x00index"  # no name of a model has these


def _encode(text: str) -> bytes:
    return json.dumps(text, ensure_ascii=False).encode("utf-8", "replace")


class EventStream(Response):
    """`produce` writes the events; an ApiError of its becomes the last one. `error_name`: that event's name."""

    def __init__(self, produce: Callable[[Write], Awaitable[None]], error_name: str | None = None) -> None:
        super().__init__(headers=_HEADERS)
        del self.headers["content-length"]
        self._produce, self._error_name = produce, error_name

    async def __call__(self, scope: Message, receive: Any, send: Any) -> None:
        started = False

        async def write(data: bytes) -> None:
            nonlocal started
            if not started:
                started = True
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": data, "more_body": True})

        try:
            await self._produce(write)
        except ApiError as error:
            if not started:
                await error.response()(scope, receive, send)
                return
            scope["state"]["stream_error"] = error
            await write(event(error.body, self._error_name))
        await send({"type": "http.response.body", "body": b"", "more_body": False})
