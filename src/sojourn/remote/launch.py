"""One command from the laptop to the model at home: plan, prepare, check the box, install, send, start, follow, pull.

Every step can be repeated: a second `launch` of the same run goes on where the first was cut off. Once the supervisor
runs on the box, nothing here matters to the run.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sojourn.config.load import Loaded, load_run
from sojourn.config.messages import printable
from sojourn.config.schema import RunConfig
from sojourn.errors import RunFailed, Stopped, UserError
from sojourn.remote.bootstrap import bootstrap
from sojourn.remote.box_client import Box
from sojourn.remote.connection import ConnectionLost, HostUnreachable
from sojourn.remote.follow import Follower, describe_end, is_terminal, read_report
from sojourn.remote.home_mirror import HomeMirror
from sojourn.remote.hosts import Host, get_host
from sojourn.remote.job import BoxPaths, Job, find_job
from sojourn.remote.portability import Destination, Shipment, make_shipment
from sojourn.remote.pull import note_copies, pull_run
from sojourn.remote.spec import Terms, platform_facts, write_job
from sojourn.remote.state import send_state
from sojourn.run.home import run_folder

Say = Callable[[str], None]
_PROGRAMS = ("supervisor.py", "report.py")  # of remote/box/
_SOURCES = Path(__file__).parent / "box"
_PATIENCE = 600.0  # seconds without a connection before this gives up watching
_PATIENCE_WITH_NEXT = 120.0  # where another host can take over


@dataclass(frozen=True)
class Options:
    """`detach`: return once the run trains. `prepare_here`: the laptop prepares the data where it can."""

    terms: Terms
    detach: bool = False
    allow_secrets: bool = False
    prepare_here: bool = True
    install_torch: bool = False


def launch(args: list[str], on: tuple[str, ...], options: Options, say: Say, show: Callable[[bytes], None]) -> None:
    """Raises Stopped or RunFailed where the run ends so."""
    hosts = [get_host(name) for name in on]
    for host in hosts:
        options.terms.check(host)
    loaded = load_run(args)
    for note in loaded.notes:
        say(f"note: {note}")
    job = _job_of(loaded, args, hosts, options)
    remaining = [host for host in hosts if host.name in _remaining(job)]
    for host, following in zip(remaining, [*remaining[1:], None], strict=True):
        job = _on_host(job, host)
        try:
            _launch_on(host, job, loaded.config, options, following is not None, say, show)
            return
        except (HostUnreachable, ConnectionLost) as error:
            if following is None:
                raise
            say(f"{error}; {job.run} goes on on {following.name}")


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
    host: Host, job: Job, config: RunConfig, options: Options, has_next: bool, say: Say, show: Callable[[bytes], None]
) -> None:
    """`has_next`: another host takes over when this one is lost, so its checkpoints are brought home meanwhile."""
    say(plan_line(config, host, options.terms))
    shipment = make_shipment(
        config, destination(host), allow_secrets=options.allow_secrets, prepare=options.prepare_here, say=say
    )
    shipment.check()
    for note in shipment.notes:
        say(f"note: {note}")
    with Box(host, say=say, patience=_PATIENCE_WITH_NEXT if has_next else _PATIENCE) as box:
        if not _is_running(box, host, job):
            if job.spent_before or job.seconds_before:
                send_state(box, host, job, say)
            start(box, job, shipment, options, say)
        job.save()
        with HomeMirror(host, job) if has_next else nullcontext():
            finish(box, host, job, options, say, show)


def _is_running(box: Box, host: Host, job: Job) -> bool:
    if box.read_bytes(f"{BoxPaths(host, job.run).job}/status.json") is None:
        return False
    return read_report(box, host, job.run)["state"] in ("running", "starting", "holding")


def start(box: Box, job: Job, shipment: Shipment, options: Options, say: Say) -> None:
    """Installs, sends and starts; the box needs nobody afterwards."""
    python = bootstrap(box, box.host, say, install_torch=options.install_torch)
    send_shipment(box, shipment)
    write_job(box, job, options.terms, shipment.config, python)
    job.save()
    start_supervisor(box, job, python.python)
    say(f"{job.run} runs on {box.host.name}, whatever happens to this machine (logs: sojourn logs {job.run} -f)")


def send_shipment(box: Box, shipment: Shipment) -> None:
    """Our programs, the run's files, and last the mark that its prepared data is complete."""
    tools = BoxPaths(box.host).tools
    for name in _PROGRAMS:
        box.write_bytes(f"{tools}/{name}", (_SOURCES / name).read_bytes())
    for items in (shipment.items, shipment.last_items):
        if items:
            box.push(list(items), box.progress(f"sending {len(items)} files to {box.host.name}"))


