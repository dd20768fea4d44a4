"""One command from the laptop to the model at home: plan, prepare, check the box, install, send, start, follow, pull.

Every step can be repeated: a second `launch` of the same run goes on where the first was cut off. Once the supervisor
runs on the box, nothing here matters to the run.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from typing import Any

from sojourn.config.load import Loaded, load_run
from sojourn.config.messages import printable
from sojourn.config.schema import RunConfig
from sojourn.errors import UserError
from sojourn.remote.box_client import Box
from sojourn.remote.connection import ConnectionLost, HostUnreachable
from sojourn.remote.finish import finish
from sojourn.remote.follow import read_report
from sojourn.remote.home_mirror import HomeMirror
from sojourn.remote.hosts import Host, get_host
from sojourn.remote.job import BoxPaths, Job, find_job
from sojourn.remote.nodes import start_nodes
from sojourn.remote.plan_line import plan_line
from sojourn.remote.portability import make_shipment
from sojourn.remote.start import Options, destination, start
from sojourn.remote.state import newest_at_home, send_state
from sojourn.remote.without_ssh import PLACES, launch_without_ssh
from sojourn.run.folder import RunFolder
from sojourn.run.home import run_folder

Say = Callable[[str], None]
Show = Callable[[bytes], None]
_PATIENCE = 600.0  # seconds without a connection before this gives up watching
_PATIENCE_WITH_NEXT = 120.0  # where another host can take over


def launch(args: list[str], on: tuple[str, ...], options: Options, say: Say, show: Show) -> dict[str, Any]:
    """The last report of the box. Raises Stopped or RunFailed where the run ends so."""
    elsewhere = [name for name in on if name in PLACES]
    if elsewhere and len(on) > 1:
        raise UserError(f"--on: {elsewhere[0]} stands alone; name it, or hosts of: sojourn host list")
    hosts = [] if elsewhere else [get_host(name) for name in on]
    for host in hosts:
        options.terms.check(host)
    loaded = load_run(args)
    for note in loaded.notes:
        say(f"note: {note}")
    if elsewhere:
        return launch_without_ssh(elsewhere[0], loaded, options, say)
    job = _job_of(loaded, args, hosts, options)
    if options.nodes > 1:
        return _launch_on_nodes(hosts, job, loaded.config, options, say, show)
    remaining = [host for host in hosts if host.name in _remaining(job)]
    for host, following in zip(remaining, [*remaining[1:], None], strict=True):
        job = _on_host(job, host)
        try:
            return _launch_on(host, job, loaded.config, options, following is not None, say, show)
        except (HostUnreachable, ConnectionLost) as error:
            if following is None:
                raise
            say(f"{error}; {job.run} goes on on {following.name}")
    raise AssertionError("the last host returns or raises")


def _on_host(job: Job, host: Host) -> Job:
    """The run there. What it cost where it was before is carried over."""
    if job.host == host.name:
        return job
    cost = find_job(job.run) or job
    money, seconds = (float(cost.last.get(key, 0.0)) for key in ("money", "seconds"))
    return replace(job, host=host.name, spent_before=money, seconds_before=seconds)


def _remaining(job: Job) -> tuple[str, ...]:
    """The host where the run is, then those where it may go on."""
    return job.hosts[job.hosts.index(job.host) :] if job.host in job.hosts else (job.host, *job.hosts)


def _job_of(loaded: Loaded, args: list[str], hosts: list[Host], options: Options) -> Job:
    """The record of this run: that of an earlier `launch`, which goes on, or a new one."""
    run = str(loaded.config.name)
    before = find_job(run)
    terms, names = options.terms, tuple(host.name for host in hosts)
    settled = {
        "hosts": names,
        "args": tuple(args),
        "budget": None if terms.budget is None else float(terms.budget.amount),
        "deadline": terms.deadline,
        "stop_when_done": terms.stop_when_done,
    }
    if before is None:
        folder = run_folder(run, loaded.config.save.folder).path.absolute()
        if RunFolder(folder).exists():
            raise UserError(f"{folder} holds a run of this machine already; give this one another name: name={run}-2")
        return Job(run=run, host=names[0], folder=str(folder), **settled)  # type: ignore[arg-type]
    if before.host not in names:
        raise UserError(
            f"{run} is on {before.host} already; type: sojourn move {run} --to {names[0]}, "
            f"or give this one another name: name={run}-2"
        )
    if before.args != tuple(args) and before.last.get("state") in ("running", "starting", "holding"):
        raise UserError(
            f"{run} runs on {before.host} with other settings ({printable(' '.join(before.args), 200)}); "
            f"stop it first (sojourn stop {run}), or give this one another name: name={run}-2"
        )
    return replace(before, **settled)  # type: ignore[arg-type]


def _launch_on(
    host: Host, job: Job, config: RunConfig, options: Options, has_next: bool, say: Say, show: Show
) -> dict[str, Any]:
    """`has_next`: another host takes over when this one is lost, so its checkpoints are brought home meanwhile."""
    say(plan_line(config, host, options.terms))
    shipment = make_shipment(
        config, destination(host), allow_secrets=options.allow_secrets, prepare=options.prepare_here, say=say
    )
    shipment.check()
    job = replace(job, models={**job.models, **shipment.models})
    for note in shipment.notes:
        say(f"note: {note}")
    with Box(host, say=say, patience=_PATIENCE_WITH_NEXT if has_next else _PATIENCE) as box:
        if not _is_running(box, host, job):
            if box.read_bytes(f"{BoxPaths(host, job.run).run_folder}/identity.json") is None and newest_at_home(job):
                send_state(box, host, job, say)
            start(box, job, shipment, options, say)
        else:
            _name_unused_terms(box, job, options, say)
        job.save()
        with HomeMirror(host, job) if has_next else nullcontext():
            return finish(box, job, options.detach, say, show)


def _name_unused_terms(box: Box, job: Job, options: Options, say: Say) -> None:
    """A run that is under way keeps the terms that it was started with."""
    spec = json.loads(box.read_bytes(f"{BoxPaths(box.host, job.run).job}/spec.json") or b"{}")
    terms = options.terms
    budget = None if terms.budget is None else float(terms.budget.amount)
    given = {"--budget": budget not in (None, spec.get("budget")), "--deadline": terms.deadline is not None,
             "--stop-when-done": terms.stop_when_done and not spec.get("stop", {}).get("when_done")}  # fmt: skip
    unused = [option for option, differs in given.items() if differs]
    say(f"{job.run} runs on {box.host.name} already")
    if unused:
        tail = f"to change it: sojourn stop {job.run}, then launch again"
        say(f"note: {', '.join(unused)} is not used: the run keeps what it was started with; {tail}")


def _launch_on_nodes(
    hosts: list[Host], job: Job, config: RunConfig, options: Options, say: Say, show: Show
) -> dict[str, Any]:
    if len(hosts) < options.nodes:
        raise UserError(f"--nodes {options.nodes}: --on names {len(hosts)}; name as many hosts, separated by commas")
    with ExitStack() as stack:
        boxes = [stack.enter_context(Box(host, say=say, patience=_PATIENCE)) for host in hosts[: options.nodes]]
        if not _is_running(boxes[0], hosts[0], job):
            start_nodes(boxes, job, config, options, say)
        job.save()
        return finish(boxes[0], job, options.detach, say, show)


def _is_running(box: Box, host: Host, job: Job) -> bool:
    if box.read_bytes(f"{BoxPaths(host, job.run).job}/status.json") is None:
        return False
    return read_report(box, host, job.run)["state"] in ("running", "starting", "holding")
