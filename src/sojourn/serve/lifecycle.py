"""Starting, ready, draining; and the time that a request may take, which a drain shortens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import anyio

from sojourn.serve.errors import ApiError

State = Literal["starting", "ready", "draining", "failed"]


class Lifecycle:
    """`request_seconds`: a request's time limit."""

    def __init__(self, request_seconds: float) -> None:
        self.state: State = "starting"
        self.started = time.time()
        self.reason = "the model is being loaded"
        self._request_seconds = request_seconds
        self._scopes: set[anyio.CancelScope] = set()
        self._drain_ends: float | None = None

    def check_ready(self) -> None:
        if self.state != "ready":
            code = {"starting": "starting", "draining": "draining"}.get(self.state, "engine_failed")
            raise ApiError(503, f"not ready: {self.reason}", code=code, retry_after=5)

    def drain(self, grace_seconds: float) -> None:
        """No new requests; those that run have so many seconds."""
        self.state, self.reason = "draining", "the server is shutting down"
        self._drain_ends = asyncio.get_running_loop().time() + grace_seconds
        for scope in self._scopes:
            scope.deadline = min(scope.deadline, self._drain_ends)

    @contextmanager
    def time_limit(self) -> Iterator[None]:
        """Raises ApiError 504 where the time is up, 503 where a drain ended it."""
        self.check_ready()
        with anyio.move_on_after(self._request_seconds) as scope:
            self._scopes.add(scope)
            try:
                yield
            finally:
                self._scopes.discard(scope)
        if scope.cancelled_caught:
            if self._drain_ends is not None:
                raise ApiError(503, "the server shut down before the answer was complete", code="draining")
            raise ApiError(504, f"not answered within {self._request_seconds:g} s", code="timeout")
