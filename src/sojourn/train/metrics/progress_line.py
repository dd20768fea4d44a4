"""The progress line of a run in a terminal; a narrow terminal shows the most important parts only."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sojourn.config.quantities import Duration

_BAR_WIDTHS = range(8, 21)  # columns
_SEPARATOR = " · "


@dataclass(frozen=True)
class StepReport:
    """What the line shows of one logged step: `memory` in bytes, `remaining` in seconds, shares from 0 to 1."""

    loss: float
    tokens_per_second: float
    memory: int
    mfu: float | None = None
    data_wait: float = 0.0
    spent: float | None = None
    projected: float | None = None
    remaining: float | None = None

    def parts(self, elapsed: float = 0.0) -> list[tuple[int, str]]:
        """In the order of the line, each with its priority. `elapsed`: seconds since the step was logged."""
        parts = [(9, f"loss {self.loss:.4f}"), (6, f"{self.tokens_per_second:,.0f} tok/s")]
        if self.mfu is not None:
            parts.append((4, f"MFU {100 * self.mfu:.0f} %"))
        parts.append((3, f"{self.memory / 2**30:.1f} GiB"))
        if self.data_wait > 0.05:
            parts.append((5, f"data wait {100 * self.data_wait:.0f} %"))
        if self.spent is not None:
            end = "" if self.projected is None else f" of about {self.projected:.2f}"
            parts.append((7, f"spent {self.spent:.2f}{end}"))
        if self.remaining is not None:
            parts.append((8, f"{format_duration(max(0.0, self.remaining - elapsed))} left"))
        return parts


def format_duration(seconds: float) -> str:
    """Such as 42s, 12m30s, 5h12m."""
    return str(Duration(round(seconds) if seconds < 3600 else 60 * round(seconds / 60)))


def format_plain_line(step: int, total: int, report: StepReport) -> str:
    return _SEPARATOR.join([f"step {step}/{total}", *(text for _, text in report.parts())])


def fit_to_width(step: int, total: int, parts: list[tuple[int, str]], width: int) -> tuple[str, int, str]:
    """The start and end of the line, and the width of the bar between them (0: none); at most `width` columns."""
    head = f"step {step}/{total}"
    chosen: list[tuple[int, str]] = []
    for part in sorted(parts, reverse=True):
        candidate = [one for one in parts if one in chosen or one == part]
        if len(head) + 1 + len(_line(candidate)) <= width:
            chosen = candidate
    free = width - len(head) - len(_line(chosen)) - 2
    return head, min(free, _BAR_WIDTHS[-1]) if free >= _BAR_WIDTHS[0] else 0, _line(chosen)


def _line(parts: list[tuple[int, str]]) -> str:
    return _SEPARATOR.join(text for _, text in parts)


class ProgressLine:
    """Drawn four times a second by rich; steps and remaining time move between two logged steps."""

    def __init__(self, total: int, step: int) -> None:
        from rich.console import Console
        from rich.live import Live

        self._total, self.step = total, step
        self._report: StepReport | None = None
        self._since = time.monotonic()
        self._live = Live(self, console=Console(highlight=False), refresh_per_second=4)

    def start(self) -> None:
        self._live.start()

    def stop(self) -> None:
        self._live.stop()

    def say(self, line: str) -> None:
        self._live.console.print(line, markup=False)

    def show(self, step: int, report: StepReport) -> None:
        self.step, self._report, self._since = step, report, time.monotonic()

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        from rich.text import Text

        elapsed = time.monotonic() - self._since
        parts = self._report.parts(elapsed) if self._report else [(9, "starting")]
        # The last column stays free: some terminals wrap there.
        head, bar, tail = fit_to_width(self.step, self._total, parts, options.max_width - 1)
        line = Text(f"{head} ", no_wrap=True, overflow="ellipsis")
        if bar:
            done = round(bar * min(1.0, self.step / max(1, self._total)))
            line.append("━" * done, "green").append("━" * (bar - done), "bright_black").append(" ")
        yield line.append(tail)
