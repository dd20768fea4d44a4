"""The progress of a long generation or evaluation on standard error: rows, tokens per second, time left."""

from __future__ import annotations

import sys
import time

from sojourn.config.quantities import Duration

_REDRAW_SECONDS = 0.25
_LINE_SECONDS = 15.0  # between lines where standard error is no terminal


class Progress:
    """A line that is redrawn in a terminal, else one every 15 seconds. `done`: rows that an earlier call has made."""

    def __init__(self, what: str, total: int, done: int = 0) -> None:
        self._what, self._total, self._done, self._first = what, total, done, done
        self._tokens, self._began = 0, time.monotonic()
        self._is_terminal = sys.stderr.isatty()
        self._shown, self._is_drawn = self._began, False

    def add_tokens(self, count: int) -> None:
        self._tokens += count
        self._show()

    def add_row(self) -> None:
        self._done += 1
        self._show()

    def say(self, line: str) -> None:
        self.clear()
        print(line, file=sys.stderr, flush=True)

    def clear(self) -> None:
        if self._is_drawn:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
            self._is_drawn = False

    def summary(self) -> str:
        seconds = max(time.monotonic() - self._began, 1e-9)
        took = f"{self._tokens:,} tokens in {_duration(seconds)} ({self._tokens / seconds:,.0f} tok/s)"
        return f"{self._done:,} {self._what}: {took}"

    def _show(self) -> None:
        now = time.monotonic()
        if now - self._shown < (_REDRAW_SECONDS if self._is_terminal else _LINE_SECONDS):
            return
        self._shown, seconds = now, now - self._began
        parts = [f"{self._done:,}/{self._total:,} {self._what}", f"{self._tokens / seconds:,.0f} tok/s"]
        made = self._done - self._first
        if made:
            parts.append(f"{_duration(seconds / made * (self._total - self._done))} left")
        line = " · ".join(parts)
        sys.stderr.write(f"\r{line}\x1b[K" if self._is_terminal else f"{line}\n")
        sys.stderr.flush()
        self._is_drawn = self._is_terminal


def _duration(seconds: float) -> str:
    return str(Duration(max(1, round(seconds) if seconds < 3600 else 60 * round(seconds / 60))))
