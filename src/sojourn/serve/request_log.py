"""One line of JSON for each request and each event, on standard error. Prompts and answers are in none of them, unless
the server is started with --log-prompts.

A thread of its own writes them: a paused terminal, or a pipe that nobody reads, must not hold up the answers."""

from __future__ import annotations

import contextlib
import json
import queue
import sys
import threading
import time
import traceback
from typing import Any, TextIO

_MOST_LINES = 10_000  # that wait to be written
_END_SECONDS = 2.0


class RequestLog:
    """`close` it: lines are written a moment later."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream
        self._lines: queue.Queue[dict[str, Any] | None] = queue.Queue(_MOST_LINES)
        self._lost = 0
        self._thread = threading.Thread(target=self._write_all, daemon=True, name="sojourn-log")
        self._thread.start()

    def write(self, event: str, **fields: Any) -> None:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime()) + f".{int(time.time() * 1000) % 1000:03d}Z"
        line = {"time": stamp, "event": event, **{key: value for key, value in fields.items() if value is not None}}
        if self._lost:
            line["lines_lost_before"] = self._lost
        try:
            self._lines.put_nowait(line)
            self._lost = 0
        except queue.Full:
            self._lost += 1

    def _write_all(self) -> None:
        stream = self._stream or sys.stderr
        while (line := self._lines.get()) is not None:
            try:
                stream.write(json.dumps(line, ensure_ascii=True, default=str) + "\n")
                stream.flush()
            except (OSError, ValueError):  # nobody reads it any more
                pass
            self._lines.task_done()

    def wait(self) -> None:
        """Until all is written."""
        self._lines.join()

    def close(self) -> None:
        """What waits is written, unless that takes long."""
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait(None)
        self._thread.join(_END_SECONDS)

    def failed(self, event: str, error: BaseException, **fields: Any) -> None:
        """Ours: with its traceback."""
        self.write(event, error=repr(error)[:500], traceback=traceback.format_exception(error), **fields)
