"""Moves a run to another host: stop there, bring its newest checkpoint home, send it on, resume. Same run, same id."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from sojourn.config.load import load_run
from sojourn.errors import RunFailed, UserError
from sojourn.remote.box_client import Box
from sojourn.remote.connection import ConnectionLost, HostUnreachable
from sojourn.remote.follow import Follower, is_terminal, read_report
from sojourn.remote.hosts import Host, get_host
from sojourn.remote.job import BoxPaths, Job, get_job
from sojourn.remote.launch import Options, destination, finish, plan_line, start
from sojourn.remote.portability import make_shipment
from sojourn.remote.pull import RECORDS, pull_run
from sojourn.run.checkpoints import find_damage, list_checkpoints
from sojourn.run.folder import RunFolder

Say = Callable[[str], None]


def move(run: str, to: str, options: Options, say: Say, show: Callable[[bytes], None]) -> None:
    job, target = get_job(run), get_host(to)
    if job.host == target.name:
        raise UserError(f"{run} is on {to} already; start it there again: sojourn launch … --on {to}")
    options.terms.check(target)
    job = _bring_state_home(job, say)
    config = load_run(list(job.args)).config
    say(plan_line(config, target, options.terms))
    shipment = make_shipment(config, destination(target), allow_secrets=options.allow_secrets, say=say)
    shipment.check()
    moved = replace(job, host=target.name, hosts=(target.name, *(name for name in job.hosts if name != target.name)))
    with Box(target, say=say) as box:
        send_state(box, target, moved, say)
        start(box, target, moved, shipment, options, say)
        moved.save()
        finish(box, target, moved, options, say, show)


def _bring_state_home(job: Job, say: Say) -> Job:
    """Its newest checkpoint and its records are here afterwards, and it trains no more there. A host that is gone is
    no obstacle where a checkpoint is at home."""
    host = get_host(job.host)
    try:
        with Box(host, say=say, patience=30) as box:
            report = stop(box, host, job.run, say)
            if report["total_steps"]:
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


def stop(box: Box, host: Host, run: str, say: Say) -> dict[str, Any]:
    """Asks the run to save and end, and waits until it has."""
    paths = BoxPaths(host, run)
    report = read_report(box, host, run)
    if is_terminal(report):
        return report
    python = host.python or "python3"
    done = box.run([python, f"{paths.tools}/supervisor.py", "stop", paths.job], timeout=60)
    if done.code != 0:
        raise RunFailed(f"{host.name}: {done.stderr.decode(errors='replace').strip()}")
    say(f"{run} saves and stops on {host.name}")
    return Follower(box, host, run, lambda data: None).until(is_terminal)


def newest_at_home(job: Job) -> Path | None:
    good = [path for path in list_checkpoints(RunFolder(Path(job.folder)).checkpoints) if find_damage(path) is None]
    return good[-1] if good else None


def send_state(box: Box, host: Host, job: Job, say: Say) -> None:
    """The run folder as it is at home: records and the newest good checkpoint."""
    newest, there = newest_at_home(job), BoxPaths(host, job.run).run_folder
    here = Path(job.folder)
    if newest is None:
        say(f"{job.run} has no checkpoint yet: it starts from the beginning on {host.name}")
        return
    items = [(here / name, f"{there}/{name}") for name in RECORDS if (here / name).is_file()]
    box.push_folder(newest, f"{there}/checkpoints/{newest.name}", box.progress(f"sending {newest.name} to {host.name}"))
    box.push(items)
    box.write_bytes(f"{there}/checkpoints/latest", (newest.name + "\n").encode())
