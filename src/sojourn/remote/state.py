"""The state of a remote run: stopping it, bringing its newest checkpoint home, sending it to another host."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from sojourn.errors import RunFailed
from sojourn.remote.box_client import Box
from sojourn.remote.follow import Follower, is_terminal, read_report
from sojourn.remote.hosts import Host
from sojourn.remote.job import BoxPaths, Job
from sojourn.remote.pull import RECORDS
from sojourn.run.checkpoints import find_damage, list_checkpoints
from sojourn.run.folder import RunFolder

Say = Callable[[str], None]


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
    box.remove(BoxPaths(host, job.run).job)  # of an earlier stay here, whose cost is in what the run has cost so far
    here = Path(job.folder)
    if newest is None:
        say(f"{job.run} has no checkpoint yet: it starts from the beginning on {host.name}")
        return
    items = [(here / name, f"{there}/{name}") for name in RECORDS if (here / name).is_file()]
    items.append((newest, f"{there}/checkpoints/{newest.name}"))
    box.push(items, box.progress(f"sending {newest.name} to {host.name}"), durable=True)
    box.write_bytes(f"{there}/checkpoints/latest", (newest.name + "\n").encode())
