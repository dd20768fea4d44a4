"""A command's streams over asyncssh: the event loop fills them, the caller's thread reads and writes."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from typing import Any

from sojourn.remote.asyncssh_loop import POLL_SECONDS, Loop
from sojourn.remote.connection import CommandRefused, ConnectionLost, OutputMark, connection_lost
from sojourn.remote.hosts import Host

WINDOW_BYTES = 16 << 20  # a download at 100 ms then reaches 160 MB/s
PACKET_BYTES = 1 << 17
_WRITE_BUFFER_BYTES = 4 << 20
STDERR_BYTES = 1 << 16


class _Shared:
    """What the event loop and the caller's thread share of one channel."""

    def __init__(self, keep_stderr: int | None) -> None:
        self.changed = threading.Condition()
        self.received: deque[bytes] = deque()
        self.received_bytes = 0
        self.stderr = bytearray()
        self.keep_stderr = keep_stderr
        self.paused_reading = False
        self.ended = False
        self.closed = False
        self.error: BaseException | None = None
        self.refused = ""
        self.exit_code: int | None = None
        self.unsent = 0
        self.writable = True


def new_session(keep_stderr: int | None) -> Any:
    """`opened` is done as soon as the box has opened the channel. asyncssh sends the command in the same step, so that
    what is written from then on follows it, without a wait for the box to say that the command runs."""
    import asyncssh

    # A class within the function, long as it is: its base is imported when a box is first spoken to.
    class Session(asyncssh.SSHClientSession[bytes]):
        def __init__(self) -> None:
            self.shared = _Shared(keep_stderr)
            self.channel: Any = None
            self.opened: asyncio.Future[Any] = Loop.get().create_future()

        def connection_made(self, chan: Any) -> None:
            self.channel = chan
            chan.set_write_buffer_limits(_WRITE_BUFFER_BYTES)
            if not self.opened.done():
                self.opened.set_result(chan)

        def data_received(self, data: bytes, datatype: int | None) -> None:
            shared = self.shared
            with shared.changed:
                if datatype is not None:
                    shared.stderr += data
                    if shared.keep_stderr is not None:
                        del shared.stderr[: -shared.keep_stderr]
                    return
                shared.received.append(data)
                shared.received_bytes += len(data)
                shared.changed.notify_all()
                if shared.received_bytes > WINDOW_BYTES and not shared.paused_reading:
                    shared.paused_reading = True
                    self.channel.pause_reading()

        def eof_received(self) -> bool:
            with self.shared.changed:
                self.shared.ended = True
                self.shared.changed.notify_all()
            return True

        def exit_status_received(self, status: int) -> None:
            self.shared.exit_code = status

        def exit_signal_received(self, signal: str, core_dumped: bool, msg: str, lang: str) -> None:
            self.shared.exit_code = -1
            self.shared.stderr += f"ended by signal {signal}".encode()

        def failed(self, error: Exception) -> None:
            if not self.opened.done():
                self.opened.set_exception(error)
            elif not self.shared.closed:
                self.shared.refused = str(error)
                self.connection_lost(error)

        def connection_lost(self, exc: BaseException | None) -> None:
            with self.shared.changed:
                self.shared.ended = self.shared.closed = True
                self.shared.error = self.shared.error or exc
                self.shared.changed.notify_all()

        def pause_writing(self) -> None:
            self.shared.writable = False

        def resume_writing(self) -> None:
            with self.shared.changed:
                self.shared.writable = True
                self.shared.changed.notify_all()

    return Session()


class Opening:
    """A channel that is being opened for a command; made in the event loop's thread."""

    def __init__(self, connection: Any, command: str, keep_stderr: int | None) -> None:
        self.connection, self.command, self.mark = connection, command, OutputMark()
        self.session = new_session(keep_stderr)
        # An error that nobody comes to see, because the whole connection failed, is not for asyncio to print.
        self.session.opened.add_done_callback(lambda opened: opened.cancelled() or opened.exception())
        self._task = asyncio.ensure_future(self._start())  # a task without a reference may vanish

    async def _start(self) -> None:
        try:
            await self.connection.create_session(
                lambda: self.session,
                self.mark.mark(self.command),
                encoding=None,
                window=WINDOW_BYTES,
                max_pktsize=PACKET_BYTES,
            )
        except Exception as error:
            self.session.failed(error)


class AsyncsshChannel:
    def __init__(self, host: Host, session: Any, mark: OutputMark | None) -> None:
        """`session`: of a channel that is open. `mark`: where the output of a command begins."""
        self._host, self._channel, self._mark = host, session.channel, mark
        self._shared: _Shared = session.shared
        self._rest = b""

    def read(self, most: int, deadline: float | None = None) -> bytes:
        while not self._rest:
            data = self._take(deadline)
            if not data:
                self._rest = self._mark.at_end() if self._mark else b""
                break
            self._rest = self._mark.strip(data) if self._mark else data
        part, self._rest = self._rest[:most], self._rest[most:]
        return part

    def _take(self, deadline: float | None) -> bytes:
        shared = self._shared
        with shared.changed:
            while not shared.received and not shared.ended:
                self._poll(deadline)
            data = b"".join(shared.received)
            shared.received.clear()
            shared.received_bytes = 0
            if shared.paused_reading:
                shared.paused_reading = False
                Loop.get().call_soon_threadsafe(self._channel.resume_reading)
        if not data and shared.closed and shared.exit_code is None:
            raise self._lost()
        return data

    def _poll(self, deadline: float | None) -> None:
        if deadline is not None and time.monotonic() > deadline:
            raise TimeoutError
        self._shared.changed.wait(POLL_SECONDS)

    def write(self, data: bytes) -> None:
        """Returns when at most a few MiB are not sent yet."""
        shared = self._shared
        with shared.changed:
            while (not shared.writable or shared.unsent > _WRITE_BUFFER_BYTES) and not shared.closed:
                self._poll(None)
            if shared.closed:
                raise self._lost()
            shared.unsent += len(data)
        Loop.get().call_soon_threadsafe(self._send, data)

    def _send(self, data: bytes) -> None:
        shared = self._shared
        with contextlib.suppress(OSError):  # the channel is closed: readers and the next write say so
            self._channel.write(data)
        with shared.changed:
            shared.unsent -= len(data)
            if shared.writable:
                shared.changed.notify_all()

    def write_eof(self) -> None:
        def send() -> None:
            with contextlib.suppress(OSError):
                self._channel.write_eof()

        Loop.get().call_soon_threadsafe(send)

    def exit_code(self, deadline: float | None = None) -> int:
        with self._shared.changed:
            while not self._shared.closed:
                self._poll(deadline)
        if self._shared.exit_code is None:
            raise self._lost()
        return self._shared.exit_code

    @property
    def stderr(self) -> bytes:
        return bytes(self._shared.stderr)

    def _lost(self) -> ConnectionLost | CommandRefused:
        if self._shared.refused:
            return CommandRefused(f"{self._host.name}: the box runs no command: {self._shared.refused}")
        return connection_lost(self._host, str(self._shared.error or self.stderr.decode(errors="replace").strip()))

    def close(self) -> None:
        with contextlib.suppress(Exception):
            Loop.get().call_soon_threadsafe(self._channel.abort)
