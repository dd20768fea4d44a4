"""`sojourn pull`: brings a remote run's model home."""

from __future__ import annotations

import typer

from sojourn.cli.logs import Json, Run


def pull(
    run: Run,
    what: str = typer.Option("final", "--what", help="final, best, checkpoint (the newest) or all."),
    to: str | None = typer.Option(None, "--to", metavar="FOLDER", help="Where to. Default: the run's folder here."),
    json: Json = False,
) -> None:
    """Bring a model, or the whole run, home. Each file is verified by SHA-256; a cut transfer goes on where it was."""
    from sojourn.cli.remote_output import Output
    from sojourn.remote.verbs import pull_named

    with Output(json) as output:
        output.result(pull_named(run, what, to, output.say))