def start_supervisor(box: Box, job: Job, python: str) -> None:
    paths = BoxPaths(box.host, job.run)
    done = box.run([python, f"{paths.tools}/supervisor.py", "start", paths.job], timeout=60)
    if done.code != 0:
        why = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise RunFailed(
            f"{box.host.name}: the supervisor did not start: {why}; its log is {paths.job}/logs/supervisor.log"
        )


def finish(box: Box, host: Host, job: Job, options: Options, say: Say, show: Callable[[bytes], None]) -> None:
    """Follows the run to its end (or, detached, to its first steps) and brings the model home."""
    follower = Follower(box, host, job.run, show, attached=not options.detach)
    report = follower.until(_trains if options.detach else _has_ended)
    job = job.seen(report)
    if options.detach and not is_terminal(report):
        say(f"{job.run} trains on {host.name}: step {report['step']:,} of {report['total_steps']:,}")
        return
    if report["final"]:
        bring_home(box, host, job, report, say)
        report = follower.until(is_terminal)
        job.seen(report)
    end(job, host, report, say)


def bring_home(box: Box, host: Host, job: Job, report: dict[str, Any], say: Say) -> None:
    """The final model; the box may power off once it has the mark that this leaves there."""
    pull_run(box, host, job.run, Path(job.folder), "final", report, box.progress("bringing the model home"))
    note_copies(box, host, job)
    replace(job, pulled=True).seen(report)
    say(f"the model is at home: {Path(job.folder) / 'final'} (sojourn chat {job.folder})")


def end(job: Job, host: Host, report: dict[str, Any], say: Say) -> None:
    line = describe_end(job.run, host.name, report)
    if report["state"] == "done":
        say(line)
        _say_meter(host, report, say)
        return
    _say_meter(host, report, say)
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


def plan_line(config: RunConfig, host: Host, terms: Terms) -> str:
    """Memory, time and money on this host; refused where it cannot fit."""
    if host.gpu is None:
        return f"{host.name} shows no GPU: no plan (sojourn plan {config.name} plans for GPUs)"
    from sojourn.catalog.gpus import find_gpu
    from sojourn.config.load import with_settings
    from sojourn.plan.offers import make_plan

    price = terms.price_on(host)
    priced = with_settings(config, {"limits.price_per_hour": str(price)}) if price is not None else config
    try:
        gpu = find_gpu(host.gpu)
    except UserError:
        return f"{host.gpu} is not in the catalogue: no plan for it"
    found = make_plan(priced, [gpu])
    offer = next((offer for offer in found.offers if offer.fits), None)
    if offer is None or offer.fit is None:
        why = next((offer.reason_not for offer in found.offers if offer.reason_not), "too small")
        raise UserError(
            f"{config.name} does not fit on {gpu.name}: {why}; see: sojourn plan {config.name} --gpu “{gpu.name}”"
        )
    return _describe_offer(offer, config, host, terms)


def _describe_offer(offer: Any, config: RunConfig, host: Host, terms: Terms) -> str:
    from sojourn.config.quantities import Duration

    memory = offer.fit.memory.device / 2**30
    seconds = offer.run_time.seconds if offer.run_time is not None else None
    price = terms.price_on(host)
    line = f"plan for {host.name} ({offer.gpu.name}): {memory:.1f} of {offer.gpu.memory_gib:.0f} GiB"
    if seconds is None:
        return line
    line += f", about {Duration(round(seconds / 60) * 60 or 60)}"
    if price is not None:
        cost = float(price.amount) * seconds / 3600
        line += f", {cost:.2f} {price.currency}".rstrip()
        if terms.budget is not None and cost > float(terms.budget.amount):
            line += f"; the budget of {terms.budget} ends it before: it will stop there, saved and resumable"
    return line


def destination(host: Host) -> Destination:
    disks = tuple(disk.path for disk in platform_facts(host).disks if disk.survives != "session")
    return Destination(host.home, host.gpus, disks)


def _trains(report: dict[str, Any]) -> bool:
    return is_terminal(report) or (report["phase"] == "train" and report["step"] > 0)


def _has_ended(report: dict[str, Any]) -> bool:
    return is_terminal(report) or report["state"] == "holding"
