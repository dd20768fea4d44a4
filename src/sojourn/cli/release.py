"""`sojourn release`: lets a host go, once everything on it is safe."""

from __future__ import annotations

from typing import Annotated

import typer

from sojourn.cli.logs import Json


def release(
    host: Annotated[str, typer.Argument(metavar="HOST", help="A host of `sojourn host list`.", show_default=False)],
    power_off: bool = typer.Option(
        False, "--power-off", help="Only power it off; its disks stay as its platform says."
    ),
    yes: bool = typer.Option(False, "--yes", help="Do not ask."),
    json: Json = False,
) -> None:
    """Power off or release a box. Refused while a checkpoint or a model on it has no verified copy that survives."""
    from sojourn.cli.remote_output import Output
    from sojourn.remote.release import release_host

    with Output(json) as output:
        output.result(release_host(host, power_off, lambda text: yes or typer.confirm(text), output.say))
