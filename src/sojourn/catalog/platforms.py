"""The platforms of the catalogue: where GPUs are rented, what survives there, and when a session ends."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sojourn.catalog.tables import Number, Row, Whole, load_rows, to_row


@dataclass(frozen=True)
class Disk(Row):
    """A folder of a platform and what it outlives: a `session` (nothing), a `stop` of the machine, or its `release`."""

    path: str
    survives: Literal["session", "stop", "release"]
    size_gb: Number | None = None
    free_gb: Number | None = None
    kept_hours: Number | None = None
    inodes: Whole | None = None


@dataclass(frozen=True)
class PlatformFacts(Row):
    """One place to train: how it is recognised, what survives there, when it ends. See platforms.toml for the keys."""

    name: str
    source: str
    date: str
    title: str = ""
    grade: str = "C"
    limits: str = "none known"
    wiped: str = "nothing known"
    stop: str = "not known"
    reach: str = "ssh"
    env: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()
    home: tuple[str, ...] = ()
    fallback: tuple[str, ...] = ()
    persistent: tuple[str, ...] = ()
    volatile: tuple[str, ...] = ()
    read_only: tuple[str, ...] = ()
    disks: tuple[Disk, ...] = ()
    session_hours: Number | None = None
    idle_minutes: Number | None = None
    weekly_gpu_hours: Number | None = None
    released_after_days: Number | None = None
    currency: str | None = None
    no_gpu_per_hour: Number | None = None
    stop_command: str | None = None
    mount_hint: str | None = None
    turbo: str | None = None
    region: str | None = None
    note: str = ""


def platforms(user: Path | None = None) -> tuple[PlatformFacts, ...]:
    """Every platform, in the order of detection; `generic` matches nothing and means none of them."""
    return tuple(
        to_row(PlatformFacts, {"name": name, "title": name, **row}, f"{where}: platform.{name}", "platform")
        for name, (row, where) in load_rows("platform", user).items()
    )
