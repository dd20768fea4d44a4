"""The runs on all hosts: each host is asked at the same time; one that does not answer soon is named, with what it
said last."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from sojourn.errors import UserError
from sojourn.machine.gpus import GPU_USE_FIELDS, gpu_query, gpu_use_of_rows, split_rows
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
    tokens_per_second: float | None = None
    memory: float | None = None
    mfu: float | None = None


@dataclass
class HostAnswer:
    host: Host
    jobs: list[dict[str, Any]] = field(default_factory=list)
    gpus: list[dict[str, Any]] = field(default_factory=list)  # where they were asked for
    error: str | None = None


def list_remote_runs(patience: float = PATIENCE) -> tuple[list[RemoteRun], list[HostAnswer]]:
    """Newest first, and the hosts that did not answer."""
    answers = _ask_all(list(load_hosts().values()), patience)
    return runs_of(answers), [answer for answer in answers if answer.error is not None]


def runs_of(answers: list[HostAnswer], except_on: frozenset[str] = frozenset()) -> list[RemoteRun]:
    """Newest first. Runs that nobody reported are as they were last seen, but for those on `except_on`."""
    hosts, jobs = load_hosts(), {job.run: job for job in all_jobs()}
    runs: list[RemoteRun] = []
    for answer in answers:
        for report in answer.jobs:
            job = jobs.get(str(report["run"]))
            mine = job if job is not None and job.host == answer.host.name else None
            if mine is not None:
                mine.seen(report)
            runs.append(_remote_run(answer.host, report, job))
    asked = {(run.name, run.host) for run in runs}
    others = [job for job in jobs.values() if (job.run, job.host) not in asked and job.host not in except_on]
    runs += [_last_known(job, hosts.get(job.host)) for job in others]
    return sorted(runs, key=lambda run: -run.updated)


def ask_host(host: Host, patience: float, gpus: bool = False) -> HostAnswer:
    """`gpus`: how busy they are, too."""
    answer = _unanswered(host, patience)
    _ask(answer, patience, gpus)
    return answer


def _unanswered(host: Host, patience: float) -> HostAnswer:
    return HostAnswer(host, error=f"{host.name}: no answer within {patience:g} s")


def _ask_all(hosts: list[Host], patience: float) -> list[HostAnswer]:
    answers = [_unanswered(host, patience) for host in hosts]
    threads = [threading.Thread(target=_ask, args=(answer, patience), daemon=True) for answer in answers]
    for thread in threads:
        thread.start()
    until = time.monotonic() + patience
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    return [HostAnswer(answer.host, list(answer.jobs), error=answer.error) for answer in answers]


def _ask(answer: HostAnswer, patience: float, gpus: bool = False) -> None:
    from sojourn.remote.connect import connect

    host, paths = answer.host, BoxPaths(answer.host)
    try:
        connection = connect(host, timeout=patience)
        try:
            argv = [host.python or "python3", f"{paths.tools}/report.py", host.home]
            done = connection.run(argv, timeout=patience)
            if gpus:
                asked = connection.run(gpu_query(GPU_USE_FIELDS), timeout=patience)
                rows = split_rows(asked.stdout.decode(errors="replace")) if asked.code == 0 else []
                answer.gpus = gpu_use_of_rows(rows)
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
        report.get("tokens_per_second"), report.get("memory"), report.get("mfu"),
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
