"""Follows a launched run to its end, brings the model home, and says whether the box still costs money."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from sojourn.errors import RunFailed, Stopped, UserError
from sojourn.remote.box_client import Box
from sojourn.remote.follow import Follower, describe_end, is_terminal
from sojourn.remote.hosts import Host
from sojourn.remote.job import Job
from sojourn.remote.pull import has_checkpoint, note_copies, pull_run
from sojourn.remote.spec import platform_facts

Say = Callable[[str], None]


def finish(box: Box, job: Job, detach: bool, say: Say, show: Callable[[bytes], None]) -> dict[str, Any]:
    """Follows the run to its end (or, detached, to its first steps) and brings the model home; the last report."""
    host = box.host
    follower = Follower(box, host, job.run, show, attached=not detach)
    report = follower.until(_trains if detach else _has_ended)
    job = job.seen(report)
    if detach and not is_terminal(report):
        say(f"{job.run} trains on {host.name}: step {report['step']:,} of {report['total_steps']:,}")
        return report
    if report["final"]:
        job = bring_home(box, job, report, say)
    elif report["state"] == "holding":
        _bring_checkpoint(box, job, report, say)
    if not is_terminal(report):
        report = follower.until(is_terminal)
        job.seen(report)
    _end(job, host, report, say)
    return report


def bring_home(box: Box, job: Job, report: dict[str, Any], say: Say) -> Job:
    """The final model; the box may power off once it has the mark that this leaves there."""
    host = box.host
    pull_run(box, host, job.run, Path(job.folder), "final", report, box.progress("bringing the model home"))
    note_copies(box, host, job)
    say(f"the model is at home: {Path(job.folder) / 'final'} (sojourn chat {job.folder})")
    return replace(job, pulled=True).seen(report)


def _bring_checkpoint(box: Box, job: Job, report: dict[str, Any], say: Say) -> None:
    """Of a run that ended before its time while the box waits for this laptop."""
    if has_checkpoint(box, box.host, job.run):
        names = pull_run(box, box.host, job.run, Path(job.folder), "checkpoint", report, box.progress("checkpoint"))
        say(f"its newest checkpoint is at home: {Path(job.folder) / names[-1]}")
    note_copies(box, box.host, job)


def _end(job: Job, host: Host, report: dict[str, Any], say: Say) -> None:
    line = describe_end(job.run, host.name, report)
    if report["state"] == "done":
        say(line)
        _say_meter(host, report, say)
        return
    _say_meter(host, report, say)
    if report["exit_code"] == 2:  # the trainer's own message says what to type
        raise UserError(line)
    raise (Stopped if report["state"] == "stopped" else RunFailed)(line)


def _say_meter(host: Host, report: dict[str, Any], say: Say) -> None:
    """Whether the box goes on costing money."""
    action = str(report["stop_action"])
    if action == "done":
        say(f"{host.name} powers off; {platform_facts(host).wiped}")
    elif host.price_per_hour:
        why = f" ({action})" if action.startswith("refused") else ""
        price = f"{host.price_per_hour:g} {host.currency}".strip()
        say(f"{host.name} is still on and costs {price} an hour{why}; let it go: sojourn release {host.name}")


def _trains(report: dict[str, Any]) -> bool:
    return is_terminal(report) or (report["phase"] == "train" and report["step"] > 0)


def _has_ended(report: dict[str, Any]) -> bool:
    return is_terminal(report) or report["state"] == "holding"
