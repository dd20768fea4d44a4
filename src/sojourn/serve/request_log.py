"""One line of JSON for each request and each event, on standard error. Prompts and answers are in none of them, unless
the server is started with --log-prompts."""

from __future__ import annotations

import json
import sys
import time
import traceback
from typing import Any, TextIO


class RequestLog:
    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream

    def write(self, event: str, **fields: Any) -> None:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime()) + f".{int(time.time() * 1000) % 1000:03d}Z"
        line = {"time": stamp, "event": event, **{key: value for key, value in fields.items() if value is not None}}
        stream = self._stream or sys.stderr
        try:
            stream.write(json.dumps(line, ensure_ascii=True, default=str) + "\n")
            stream.flush()
        except (OSError, ValueError):  # nobody reads it any more
            pass

    def failed(self, event: str, error: BaseException, **fields: Any) -> None:
        """Ours: with its traceback."""
        self.write(event, error=repr(error)[:500], traceback=traceback.format_exception(error), **fields)
