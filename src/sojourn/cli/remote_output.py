"""What the verbs of remote runs print: lines of ours and the box's logs; with --json, all of that on standard error."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any


class Output:
    """`watching`: the run goes on when the user stops this with Ctrl-C, and the last line says so."""

    def __init__(self, json: bool = False, watching: str = "") -> None:
        self._stream = sys.stderr if json else sys.stdout
        self._json, self._watching = json, watching

    def __enter__(self) -> Output:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, KeyboardInterrupt) and self._watching:
            self.say(self._watching)

    def say(self, line: str) -> None:
        print(line, file=self._stream, flush=True)

    def show(self, data: bytes) -> None:
        """Of a log, in pieces that may end within a character."""
        buffer = getattr(self._stream, "buffer", None)
        if buffer is None:
            self._stream.write(data.decode(errors="replace"))
        else:
            self._stream.flush()
            buffer.write(data)
        self._stream.flush()

    def result(self, value: Any) -> None:
        if self._json:
            from sojourn.run.output import print_json

            print_json(value)
