"""Several channels that work through one queue of requests, each with several requests under way."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from sojourn.remote.agent_client import Agent, AgentFailed
from sojourn.remote.connection import ChannelRefused

_QUEUED = 64


class Task(Protocol):
    """One request. `cost`: bytes that travel for it."""

    cost: int

    def send(self, agent: Agent) -> None:
        """In a stream's thread; sends exactly one request."""

    def done(self, answer: dict[str, Any], blob: bytes) -> None:
        """In a stream's thread."""

    def failed(self, error: AgentFailed) -> None: ...


class Streams:
    """`open_agent`: a channel for the stream of this number. `most_under_way`: bytes asked for or sent and not yet
    answered, of each stream. The first error of any of them is raised by `check`."""

    def __init__(
        self, open_agent: Callable[[int], AbstractContextManager[Agent]], count: int, most_under_way: int
    ) -> None:
        self._open_agent, self._most = open_agent, most_under_way
        self._queue: queue.Queue[Task] = queue.Queue(_QUEUED)
        self._stop, self._finish = threading.Event(), threading.Event()
        self._error: BaseException | None = None
        self._threads = [threading.Thread(target=self._work, args=(index,), daemon=True) for index in range(count)]
        self.count = self._alive = count
        self._lock = threading.Lock()
        for thread in self._threads:
            thread.start()

    def put(self, task: Task, wait: float = 0.1) -> bool:
        """False where the queue is full."""
        self.check()
        try:
            self._queue.put(task, timeout=wait)
        except queue.Full:
            return False
        return True

    def check(self) -> None:
        if self._error is not None:
            raise self._error

    def finish(self) -> None:
        """After the last task was put: waits until all are done."""
        self._finish.set()
        while any(thread.is_alive() for thread in self._threads):
            for thread in self._threads:
                thread.join(0.05)
            self.check()
        self.check()

    def stop(self) -> None:
        """At once; what is under way is given up."""
        self._stop.set()

    def _work(self, index: int) -> None:
        try:
            with self._open_agent(index) as agent:
                self._serve(agent)
        except ChannelRefused as error:  # fewer streams then, as long as there is one
            with self._lock:
                self._alive -= 1
                if self._alive == 0:
                    self._error = error
        except BaseException as error:
            if self._error is None:
                self._error = error
            self._stop.set()

    def _serve(self, agent: Agent) -> None:
        under_way: deque[Task] = deque()
        size = 0
        while not self._stop.is_set():
            task = self._next(wait=not under_way) if size < self._most else None
            if task is not None:
                task.send(agent)
                under_way.append(task)
                size += task.cost
            elif under_way:
                task = under_way.popleft()
                size -= task.cost
                try:
                    answer, blob = agent.receive()
                except AgentFailed as error:
                    task.failed(error)
                else:
                    task.done(answer, blob)
            elif self._finish.is_set():
                return

    def _next(self, wait: bool) -> Task | None:
        try:
            return self._queue.get(timeout=0.05) if wait else self._queue.get_nowait()
        except queue.Empty:
            return None
