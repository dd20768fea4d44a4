"""A pool of worker processes that share a stream of tasks and end with the parent.

Each worker is a fresh Python that reads pickled tasks from stdin and writes results to stdout. It imports only what it
needs, works the same on every system, and ends when the parent's end of the pipe closes, even if the parent was
killed.
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


def map_in_workers(
    make: Callable[[Any], Callable[[Task], Result]], config: Any, tasks: Iterable[Task], workers: int
) -> Iterator[Result]:
    """Calls `make(config)` once in each worker, then what it returned with each task. Results keep the tasks' order.

    With one worker everything runs in this process. At most two tasks a worker are queued, so memory stays bounded.
    """
    if workers == 1:
        yield from map(make(config), tasks)
        return
    with closing(_WorkerPool(make, config, workers)) as pool:
        pending: deque[Future[Result]] = deque()
        for task in tasks:
            pending.append(pool.submit(task))
            if len(pending) > 2 * workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


class _WorkerPool:
    """One thread per worker process."""

    def __init__(self, make: Callable[[Any], Any], config: Any, workers: int) -> None:
        self._setup = pickle.dumps((make, config))
        self._local = threading.local()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._threads = ThreadPoolExecutor(workers, initializer=self._start)

    def submit(self, task: Any) -> Future[Any]:
        return self._threads.submit(self._run, task)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        for process in self._processes:
            process.kill()
        self._threads.shutdown(wait=True)
        for process in self._processes:
            process.communicate()

    def _start(self) -> None:
        single_threaded = {
            "TOKENIZERS_PARALLELISM": "false",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        command = [sys.executable, "-c", "from sojourn.data.worker_pool import worker_main; worker_main()"]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, **single_threaded}
        )
        self._local.process = process
        self._processes.append(process)
        with suppress(OSError):  # reported at the first task
            _send(process.stdin, self._setup)

    def _run(self, task: Any) -> Any:
        process = self._local.process
        try:
            _send(process.stdin, pickle.dumps(task, protocol=5))
            kind, value = pickle.loads(_receive(process.stdout))  # noqa: S301  (from our own child)
        except (EOFError, OSError):
            raise RunFailed(
                f"a worker process ended (exit code {process.wait()}); if it ran out of memory, set data.workers=1"
            ) from None
        if kind == "result":
            return value
        if kind == "user error":
            raise value
        raise RuntimeError(f"in a worker process:\n{value}")


def worker_main() -> None:
    """The loop of a worker process."""
    tasks, results = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not mix with the results
    try:
        make, config = pickle.loads(_receive(tasks))  # noqa: S301  (from our own parent)
        run = make(config)
        while True:
            _send(results, pickle.dumps(_outcome(run, pickle.loads(_receive(tasks))), protocol=5))  # noqa: S301
    except (EOFError, BrokenPipeError, KeyboardInterrupt):
        pass


def _outcome(run: Callable[[Any], Any], task: Any) -> tuple[str, Any]:
    try:
        return "result", run(task)
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
