"""`sojourn board`: runs, curves, money and models in the browser."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def board(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[FOLDER]…", help="Further folders whose subfolders are runs.", show_default=False),
    ] = None,
    host: str | None = typer.Option(
        None, "--host", metavar="HOST", help="The board of a box of `sojourn host list`, through its tunnel.",
        show_default=False,
    ),
    port: int = typer.Option(8765, min=0, max=65_535, help="Port; 0: any free one."),
    listen: str = typer.Option(
        "127.0.0.1", help="Address to listen at. Other than this machine: the address has a token."
    ),
    allowed_host: list[str] | None = typer.Option(
        None, metavar="NAME", help="One more name of this machine in Host headers. Repeatable.", show_default=False
    ),
    browser: bool = typer.Option(True, "--browser/--no-browser", help="Open it in the browser."),
) -> None:  # fmt: skip
    """Watch runs, compare them, start and stop them, chat with checkpoints: a page in your browser.

    Runs do not need the board: it may end at any time.
    """
    if host is not None:
        from sojourn.board.on_box import board_of_box

        board_of_box(host, port, browser, _say)
        return
    from sojourn.board.start import start

    start(listen, port, folders or [], browser, tuple(allowed_host or ()), _say)


def _say(line: str) -> None:
    print(line, flush=True)
