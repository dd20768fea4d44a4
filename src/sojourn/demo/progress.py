"""One live line for a training process that is watched from outside."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from sojourn.demo.child import Show


@contextmanager
def bar(console: Console) -> Iterator[Show]:
    """Moves with the steps on a terminal; elsewhere says a line now and then."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    if not console.is_terminal:
        said = -1

        def say(step: int, total: int, text: str) -> None:
            nonlocal said
            if total and step * 8 // total > said:
                said = step * 8 // total
                console.print(f"           step {step}/{total} · {text}")

        yield say
        return
    columns = (
        TextColumn("          "),
        BarColumn(bar_width=24),
        TextColumn("{task.completed:.0f}/{task.total:.0f} {task.fields[says]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("train", total=1, says="starting")
        yield lambda step, total, text: progress.update(task, completed=step, total=total or 1, says=text)
