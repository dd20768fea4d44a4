"""`sojourn forward`: a port of a host, here."""

from __future__ import annotations

import typer

from sojourn.cli.gpu import HostOrRun
from sojourn.cli.logs import Json


def forward(
    name: HostOrRun,
    what: str = typer.Argument("tensorboard", help="tensorboard, serve, board, or a port number there."),
    port: int = typer.Option(0, "--port", min=0, max=65535, help="The port here. Default: the same, else a free one."),
    json: Json = False,
) -> None:
    """Open a port of the box on this machine, through SSH, until Ctrl-C. Starts TensorBoard there if need be."""
    from sojourn.cli.remote_output import Output
    from sojourn.remote.verbs import forward_until_interrupted

    with Output(json) as output:
        forward_until_interrupted(name, what, port, output.say, output.result)
