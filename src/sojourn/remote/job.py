"""Runs that were launched on hosts, as the laptop remembers them: one JSON file each in the configuration folder.

The box has the truth; this says where to ask. `last` is what it answered last, for when it does not answer.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from sojourn.config.messages import did_you_mean
from sojourn.errors import UserError
from sojourn.remote.hosts import Host, config_folder
from sojourn.storage.files import read_json_object, write_json

TERMINAL = ("done", "stopped", "failed", "lost")


@dataclass(frozen=True)
class Job:
    """`host`: where it is now; `hosts`: where it may go on when that one vanishes. `folder`: its run folder here.
    `args`: as typed after `launch`. `spent_before`, `seconds_before`: money and time on earlier hosts. `models`: those
    of this machine, by their paths on the box."""

    run: str
    host: str
    hosts: tuple[str, ...]
    folder: str
    args: tuple[str, ...]
    created: float = field(default_factory=time.time)
    budget: float | None = None
    deadline: float | None = None
    currency: str = ""
    stop_when_done: bool = False
    spent_before: float = 0.0
    seconds_before: float = 0.0
    pulled: bool = False
    models: dict[str, str] = field(default_factory=dict)
    last: dict[str, Any] = field(default_factory=dict)

    def save(self) -> None:
        folder = _folder()
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / f"{self.run}.json", asdict(self))

    def seen(self, report: dict[str, Any]) -> Job:
        """With what the box has just reported, saved."""
        job = replace(self, last={**report, "seen": time.time()})
        job.save()
        return job

    def forget(self) -> None:
        (_folder() / f"{self.run}.json").unlink(missing_ok=True)


@dataclass(frozen=True)
class BoxPaths:
    """Where things of a run are on a host."""

    host: Host
    run: str = ""

    @property
    def ours(self) -> str:
        return f"{self.host.home}/.sojourn"

    @property
    def tools(self) -> str:
        return f"{self.ours}/box"

    @property
    def files(self) -> str:
        return f"{self.ours}/files"

    @property
    def prepared(self) -> str:
        return f"{self.host.home}/prepared"

    @property
    def job(self) -> str:
        return f"{self.ours}/jobs/{self.run}"

    @property
    def run_folder(self) -> str:
        return f"{self.host.home}/runs/{self.run}"


def find_job(run: str) -> Job | None:
    return _read(_folder() / f"{run}.json")


def get_job(run: str) -> Job:
    job = find_job(run)
    if job is None:
        names = [job.run for job in all_jobs()]
        hint = did_you_mean(run, names) or (f"; there are: {', '.join(names[:10])}" if names else "")
        raise UserError(f"no run called “{run}” was launched from here{hint} (see: sojourn runs)")
    return job


def all_jobs() -> list[Job]:
    """Newest first; files that cannot be read are no jobs."""
    folder = _folder()
    found = [_read(path) for path in sorted(folder.glob("*.json"))] if folder.is_dir() else []
    return sorted((job for job in found if job is not None), key=lambda job: -job.created)


def runs_on(host: str) -> list[Job]:
    return [job for job in all_jobs() if job.host == host]


def _folder() -> Path:
    return config_folder() / "runs"


def _read(path: Path) -> Job | None:
    values = read_json_object(path)
    known = {each.name: values[each.name] for each in fields(Job) if each.name in values}
    if not all(isinstance(known.get(name), str) for name in ("run", "host", "folder")):
        return None
    lists = {name: tuple(map(str, known.get(name) or ())) for name in ("hosts", "args")}
    return Job(**{**known, **lists})
