"""The builtin engine as the gateway sees it: a process of its own, so that the gateway's event loop never waits for a
step, and a crash of the engine ends no connection without an answer."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import threading
from collections.abc import AsyncGenerator
from dataclasses import replace
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from sojourn.errors import RunFailed, UserError
from sojourn.infer.engine.request import Token
from sojourn.serve.engines.base import EngineDied, EngineInfo, EngineStats, GenerationRequest, Output
from sojourn.serve.engines.builtin_process import ModelToServe, run

_END_SECONDS = 10.0


class _Child:
    """One process with one model. Requests end in the process where they began."""

    def __init__(self, model: ModelToServe) -> None:
        self.model, self.stats, self.why_dead = model, EngineStats(), ""
        self.info: EngineInfo | None = None
        self._queues: dict[str, asyncio.Queue[Output | None]] = {}
        self._tickets: dict[int, asyncio.Future[str | None]] = {}
        self._numbers = count()
        self._lock = threading.Lock()  # the pipe is written by the event loop, and closed by it
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=run, args=(theirs, model), name="sojourn-engine", daemon=True)
        self._theirs: Connection | None = theirs

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._started: asyncio.Future[EngineInfo] = loop.create_future()
        await asyncio.to_thread(self._process.start)
        if self._theirs is not None:
            self._theirs.close()
        threading.Thread(target=self._read, args=(loop,), daemon=True, name="sojourn-engine-reader").start()
        self.info = await self._started

    def _read(self, loop: asyncio.AbstractEventLoop) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            while True:
                try:
                    message = self._connection.recv()
                except (EOFError, OSError, TypeError):  # the last: closed by `close` at this moment
                    loop.call_soon_threadsafe(self._end)
                    return
                loop.call_soon_threadsafe(self._take, message)

    def _take(self, message: tuple[Any, ...]) -> None:
        kind, *args = message
        if kind == "outputs":
            tokens, outputs = args
            outputs += [(request_id, Output((Token(token),))) for request_id, token in tokens.items()]
            for request_id, output in outputs:
                if (queue := self._queues.get(request_id)) is not None:
                    queue.put_nowait(output)
        elif kind == "stats":
            self.stats = args[0]
        elif kind == "done" and (future := self._tickets.pop(args[0], None)) is not None and not future.done():
            future.set_result(args[1])
        elif kind == "ready":
            self._started.set_result(args[0])
        elif kind == "failed":
            self._started.set_exception(UserError(args[0]))
        elif kind == "ended":
            self.why_dead = args[0]

    def _end(self) -> None:
        """The process is gone."""
        self.why_dead = self.why_dead or "the engine's process ended"
        if not self._started.done():
            self._started.set_exception(RunFailed("the engine's process ended while it was loading the model"))
        for queue in self._queues.values():
            queue.put_nowait(None)
        for future in self._tickets.values():
            if not future.done():
                future.set_exception(EngineDied(self.why_dead))

    async def submit(self, request: GenerationRequest) -> AsyncGenerator[Output, None]:
        queue: asyncio.Queue[Output | None] = asyncio.Queue()
        self._queues[request.id] = queue
        finished = False
        try:
            self._send("add", request)
            while not finished:
                output = await queue.get()
                if output is None:
                    finished = True
                    raise EngineDied(self.why_dead)
                while not queue.empty() and output.finish_reason is None:
                    later = queue.get_nowait()
                    if later is None:
                        queue.put_nowait(None)  # the next turn raises
                        break
                    output = output.then(later)
                finished = output.finish_reason is not None
                yield output
        finally:
            del self._queues[request.id]
            if not finished:
                with contextlib.suppress(EngineDied):
                    self._send("cancel", request.id)

    def _send(self, *message: Any) -> None:
        try:
            self._connection.send(message)
        except (OSError, ValueError) as error:
            raise EngineDied(self.why_dead or "the engine's process ended") from error

    async def ask(self, command: str, *args: Any) -> None:
        """A command that is answered."""
        ticket = next(self._numbers)
        future: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self._tickets[ticket] = future
        self._send(command, ticket, *args)
        error = await future
        if error is not None:
            raise UserError(error)

    @property
    def is_idle(self) -> bool:
        return not self._queues

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive()

    async def close(self) -> None:
        """Closing the pipe alone would not end it: the thread that reads holds it open."""
        with contextlib.suppress(EngineDied):
            self._send("close")
        if self._process.pid is not None:
            loaded = self.info is not None  # else it does not read
            await asyncio.to_thread(self._process.join, _END_SECONDS if loaded else 0)
            if self._process.is_alive():
                self._process.kill()
        with contextlib.suppress(OSError):
            self._connection.close()


class BuiltinEngine:
    def __init__(self, model: ModelToServe) -> None:
        self._child = _Child(model)
        self._old: set[asyncio.Task[None]] = set()

    @property
    def info(self) -> EngineInfo:
        info = self._child.info
        assert info is not None, "the engine is not started"  # noqa: S101
        return replace(info, adapters=tuple(name for name, _ in self._child.model.adapters))

    async def start(self) -> None:
        await self._child.start()

    async def close(self) -> None:
        await self._child.close()
        for task in self._old:
            task.cancel()

    def submit(self, request: GenerationRequest) -> AsyncGenerator[Output, None]:
        return self._child.submit(request)

    async def stats(self) -> EngineStats:
        return self._child.stats

    def why_dead(self) -> str:
        return self._child.why_dead

    async def restart(self) -> None:
        """A new process with the same model, where the old one is gone."""
        await self._replace(self._child.model)

    async def load_adapter(self, name: str, path: Path) -> None:
        await self._child.ask("load_adapter", name, str(path))
        self._set_adapters((*self._child.model.adapters, (name, str(path))))

    async def unload_adapter(self, name: str) -> None:
        self._set_adapters(tuple(one for one in self._child.model.adapters if one[0] != name))
        await self._child.ask("unload_adapter", name)

    def _set_adapters(self, adapters: tuple[tuple[str, str], ...]) -> None:
        self._child.model = replace(self._child.model, adapters=adapters)

    async def reload(self, path: Path) -> None:
        """The new weights are loaded by a second process; the first one ends with its last request."""
        await self._replace(replace(self._child.model, name=str(path), checkpoint=None))

    async def _replace(self, model: ModelToServe) -> None:
        child = _Child(model)
        try:
            await child.start()
        except (UserError, RunFailed):
            await child.close()
            raise
        old, self._child = self._child, child
        task = asyncio.create_task(_close_when_idle(old))
        self._old.add(task)
        task.add_done_callback(self._old.discard)


async def _close_when_idle(child: _Child) -> None:
    while not child.is_idle and child.is_alive:
        await asyncio.sleep(0.2)
    await child.close()
