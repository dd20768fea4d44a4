"""The runs on all hosts: each host is asked at the same time; one that does not answer soon is named, with what it
said last."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from sojourn.errors import UserError
from sojourn.remote.box.report import MARK
from sojourn.remote.hosts import Host, load_hosts
from sojourn.remote.job import BoxPaths, Job, all_jobs

PATIENCE = 2.0  # seconds for a host to answer


@dataclass(frozen=True)
class RemoteRun:
    """`state`: as the box says, or `unreachable`. `left`: seconds to the end; `projected`: money at the end."""

    name: str
    host: str
    state: str
    phase: str
    step: int
    total_steps: int
    loss: float | None
    seconds: float
    money: float
    currency: str
    left: float | None
    projected: float | None
    updated: float
    path: str
    message: str = ""
    at_home: bool = False


@dataclass
class HostAnswer:
    host: Host
    jobs: list[dict[str, Any]] = field(default_factory=list)
    error: str | None = None


def list_remote_runs(patience: float = PATIENCE) -> tuple[list[RemoteRun], list[HostAnswer]]:
    """Newest first, and the hosts that did not answer."""
    hosts, jobs = load_hosts(), {job.run: job for job in all_jobs()}
    answers = _ask_all(list(hosts.values()), patience)
    runs: list[RemoteRun] = []
    for answer in answers:
        for report in answer.jobs:
            job = jobs.get(str(report["run"]))
            mine = job if job is not None and job.host == answer.host.name else None
            if mine is not None:
                mine.seen(report)
            runs.append(_remote_run(answer.host, report, job))
    asked = {(run.name, run.host) for run in runs}
    silent = {answer.host.name: answer for answer in answers if answer.error is not None}
    runs += [_last_known(job, hosts.get(job.host)) for job in jobs.values() if (job.run, job.host) not in asked]
    return sorted(runs, key=lambda run: -run.updated), list(silent.values())


def _ask_all(hosts: list[Host], patience: float) -> list[HostAnswer]:
    answers = [HostAnswer(host, error=f"{host.name}: no answer within {patience:g} s") for host in hosts]
    threads = [threading.Thread(target=_ask, args=(answer, patience), daemon=True) for answer in answers]
    for thread in threads:
        thread.start()
    until = time.monotonic() + patience
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    return [HostAnswer(answer.host, list(answer.jobs), answer.error) for answer in answers]


def _ask(answer: HostAnswer, patience: float) -> None:
    from sojourn.remote.connection import connect

    host, paths = answer.host, BoxPaths(answer.host)
    try:
        connection = connect(host, timeout=patience)
        try:
            argv = [host.python or "python3", f"{paths.tools}/report.py", host.home]
            done = connection.run(argv, timeout=patience)
        finally:
            connection.close()
    except UserError as error:
        answer.error = str(error)
        return
    for line in done.stdout.decode(errors="replace").splitlines():
        if line.startswith(MARK):
            answer.jobs = json.loads(line[len(MARK) :])["jobs"]
    answer.error = None  # a box without our programs has no runs of ours


def _remote_run(host: Host, report: dict[str, Any], job: Job | None) -> RemoteRun:
    left = None
    if report["state"] in ("running", "starting") and report["seconds_a_step"] is not None:
        left = (report["total_steps"] - report["step"]) * report["seconds_a_step"]
    projected = None
    if left is not None and host.price_per_hour is not None:
        projected = report["money"] + left * host.price_per_hour / 3600
    message = (report["message"] or report["train_message"]) if report["state"] != "done" else ""
    if report["state"] == "lost":
        message = f"its supervisor ended without a word; go on: sojourn launch … --on {host.name}"
    is_here = job is not None and job.host == host.name
    at_home = job is not None and is_here and job.pulled
    if job is not None and not is_here:
        message = f"moved to {job.host}"
    return RemoteRun(
        str(report["run"]), host.name, str(report["state"]), str(report["phase"]), report["step"],
        report["total_steps"], report["loss"], report["seconds"], report["money"],
        str(report["currency"] or host.currency), left, projected, report["updated"],
        f"{host.name}:{BoxPaths(host, str(report['run'])).run_folder}", message, at_home,
    )  # fmt: skip


def _last_known(job: Job, host: Host | None) -> RemoteRun:
    """Of a host that does not answer, or does not know the run any more."""
    last = job.last
    message = f"last seen {time.strftime('%Y-%m-%d %H:%M', time.localtime(last['seen']))}" if "seen" in last else ""
    was = f"{last['state']} when " if last.get("state") else ""
    return RemoteRun(
        job.run, job.host, "unreachable" if host is not None else "host removed", str(last.get("phase", "")),
        int(last.get("step", 0)), int(last.get("total_steps", 0)), last.get("loss"), float(last.get("seconds", 0.0)),
        float(last.get("money", 0.0)), str(last.get("currency", "")), None, None, float(last.get("updated", 0.0)),
        f"{job.host}:{BoxPaths(host, job.run).run_folder}" if host is not None else job.folder, was + message,
        job.pulled,
    )  # fmt: skip
