"""A slow or broken network: a TCP proxy with delay, bandwidth, loss as TCP shows it, and cuts.

Loss is what a TCP connection makes of it: a stall of one round trip for the retransmission, and a window that halves.
As a program (for benchmarks, so that it has a core of its own): python tests/slow_link.py ADDRESS PORT DELAY_SECONDS
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import sys
import threading
from collections.abc import Coroutine, Iterator
from typing import Any

_SEGMENT = 1448
_BUFFER_BYTES = 64 << 20


class SlowLink:
    """`delay`: seconds each way; `rate`: bytes per second each way; `loss`: share of the segments;
    `cut_every`: all connections are reset whenever so many bytes were carried."""

    def __init__(
        self,
        address: str,
        port: int,
        delay: float = 0.0,
        rate: float | None = None,
        loss: float = 0.0,
        cut_every: int | None = None,
        seed: int = 0,
    ) -> None:
        self.address, self.port, self.delay, self.rate, self.loss = address, port, delay, rate, loss
        self.local_port = 0
        self.carried = 0
        self.connections = 0
        self._random = random.Random(seed)
        self._cut_every = self._cut_at = cut_every
        self._silent = False
        self._open: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()
        self._ready.wait(10)

    def stop(self) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(5)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)

    async def _end(self) -> None:
        self._server.close()
        self._cut()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def cut(self, silent: bool = False) -> None:
        """All connections: reset, or from now on nothing arrives any more. New ones are accepted."""
        self._loop.call_soon_threadsafe(self._cut, silent)

    def cut_after(self, count: int) -> None:
        """Cuts when so many more bytes were carried."""
        self._cut_at = self.carried + count

    def _cut(self, silent: bool = False) -> None:
        if silent:
            self._silent = True
            return
        for writer in list(self._open):
            sock = writer.get_extra_info("socket")
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            writer.transport.abort()

    def heal(self) -> None:
        self._silent = False
        self.cut()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._server = self._loop.run_until_complete(asyncio.start_server(self._accept, "127.0.0.1", 0, limit=1 << 20))
        self.local_port = self._server.sockets[0].getsockname()[1]
        self._ready.set()
        self._loop.run_forever()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            there_reader, there_writer = await asyncio.open_connection(self.address, self.port, limit=1 << 20)
        except OSError:
            writer.transport.abort()
            return
        both = {writer, there_writer}
        self._open |= both
        for end in both:
            end.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        ways: list[Coroutine[Any, Any, None]] = [
            self._carry(reader, there_writer),
            self._carry(there_reader, writer),
        ]
        with contextlib.suppress(OSError, asyncio.CancelledError):
            await asyncio.gather(*ways)
        self._open -= both
        for end in both:
            end.transport.abort()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        waiting = 0
        room = asyncio.Event()

        async def receive() -> None:
            nonlocal waiting
            free_at, window, growing = 0.0, 10.0 * _SEGMENT, True
            round_trip = max(0.001, 2 * self.delay)
            while True:
                data = await reader.read(1 << 14 if self.loss else 1 << 18)
                now = self._loop.time()
                free_at = max(now, free_at)
                if self.rate:
                    free_at += len(data) / self.rate
                if self.loss and data:
                    segments = -(-len(data) // _SEGMENT)
                    free_at += len(data) * round_trip / window
                    if self._random.random() < 1 - (1 - self.loss) ** segments:
                        free_at += round_trip
                        window, growing = max(2.0 * _SEGMENT, window / 2), False
                    else:
                        window += len(data) if growing else _SEGMENT * len(data) / window
                queue.put_nowait((free_at + self.delay, data))
                waiting += len(data)
                if not data:
                    return
                while waiting > _BUFFER_BYTES:
                    room.clear()
                    await room.wait()

        task = asyncio.ensure_future(receive())
        try:
            while True:
                due, data = await queue.get()
                if (pause := due - self._loop.time()) > 0:
                    await asyncio.sleep(pause)
                waiting -= len(data)
                room.set()
                if writer.is_closing():
                    return
                if not data:
                    writer.write_eof()
                    return
                while self._silent:
                    await asyncio.sleep(0.05)
                self.carried += len(data)
                if self._cut_at is not None and self.carried >= self._cut_at:
                    self._cut_at = self.carried + self._cut_every if self._cut_every else None
                    self._cut()
                    return
                writer.write(data)
                await writer.drain()
        finally:
            task.cancel()


@contextlib.contextmanager
def slow_link(address: str, port: int, **options: Any) -> Iterator[SlowLink]:
    link = SlowLink(address, port, **options)
    link.start()
    try:
        yield link
    finally:
        link.stop()


if __name__ == "__main__":
    program = SlowLink(sys.argv[1], int(sys.argv[2]), delay=float(sys.argv[3]))
    program.start()
    print(program.local_port, flush=True)
    sys.stdin.read()
