"""Moves a run to another host: stop there, bring its newest checkpoint home, send it on, resume. Same run, same id."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from sojourn.config.load import load_run
from sojourn.errors import UserError
from sojourn.remote.box_client import Box
from sojourn.remote.connection import ConnectionLost, HostUnreachable
from sojourn.remote.finish import finish
from sojourn.remote.hosts import get_host
from sojourn.remote.job import Job, get_job
from sojourn.remote.plan_line import plan_line
from sojourn.remote.portability import make_shipment
from sojourn.remote.pull import has_checkpoint, pull_run
from sojourn.remote.start import Options, destination, start
from sojourn.remote.state import newest_at_home, send_state, stop

Say = Callable[[str], None]


def move(run: str, to: str, options: Options, say: Say, show: Callable[[bytes], None]) -> dict[str, Any]:
    job, target = get_job(run), get_host(to)
    if job.host == target.name:
        raise UserError(f"{run} is on {to} already; start it there again: sojourn launch … --on {to}")
    options.terms.check(target)
    job = _bring_state_home(job, say)
    config = load_run(list(job.args)).config
    say(plan_line(config, target, options.terms))
    shipment = make_shipment(config, destination(target), allow_secrets=options.allow_secrets, say=say)
    shipment.check()
    job = replace(job, models={**job.models, **shipment.models})
    moved = replace(job, host=target.name, hosts=(target.name, *(name for name in job.hosts if name != target.name)))
    with Box(target, say=say) as box:
        send_state(box, target, moved, say)
        start(box, moved, shipment, options, say)
        moved.save()
        return finish(box, moved, options.detach, say, show)


def _bring_state_home(job: Job, say: Say) -> Job:
    """Its newest checkpoint and its records are here afterwards, and it trains no more there. A host that is gone is
    no obstacle where a checkpoint is at home."""
    host = get_host(job.host)
    try:
        with Box(host, say=say, patience=30) as box:
            report = stop(box, host, job.run, say)
            if has_checkpoint(box, host, job.run):
                pull_run(
                    box,
                    host,
                    job.run,
                    Path(job.folder),
                    "checkpoint",
                    report,
                    box.progress("bringing the checkpoint home"),
                )
    except (HostUnreachable, ConnectionLost) as error:
        newest = newest_at_home(job)
        if newest is None:
            raise UserError(f"{error}; no checkpoint of {job.run} is at home, so it cannot go on elsewhere") from None
        say(f"{host.name} does not answer; going on from {newest.name}, which is at home")
        report = job.last
    cost, seconds = float(report.get("money", 0.0)), float(report.get("seconds", 0.0))
    return replace(job, spent_before=cost, seconds_before=seconds).seen(report)
