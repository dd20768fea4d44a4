"""`sojourn stop`: stops a run, saved and resumable."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sojourn.cli.logs import Json, Run

if TYPE_CHECKING:
    from sojourn.cli.remote_output import Output

_WAIT = 120.0  # seconds for a run on this machine to save and end


def stop(run: Run, json: Json = False) -> None:
    """Stop a run, on this machine or on a host: it saves a checkpoint and ends, and can go on later.

    A box stays on.
    """
    from sojourn.cli.remote_output import Output
    from sojourn.remote.job import find_job

    with Output(json) as output:
        if find_job(run) is None:
            output.result(_stop_here(run, output))
            return
        from sojourn.remote.verbs import stop_named

        output.result(stop_named(run, output.say))


def _stop_here(name: str, output: Output) -> dict[str, object]:
    from dataclasses import asdict

    from sojourn.run.home import find_run
    from sojourn.run.stop import stop_run

    run = find_run(name)
    status = stop_run(run, _WAIT)
    where = f"step {status.step:,} of {status.total_steps:,}"
    output.say(f"{run.path.name}: {status.state} at {where}; go on: sojourn train {run.path}")
    return asdict(status)
