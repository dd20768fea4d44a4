"""How far a transfer is: bytes, speed, time left; a bar in a terminal, lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

_SPEED_SECONDS = 5.0
_CALL_SECONDS = 0.1
_LINE_SECONDS = 10.0


@dataclass(frozen=True)
class Progress:
    """`speed` in bytes per second over the last seconds; `seconds_left` is None while it is unknown."""

    done: int
    total: int
    speed: float
    seconds_left: float | None


ProgressCallback = Callable[[Progress], None]


class Meter:
    """Counts bytes and calls back at most ten times a second."""

    def __init__(self, callback: ProgressCallback | None) -> None:
        self._callback = callback
        self.done = self.total = 0
        self._recent: deque[tuple[float, int]] = deque()
        self._called = 0.0
        self._began = time.monotonic()
        self._moved = 0

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def speed(self) -> float:
        """Of the bytes that really moved, not of those that were there already."""
        now = time.monotonic()
        while len(self._recent) > 1 and self._recent[0][0] < now - _SPEED_SECONDS:
            self._recent.popleft()
        if not self._recent or now - self._recent[0][0] < 0.5:
            return self._moved / max(0.001, now - self._began)
        return (self._moved - self._recent[0][1]) / (now - self._recent[0][0])

    def moved(self, count: int) -> None:
        self.done += count
        self._moved += count
        self._recent.append((time.monotonic(), self._moved))

    def report(self, last: bool = False) -> None:
        now = time.monotonic()
        if self._callback is None or (not last and now - self._called < _CALL_SECONDS):
            return
        self._called = now
        speed = self.speed()
        left = (self.total - self.done) / speed if speed > 0 and not last else None
        self._callback(Progress(self.done, self.total, speed, 0.0 if last else left))


class ProgressBar:
    """For a transfer's `progress`; a `with` around it, or `close`, ends the bar."""

    def __init__(self, label: str, say: Callable[[str], None] | None = None) -> None:
        self.label = label
        self._say = say or (lambda line: print(line, file=sys.stderr))
        self._bar: Any = None
        self._task: Any = None
        self._line_at = time.monotonic()
        self._terminal = sys.stderr.isatty()

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __call__(self, progress: Progress) -> None:
        if self._terminal:
            self._show(progress)
        elif time.monotonic() - self._line_at > _LINE_SECONDS:
            self._line_at = time.monotonic()
            self._say(describe(self.label, progress))

    def _show(self, progress: Progress) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )
        from rich.progress import Progress as Bar

        if self._bar is None:
            columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True))
            console = Console(stderr=True)
            self._bar = Bar(*columns, TransferSpeedColumn(), TimeRemainingColumn(), console=console, transient=True)
            self._bar.start()
            self._task = self._bar.add_task(self.label, total=progress.total)
        self._bar.update(self._task, completed=progress.done, total=progress.total)
        if progress.done >= progress.total:
            self.close()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def describe(label: str, progress: Progress) -> str:
    mib = 2**20
    left = "" if progress.seconds_left is None else f", {_duration(progress.seconds_left)} left"
    share = 100 * progress.done // max(1, progress.total)
    return (
        f"{label}: {progress.done / mib:,.1f} of {progress.total / mib:,.1f} MiB ({share} %), "
        f"{progress.speed / mib:,.1f} MiB/s{left}"
    )


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"
