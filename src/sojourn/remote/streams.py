"""Several channels that work through one queue of requests, each with several requests under way."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from sojourn.remote.agent_client import Agent, AgentFailed
from sojourn.remote.connection import ChannelRefused

_QUEUED = 64
_POLL_SECONDS = 0.1  # on Windows a wait without a timeout cannot be interrupted


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
        self._tasks: deque[Task] = deque()
        self._changed = threading.Condition()
        self._stopped = self._finished = False
        self._error: BaseException | None = None
        self._threads = [threading.Thread(target=self._work, args=(index,), daemon=True) for index in range(count)]
        self.count = self._alive = count
        for thread in self._threads:
            thread.start()

    def put(self, task: Task, wait: float = 0.1) -> bool:
        """False where the queue is full."""
        with self._changed:
            self.check()
            if len(self._tasks) >= _QUEUED and wait:
                self._changed.wait(wait)
                self.check()
            if len(self._tasks) >= _QUEUED:
                return False
            self._tasks.append(task)
            self._changed.notify_all()
        return True

    def check(self) -> None:
        if self._error is not None:
            raise self._error

    def finish(self) -> None:
        """After the last task was put: waits until all are done."""
        with self._changed:
            self._finished = True
            self._changed.notify_all()
            while self._alive and self._error is None:
                self._changed.wait(_POLL_SECONDS)
        self.check()

    def stop(self) -> None:
        """At once; what is under way is given up."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def _work(self, index: int) -> None:
        error: BaseException | None = None
        refused = False
        try:
            with self._open_agent(index) as agent:
                self._serve(agent)
        except BaseException as found:
            error, refused = found, isinstance(found, ChannelRefused)
        with self._changed:
            self._alive -= 1
            if error is not None and self._error is None and (self._alive == 0 or not refused):
                self._error = error  # where a channel is refused, fewer do, as long as there is one
            self._stopped |= self._error is not None
            self._changed.notify_all()

    def _serve(self, agent: Agent) -> None:
        under_way: deque[Task] = deque()
        size = 0
        while not self._stopped:
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
            elif self._finished:
                return

    def _next(self, wait: bool) -> Task | None:
        with self._changed:
            if wait and not self._tasks and not self._finished and not self._stopped:
                self._changed.wait(_POLL_SECONDS)
            if not self._tasks or self._stopped:
                return None
            self._changed.notify_all()
            return self._tasks.popleft()
