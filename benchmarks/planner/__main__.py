"""`python -m benchmarks.planner`: real steps of many runs against what `sojourn plan` estimates for them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.planner.measure import make_plan, measure, read_again
from sojourn.cli.bench import print_measurement
from sojourn.cli.main import use_expandable_segments
from sojourn.errors import UserError


def planner(
    cases: Annotated[
        list[str] | None, typer.Option(help="Only these, by name or a part of it (lora, 7b, …), with commas.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first so many of them.")] = None,
    draw: Annotated[
        int | None, typer.Option(min=1, help="So many runs drawn at random instead, to which nothing was ever fitted.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of --draw: the same runs each time.")] = 0,
    jobs: Annotated[int, typer.Option(min=1, max=64, help="Runs at once, if their memory allows.")] = 12,
    skip_capped: Annotated[
        bool, typer.Option("--skip-capped", help="Let first steps have more memory than is planned.")
    ] = False,
    seconds: Annotated[
        float, typer.Option(min=1, max=3600, help="A run that takes longer is ended; waiting does not count.")
    ] = 180.0,
    within: Annotated[
        float | None, typer.Option(min=1, help="After so many seconds no further run begins; --resume goes on later.")
    ] = None,
    read: Annotated[
        Path | None, typer.Option(help="Measure nothing: plan what this result has measured anew, without a GPU.")
    ] = None,
    resume: Annotated[Path | None, typer.Option(help="Go on with this result; what it has is kept.")] = None,
    peers: Annotated[bool, typer.Option("--peers/--no-peers", help="Ask other programs for the same runs.")] = True,
    folder: Annotated[
        Path | None,
        typer.Option(help="Where to work and to keep what was compiled for the next call; by default nothing is kept."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON; lines go to standard error.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="Write the result as JSON to this file, after every run already.")
    ] = None,
) -> None:
    """How right `sojourn plan` is: real steps of many runs against what was planned, and against other estimates."""
    if read is not None:
        if resume is not None or cases or limit or draw:
            raise UserError("--read: measures nothing; remove --resume, --cases, --limit and --draw, or --read")
        print_measurement(lambda echo: read_again(read, peers, echo), json, out)
        return
    if draw is not None and (cases or limit):
        raise UserError("--draw: draws its own runs; remove --cases and --limit, or --draw")
    options = (cases or [], limit, jobs, seconds, within, not skip_capped, peers, folder, out, resume, draw, seed)
    print_measurement(lambda echo: measure(make_plan(*options), echo), json, out)


if __name__ == "__main__":
    use_expandable_segments()  # as the command that trains does; the processes that measure inherit it
    try:
        typer.run(planner)
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
