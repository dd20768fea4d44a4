"""`sojourn gpu`: the GPUs of a host."""

from __future__ import annotations

from typing import Annotated

import typer

from sojourn.cli.logs import Json

HostOrRun = Annotated[
    str, typer.Argument(metavar="HOST|RUN", help="A host of `sojourn host list`, or a run.", show_default=False)
]


def gpu(name: HostOrRun, json: Json = False) -> None:
    """Show the GPUs of a host: use, memory, temperature, power."""
    from sojourn.cli.remote_output import Output
    from sojourn.remote.verbs import gpus_of

    with Output(json) as output:
        found = gpus_of(name, output.say)
        output.result(found)
        for row in found if not json else ():
            cells = (
                f"GPU {row['index']}",
                str(row["name"]),
                f"{row['utilization']} % used",
                f"{row['memory_used']} of {row['memory_total']} MiB",
                f"{row['temperature']} °C",
                f"{row['power']} W",
            )
            output.say("  ".join(cells))
