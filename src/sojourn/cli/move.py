"""`sojourn move`: continues a remote run on another host."""

from __future__ import annotations

import typer

from sojourn.cli.logs import Json, Run


def move(
    run: Run,
    to: str = typer.Option(..., "--to", metavar="HOST", help="The host to continue on."),
    budget: str | None = typer.Option(
        None, "--budget", help="Most money for the whole run, what it has cost included."
    ),
    price: str | None = typer.Option(None, "--price", help="Price per hour, if not the host's."),
    stop_when_done: bool = typer.Option(False, "--stop-when-done", help="Power the new box off once all is safe."),
    detach: bool = typer.Option(False, "--detach", help="Return once it trains there."),
    json: Json = False,
) -> None:
    """Move a run: save and stop there, bring its checkpoint here, send it on, resume. Same id, cost added up."""
    from sojourn.cli.remote_output import Output
    from sojourn.plan.arguments import to_budget
    from sojourn.remote.move import move as move_run
    from sojourn.remote.spec import Terms
    from sojourn.remote.start import Options

    options = Options(Terms(to_budget(budget), to_budget(price, "--price"), None, stop_when_done), detach)
    with Output(json, f"not watching any more; where {run} is: sojourn runs") as output:
        output.result(move_run(run, to, options, output.say, output.show))
