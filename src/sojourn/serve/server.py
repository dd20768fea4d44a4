"""uvicorn with what an open port needs: limits on slow headers, idle and many connections, and a graceful end.

SIGTERM and SIGINT drain: no new connections, running requests have the grace period, then the process ends with exit
code 0. A second SIGINT ends it at once. SIGHUP reloads the model, unless it came because the terminal was closed.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import threading
from asyncio import TimerHandle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from sojourn.errors import RunFailed, UserError
from sojourn.serve.app import make_app
from sojourn.serve.errors import ApiError
from sojourn.serve.gateway import Gateway
from sojourn.serve.request_log import RequestLog
from sojourn.serve.settings import Settings

_AFTER_GRACE = 2.0  # seconds for the last events to be sent


def _guarded(settings: Settings) -> type[HttpToolsProtocol]:
    # A class within the function, long as it is: uvicorn makes its instances, and knows nothing of `settings`.
    class Guarded(HttpToolsProtocol):
        """A connection whose headers must come in time and within their size."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._in_headers, self._header_bytes = True, 0
            self._header_timer: TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            if len(self.connections) > settings.max_connections:
                transport.close()
            else:
                self._arm()

        def connection_lost(self, exc: Exception | None) -> None:
            self._disarm()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.parser is None or self.transport.is_closing():
                return
            if self._in_headers:
                self._header_bytes += len(data)
                if self._header_bytes > settings.max_header_bytes:
                    self._refuse(431, f"the headers are larger than {settings.max_header_bytes:,} bytes")
                    return
            if self._in_headers or self.cycle is None or self.cycle.response_complete:
                self._arm()

        def on_message_begin(self) -> None:
            self._in_headers, self._header_bytes = True, 0
            super().on_message_begin()

        def on_headers_complete(self) -> None:
            self._in_headers = False
            self._disarm()
            super().on_headers_complete()

        def send_400_response(self, msg: str) -> None:
            self._refuse(400, msg)

        def _refuse(self, status: int, message: str) -> None:
            body = json.dumps(ApiError(status, message).body).encode()
            head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
            self.transport.write(STATUS_LINE[status] + head + body)
            self.transport.close()

        def _arm(self) -> None:
            if self._header_timer is None:
                self._header_timer = self.loop.call_later(settings.header_seconds, self._too_slow)

        def _disarm(self) -> None:
            if self._header_timer is not None:
                self._header_timer.cancel()
                self._header_timer = None

        def _too_slow(self) -> None:
            self._header_timer = None
            if not self.transport.is_closing():
                self.transport.close()

    return Guarded


class _LogHandler(logging.Handler):
    def __init__(self, log: RequestLog) -> None:
        super().__init__(logging.WARNING)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, BaseException):
            self._log.failed("server", error, message=record.getMessage().strip())
        else:
            self._log.write("server", message=record.getMessage().strip())


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True


class Server(uvicorn.Server):
    """`on_listening`: called when connections are accepted."""

    def __init__(self, gateway: Gateway, on_listening: Callable[[], None] = lambda: None) -> None:
        self.gateway, self._on_listening = gateway, on_listening
        settings = gateway.settings
        logger = logging.getLogger("uvicorn.error")
        logger.handlers, logger.propagate = [_LogHandler(gateway.log)], False
        logger.setLevel(logging.ERROR)
        super().__init__(
            uvicorn.Config(
                make_app(gateway),
                http=_guarded(settings), ws="none", lifespan="on", log_config=None, access_log=False,
                server_header=False, timeout_keep_alive=int(settings.keep_alive_seconds), backlog=1024,
                timeout_graceful_shutdown=int(settings.grace_seconds + _AFTER_GRACE),
            )
        )  # fmt: skip
        self._loop: asyncio.AbstractEventLoop | None = None
        self._has_terminal = _has_terminal()

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().serve(sockets)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_listening()

    async def on_tick(self, counter: int) -> bool:
        return await super().on_tick(counter) or self.gateway.lifecycle.state == "failed"

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Ours, without uvicorn's raising them again at the end."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        handlers: dict[int, Any] = {signal.SIGINT: self.handle_exit, signal.SIGTERM: self.handle_exit}
        if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup ignores it
            handlers[signal.SIGHUP] = self._on_hangup
        before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: Any) -> None:
        if self.should_exit and sig == signal.SIGINT:
            self.force_exit = True
        elif self._loop is not None:
            self._loop.call_soon_threadsafe(self.drain)

    def drain(self) -> None:
        """In the loop's thread."""
        if not self.should_exit:
            self.gateway.log.write("draining", sequences=self.gateway.taken)
            self.gateway.lifecycle.drain(self.gateway.settings.grace_seconds)
            self.should_exit = True

    def _on_hangup(self, sig: int, frame: Any) -> None:
        if self._has_terminal and not _has_terminal():  # it was closed: nobody asked for a reload
            self.handle_exit(sig, frame)
        elif self._loop is not None:
            self._loop.call_soon_threadsafe(lambda: asyncio.ensure_future(self._reload()))

    async def _reload(self) -> None:
        log = self.gateway.log
        for one in self.gateway.deployments:
            try:
                log.write("reloaded", path=str(await one.reload()), model=one.name)
            except ApiError as error:
                log.write("reload_failed", error=error.message, model=one.name)
            except Exception as error:
                log.failed("reload_failed", error, model=one.name)


def run_server(gateway: Gateway, listening: socket.socket, on_listening: Callable[[], None]) -> None:
    """Until a signal ends it. Raises what kept the model from starting."""
    server = Server(gateway, on_listening)
    server.run([listening])
    failure = gateway.failure
    if isinstance(failure, UserError):
        raise failure
    if failure is not None:
        raise RunFailed(f"the engine did not start: {failure}") from failure
