"""Worker processes that share a stream of tasks and die with us.

Each is a fresh Python that reads pickled tasks from its standard input and writes results to its standard output: it
imports only what it needs, works the same on every system, and ends by itself when our end of the pipe closes, even if
we were killed.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from typing import IO, Any, TypeVar

from sojourn.errors import RunFailed, UserError

Task = TypeVar("Task")
Result = TypeVar("Result")


def work(
    make: Callable[[Any], Callable[[Task], Result]], recipe: Any, tasks: Iterable[Task], workers: int
) -> Iterator[Result]:
    """`make(recipe)` is called once in each worker; what it returns is called with each task. Results keep the order.

    With one worker all of it happens here. At most a few tasks a worker are on their way, so memory stays bounded.
    """
    if workers == 1:
        yield from map(make(recipe), tasks)
        return
    with closing(_WorkerPool(make, recipe, workers)) as crew:
        ahead: deque[Future[Result]] = deque()
        for task in tasks:
            ahead.append(crew.submit(task))
            if len(ahead) > 2 * workers:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()


class _WorkerPool:
    """As many threads as workers; each thread talks to one process."""

    def __init__(self, make: Callable[[Any], Any], recipe: Any, workers: int) -> None:
        self._first = pickle.dumps((make, recipe))
        self._own = threading.local()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._threads = ThreadPoolExecutor(workers, initializer=self._start)

    def submit(self, task: Any) -> Future[Any]:
        return self._threads.submit(self._ask, task)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        for process in self._processes:
            process.kill()
        self._threads.shutdown(wait=True)
        for process in self._processes:
            process.communicate()

    def _start(self) -> None:
        alone = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-c", "from sojourn.data.worker_pool import serve; serve()"]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, **alone})
        self._own.process = process
        self._processes.append(process)
        with suppress(OSError):  # told at the first task
            _send(process.stdin, self._first)

    def _ask(self, task: Any) -> Any:
        process = self._own.process
        try:
            _send(process.stdin, pickle.dumps(task, protocol=5))
            kind, value = pickle.loads(_receive(process.stdout))  # noqa: S301  (from our own child)
        except (EOFError, OSError):
            raise RunFailed(
                f"a worker process ended (exit code {process.wait()}); if memory ran out, use fewer: data.workers=1"
            ) from None
        if kind == "result":
            return value
        if kind == "user error":
            raise value
        raise RuntimeError(f"in a worker process:\n{value}")


def serve() -> None:
    """The worker's side."""
    tasks, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # nothing that a library prints may get between the answers
    try:
        make, recipe = pickle.loads(_receive(tasks))  # noqa: S301  (from our own parent)
        act = make(recipe)
        while True:
            _send(answers, pickle.dumps(_outcome(act, pickle.loads(_receive(tasks))), protocol=5))  # noqa: S301
    except (EOFError, BrokenPipeError, KeyboardInterrupt):
        pass


def _outcome(act: Callable[[Any], Any], task: Any) -> tuple[str, Any]:
    try:
        return "result", act(task)
    except UserError as error:
        return "user error", error
    except Exception:
        return "error", traceback.format_exc()


def _send(pipe: IO[bytes] | None, data: bytes) -> None:
    assert pipe is not None  # noqa: S101
    pipe.write(len(data).to_bytes(8, "little"))
    pipe.write(data)
    pipe.flush()


def _receive(pipe: IO[bytes]) -> bytes:
    size = pipe.read(8)
    data = pipe.read(int.from_bytes(size, "little")) if len(size) == 8 else b""
    if len(size) < 8 or len(data) < int.from_bytes(size, "little"):
        raise EOFError
    return data
