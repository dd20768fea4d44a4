"""How the demo looks: stages on the left, what they say beside them, one moving line while training."""

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

    def stage(self, name: str, says: str) -> None:
        from rich.text import Text

        self._console.print(Text.assemble((f"{name:<{_INDENT}}", "bold cyan"), (says, "bold")))

    def say(self, says: str) -> None:
        self._line([(says, "")])

    def finding(self, level: str, says: str) -> None:
        self._line([(f"{level} ", _COLOURS[level]), (says, "")])

    def answer(self, asked: str, said: str, right: str, is_right: bool) -> None:
        asked, said = " ".join(asked.split()), " ".join(said.split()) or "(nothing)"
        mark = ("✓ ", "green") if is_right else ("✗ ", "red")
        self._line([mark, (f"{asked}  →  ", ""), (said, "cyan"), ("" if is_right else f"  (right: {right})", "dim")])

    def result(self, says: str, how: str) -> None:
        from rich.text import Text

        self._console.print(Text.assemble("\n", (says, "bold green"), f"\n{how}"))

    def commands(self, *lines: tuple[str, str]) -> None:
        from rich.text import Text

        self._console.print("\nnext:")
        width = max(len(command) for command, _ in lines)
        for command, why in lines:
            self._console.print(Text.assemble("  ", (f"{command:<{width}}", "bold"), f"  {why}"), soft_wrap=True)

    @contextmanager
    def progress(self) -> Iterator[Show]:
        """Yields what to call with step, total and words; elsewhere than on a terminal it says a line now and then."""
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        if not self._console.is_terminal:
            said = -1

            def say(step: int, total: int, words: str) -> None:
                nonlocal said
                if total and step * 8 // total > said:
                    said = step * 8 // total
                    self.say(f"step {step}/{total} · {words}")

            yield say
            return
        count = TextColumn("{task.completed:.0f}/{task.total:.0f}")
        columns = (TextColumn(" " * (_INDENT - 1)), BarColumn(bar_width=24), count, TextColumn("{task.fields[says]}"))
        with Progress(*columns, TimeElapsedColumn(), console=self._console, transient=True) as progress:
            task = progress.add_task("train", total=1, says="starting")
            yield lambda step, total, words: progress.update(task, completed=step, total=total or 1, says=words)

    def _line(self, parts: list[tuple[str, str]]) -> None:
        from rich.padding import Padding
        from rich.text import Text

        self._console.print(Padding(Text.assemble(*parts), (0, 0, 0, _INDENT)))
