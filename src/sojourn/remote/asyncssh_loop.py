"""The event loop of asyncssh, in one background thread; callers wait in short polls so that Ctrl-C answers."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
POLL_SECONDS = 0.1  # on Windows a wait without a timeout cannot be interrupted


class Loop:
    """The event loop of all connections of this process."""

    _lock = threading.Lock()
    _loop: asyncio.AbstractEventLoop | None = None

    @classmethod
    def get(cls) -> asyncio.AbstractEventLoop:
        with cls._lock:
            if cls._loop is None:
                # asyncio warns for each packet that was still to be sent when a link broke; we say it once.
                logging.getLogger("asyncio").addFilter(lambda record: "socket.send() raised" not in record.getMessage())
                cls._loop = asyncio.SelectorEventLoop()
                threading.Thread(target=cls._loop.run_forever, name="ssh", daemon=True).start()
            return cls._loop


def wait(coroutine: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
    """Raises TimeoutError of concurrent.futures."""
    future = asyncio.run_coroutine_threadsafe(coroutine, Loop.get())
    deadline = None if timeout is None else time.monotonic() + timeout
    try:
        while True:
            try:
                return future.result(POLL_SECONDS)
            except concurrent.futures.TimeoutError:
                if future.done():
                    raise
                if deadline is not None and time.monotonic() > deadline:
                    raise
    finally:
        future.cancel()
