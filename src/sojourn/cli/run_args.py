"""The argument of every verb that takes a run: its name and settings, which `config.load.load_run` reads."""

from __future__ import annotations

from typing import Annotated

import typer

RunArgs = Annotated[
    list[str],
    typer.Argument(
        metavar="RUN [key=value]... [--flag value]...",
        help="A preset, a YAML file or a run folder, then settings.",
        show_default=False,
    ),
]
