"""The demo's output: a column of stages, their messages beside them, a progress bar while training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

Show = Callable[[int, int, str], None]

_INDENT = 11
_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}


class Screen:
    def __init__(self, console: Console) -> None:
        self._console = console

    def stage(self, name: str, message: str) -> None:
        from rich.text import Text

        self._console.print(Text.assemble((f"{name:<{_INDENT}}", "bold cyan"), (message, "bold")))

    def print(self, message: str) -> None:
        self._line([(message, "")])

    def finding(self, level: str, message: str) -> None:
        self._line([(f"{level} ", _COLOURS[level]), (message, "")])

    def answer(self, question: str, reply: str, expected: str, is_correct: bool) -> None:
        question, reply = " ".join(question.split()), " ".join(reply.split()) or "(nothing)"
        mark = ("✓ ", "green") if is_correct else ("✗ ", "red")
        self._line(
            [
                mark,
                (f"{question}  →  ", ""),
                (reply, "cyan"),
                ("" if is_correct else f"  (expected: {expected})", "dim"),
            ]
        )

    def result(self, message: str, details: str) -> None:
        from rich.text import Text

        self._console.print(Text.assemble("\n", (message, "bold green"), f"\n{details}"))

    def commands(self, *lines: tuple[str, str]) -> None:
        from rich.text import Text

        self._console.print("\nnext:")
        width = max(len(command) for command, _ in lines)
        for command, why in lines:
            self._console.print(Text.assemble("  ", (f"{command:<{width}}", "bold"), f"  {why}"), soft_wrap=True)

    @contextmanager
    def progress(self) -> Iterator[Show]:
        """Yields a function of step, total and message. Without a terminal it prints a line every eighth of the run."""
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        if not self._console.is_terminal:
            last_eighth = -1

            def print_line(step: int, total: int, message: str) -> None:
                nonlocal last_eighth
                if total and step * 8 // total > last_eighth:
                    last_eighth = step * 8 // total
                    self.print(f"step {step}/{total} · {message}")

            yield print_line
            return
        count = TextColumn("{task.completed:.0f}/{task.total:.0f}")
        columns = (
            TextColumn(" " * (_INDENT - 1)),
            BarColumn(bar_width=24),
            count,
            TextColumn("{task.fields[message]}"),
        )
        with Progress(*columns, TimeElapsedColumn(), console=self._console, transient=True) as progress:
            task = progress.add_task("train", total=1, message="starting")
            yield lambda step, total, message: progress.update(task, completed=step, total=total or 1, message=message)

    def _line(self, parts: list[tuple[str, str]]) -> None:
        from rich.padding import Padding
        from rich.text import Text

        self._console.print(Padding(Text.assemble(*parts), (0, 0, 0, _INDENT)))
