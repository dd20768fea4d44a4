"""A question before what costs money or room; `--yes` answers it."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


def confirm(what: str, consequence: str, yes: bool) -> None:
    from sojourn.errors import UserError

    if yes:
        return
    if not sys.stdin.isatty():
        raise UserError(f"to {what}, give --yes: {consequence}")
    if not typer.confirm(f"{what}? {consequence}", err=True):
        raise UserError("nothing was done")
