"""`sojourn logs`: the output of a run on a box."""

from __future__ import annotations

from typing import Annotated

import typer

Run = Annotated[str, typer.Argument(metavar="RUN", help="A run of `sojourn runs`.", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def logs(
    run: Run,
    follow: bool = typer.Option(False, "--follow", "-f", help="Go on until the run ends; Ctrl-C only stops watching."),
    tail: int | None = typer.Option(None, "--tail", metavar="LINES", min=0, help="Only the last lines."),
    json: Json = False,
) -> None:
    """Show what a remote run prints. Reads only: Ctrl-C never harms the run."""
    from sojourn.cli.remote_output import Output
    from sojourn.remote.show_logs import show_logs

    with Output(json, f"not watching any more; {run} goes on") as output:
        output.result(show_logs(run, follow, tail, output.say, output.show))
