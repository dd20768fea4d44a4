"""`sojourn stop`: stops a remote run, saved and resumable."""

from __future__ import annotations

from sojourn.cli.logs import Json, Run


def stop(run: Run, json: Json = False) -> None:
    """Stop a remote run: it saves a checkpoint and ends, and can go on later. The box stays on."""
    from sojourn.cli.remote_output import Output
    from sojourn.remote.verbs import stop_named

    with Output(json) as output:
        output.result(stop_named(run, output.say))
