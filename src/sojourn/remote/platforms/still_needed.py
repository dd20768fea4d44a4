"""Why a rented machine may not be stopped or released: a run of ours there goes on, or would be lost."""

from __future__ import annotations

from collections.abc import Callable

from sojourn.remote.gate import Action, disks_of, place_survives
from sojourn.remote.hosts import Host, load_hosts
from sojourn.remote.job import TERMINAL, Job, runs_on
from sojourn.remote.platforms.base import Cloud, NotFound


def still_needed(cloud: Cloud, action: Action) -> Callable[[str], str | None]:
    """For an instance's id: the reason and what to type, or None. It asks no box: the last reports decide, and what
    nobody has reported is taken for needed."""

    def reason(instance_id: str) -> str | None:
        for host in load_hosts().values():
            jobs = runs_on(host.name)
            if jobs and _may_be(host, cloud, instance_id) and (why := _why(host, jobs, action)):
                return why
        return None

    return reason


def _why(host: Host, jobs: list[Job], action: Action) -> str | None:
    running = [job.run for job in jobs if not job.pulled and job.last.get("state") not in TERMINAL]
    if running:
        return f"{running[0]} on host {host.name} may still be running; end it with: sojourn stop {running[0]}"
    lost = [job.run for job in jobs if not job.pulled]
    home = {"kind": "disk", "path": host.home, "verified": True}
    if not lost or (action == "power_off" and place_survives(home, action, disks_of(host.platform))):
        return None
    return f"{', '.join(lost[:5])} on host {host.name} has no copy here; bring it home: sojourn pull {lost[0]}"


def _may_be(host: Host, cloud: Cloud, instance_id: str) -> bool:
    """Whether a host is that instance. One that was added by its ssh line is known by its address; of a machine that
    is off there is none, and then any host on the platform may be it."""
    if host.instance is not None or host.platform != cloud.name:
        return host.instance == instance_id
    try:
        there = cloud.status(instance_id)
    except NotFound:
        return False
    return there.address is None or (there.address, there.port) == (host.address, host.port)
