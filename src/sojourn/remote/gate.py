"""The shutdown gate on the laptop: whether a box may be powered off or released without losing a model.

The decision itself is in `box/supervisor.py`, which the box runs too. Here it gets what only the laptop knows: the
platform's disks, from the catalogue, and which copies are at home.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from sojourn.catalog.platforms import platforms
from sojourn.remote.box import supervisor
from sojourn.remote.box.supervisor import Verdict, digest_of, gate, hash_files, place_survives, with_home_copies
from sojourn.remote.box_client import Box
from sojourn.remote.hosts import Host
from sojourn.remote.job import Job

__all__ = ["Action", "check_gate", "copies_at_home", "disks_of", "place_survives", "pulled_record", "with_home_copies"]

Action = Literal["power_off", "release"]
Item = dict[str, Any]


def disks_of(platform: str) -> list[dict[str, Any]]:
    """What each disk of a platform survives, as spec.json has it; none for an unknown platform."""
    facts = next((facts for facts in platforms() if facts.name == platform), None)
    return [
        {"path": disk.path, "survives": disk.survives, "kept_hours": disk.kept_hours}
        for disk in (facts.disks if facts else ())
    ]


def copies_at_home(items: Iterable[Item], folder: Path) -> dict[str, str]:
    """Name → digest of every item of which `folder` has a byte-identical copy: each byte here is read."""
    found = {}
    for item in items:
        copy = folder / str(item.get("name"))
        if copy.is_dir() and digest_of(hash_files(copy)) == item.get("digest"):
            found[str(item["name"])] = str(item["digest"])
    return found


def pulled_record(copies: dict[str, str]) -> bytes:
    """JOBDIR/pulled: what is safe at home, for the box."""
    return (json.dumps({"verified": copies}) + "\n").encode()


def check_gate(box: Box, host: Host, jobs: Iterable[Job], action: Action) -> str | None:
    """Why this box must stay, with what to type; None where it may go. The box reads every checkpoint and model on it,
    and so does the laptop with its copies."""
    if not supervisor.is_known_platform(host.platform):
        return gate(host.platform, action, [], []).reason
    disks = disks_of(host.platform)
    report = _inspect(box, host, [disk["path"] for disk in disks])
    if report is None:
        return f"{host.name} could not list its checkpoints and models; type: sojourn host check {host.name}"
    if report["running"]:
        name = report["running"][0]
        return f"{name} still runs on {host.name}; wait for it, or type: sojourn stop {name}"
    items: list[Item] = report["items"]
    for job in jobs:
        of_job = [item for item in items if item["run"] == job.run]
        others = [item for item in items if item["run"] != job.run]
        items = others + with_home_copies(of_job, copies_at_home(of_job, Path(job.folder)))
    real = [{**disk, "path": report["real"].get(disk["path"], disk["path"])} for disk in disks]
    verdict: Verdict = gate(host.platform, action, real, items)
    return None if verdict.allowed else verdict.reason


def _inspect(box: Box, host: Host, paths: list[str]) -> dict[str, Any] | None:
    """What the supervisor of this version finds there: it travels through standard input."""
    argv = [host.python or "python3", "-", "inspect", host.home, *paths]
    done = box.run(argv, input=Path(supervisor.__file__).read_bytes())
    try:
        found = json.loads(done.stdout.decode(errors="replace").strip().splitlines()[-1])
    except (ValueError, IndexError):
        return None
    return (
        found if done.code == 0 and isinstance(found, dict) and found.keys() >= {"running", "items", "real"} else None
    )
