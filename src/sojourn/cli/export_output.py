"""What `export`, `merge` and `quantize` print: a progress bar, notes, and where the result is."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any


class ExportOutput:
    """A `Progress` of exports: the bar and all lines go to standard error, the result to standard output."""

    def __init__(self, json: bool = False) -> None:
        self._json = json
        self._bar: Any = None
        self._meter: Any = None

    def __enter__(self) -> ExportOutput:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()
        if isinstance(error, KeyboardInterrupt):
            self.say("interrupted; run the same command to go on where it was")

    def start(self, what: str, total: int) -> None:
        from sojourn.remote.progress import Meter, ProgressBar

        if self._bar is not None:
            self._bar.close()
        self._bar = ProgressBar(what)
        self._meter = Meter(self._bar)
        self._meter.total = total

    def advance(self, count: int, is_new: bool = True) -> None:
        if is_new:
            self._meter.moved(count)
        else:
            self._meter.done += count
        self._meter.report(last=self._meter.done >= self._meter.total)

    def say(self, line: str) -> None:
        if self._bar is not None:
            self._bar.close()
        print(line, file=sys.stderr, flush=True)

    def result(self, value: dict[str, Any], lines: list[str]) -> None:
        if self._json:
            from sojourn.run.output import print_json

            print_json(value)
            return
        for line in lines:
            print(line, flush=True)
