"""The one line that moves while a run trains; in a narrow terminal it leaves out what matters least."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sojourn.config.quantities import Duration

_BAR = range(8, 21)  # columns
_DOT = " · "


@dataclass(frozen=True)
class Reading:
    """What the line tells, as of one logged step. Shares are between 0 and 1."""

    loss: float
    tokens_per_second: float
    memory: int
    mfu: float | None = None
    data_wait: float = 0.0
    spent: float | None = None
    projected: float | None = None
    left: float | None = None

    def parts(self, gone: float = 0.0) -> list[tuple[int, str]]:
        """In the order of the line, each with its weight: the heaviest find room first. `gone`: seconds since then."""
        found = [(9, f"loss {self.loss:.4f}"), (6, f"{self.tokens_per_second:,.0f} tok/s")]
        if self.mfu is not None:
            found.append((4, f"MFU {100 * self.mfu:.0f} %"))
        found.append((3, f"{self.memory / 2**30:.1f} GiB"))
        if self.data_wait > 0.05:
            found.append((5, f"data wait {100 * self.data_wait:.0f} %"))
        if self.spent is not None:
            end = "" if self.projected is None else f" of about {self.projected:.2f}"
            found.append((7, f"spent {self.spent:.2f}{end}"))
        if self.left is not None:
            found.append((8, f"{spoken(max(0.0, self.left - gone))} left"))
        return found


def spoken(seconds: float) -> str:
    """As exact as one needs it: 42s, 12m30s, 5h12m."""
    return str(Duration(round(seconds) if seconds < 3600 else 60 * round(seconds / 60)))


def format_plain_line(step: int, total: int, reading: Reading) -> str:
    return _DOT.join([f"step {step}/{total}", *(text for _, text in reading.parts())])


def fitted(step: int, total: int, parts: list[tuple[int, str]], width: int) -> tuple[str, int, str]:
    """The line's two ends and the width of the bar between them, 0 for none; together at most `width` columns."""
    head = f"step {step}/{total}"
    kept: list[tuple[int, str]] = []
    for part in sorted(parts, reverse=True):
        tried = [one for one in parts if one in kept or one == part]
        if len(head) + 1 + len(_line(tried)) <= width:
            kept = tried
    room = width - len(head) - len(_line(kept)) - 2
    return head, min(room, _BAR[-1]) if room >= _BAR[0] else 0, _line(kept)


def _line(parts: list[tuple[int, str]]) -> str:
    return _DOT.join(text for _, text in parts)


class ProgressLine:
    """Drawn a few times a second by rich; the steps move and the time left runs down between two logged steps."""

    def __init__(self, total: int, step: int) -> None:
        from rich.console import Console
        from rich.live import Live

        self._total, self.step = total, step
        self._reading: Reading | None = None
        self._since = time.monotonic()
        self._live = Live(self, console=Console(highlight=False), refresh_per_second=4)

    def start(self) -> None:
        self._live.start()

    def stop(self) -> None:
        self._live.stop()

    def say(self, line: str) -> None:
        self._live.console.print(line, markup=False)

    def show(self, step: int, reading: Reading) -> None:
        self.step, self._reading, self._since = step, reading, time.monotonic()

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        from rich.text import Text

        gone = time.monotonic() - self._since
        parts = self._reading.parts(gone) if self._reading else [(9, "starting")]
        # The last column stays free: a terminal may wrap there.
        head, bar, tail = fitted(self.step, self._total, parts, options.max_width - 1)
        line = Text(f"{head} ", no_wrap=True, overflow="ellipsis")
        if bar:
            done = round(bar * min(1.0, self.step / max(1, self._total)))
            line.append("━" * done, "green").append("━" * (bar - done), "bright_black").append(" ")
        yield line.append(tail)
