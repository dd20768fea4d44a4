"""The platforms of the catalogue: where GPUs are rented, what survives there, and when a session ends."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unicodedata import normalize

from sojourn.catalog.tables import load_rows, read_once, to_row
from sojourn.config.messages import did_you_mean, printable
from sojourn.errors import UserError


@dataclass(frozen=True)
class Disk:
    """A folder of a platform and what it outlives: a `session` (nothing), a `stop` of the machine, or its `release`."""

    path: str
    survives: str
    size_gb: float | None = None
    free_gb: float | None = None
    kept_hours: float | None = None
    inodes: int | None = None


@dataclass(frozen=True)
class PlatformFacts:
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
    addresses: tuple[str, ...] = ()
    home: tuple[str, ...] = ()
    fallback: tuple[str, ...] = ()
    persistent: tuple[str, ...] = ()
    volatile: tuple[str, ...] = ()
    read_only: tuple[str, ...] = ()
    disks: tuple[Disk, ...] = ()
    session_hours: float | None = None
    idle_minutes: float | None = None
    weekly_gpu_hours: float | None = None
    most_gpus: int | None = None
    released_after_days: float | None = None
    currency: str | None = None
    no_gpu_per_hour: float | None = None
    stop_command: str | None = None
    stop_releases: bool = False
    mount_hint: str | None = None
    turbo: str | None = None
    region: str | None = None
    package_indexes: tuple[str, ...] = ()
    hf_mirrors: tuple[str, ...] = ()
    note: str = ""


@read_once
def platforms(user: Path | None = None) -> tuple[PlatformFacts, ...]:
    """Every platform, in the order of detection; `generic` matches nothing and means none of them."""
    return tuple(
        _platform(name, row, f"{where}: platform.{name}") for name, (row, where) in load_rows("platform", user).items()
    )


def find_platform(name: str) -> PlatformFacts:
    """By its name or title, or by a word of its title that no other has: 恒源云."""
    rows, typed = platforms(), normalize("NFKC", name).strip().casefold()
    for spelled in (_names, _title_words):
        meant = [row for row in rows if typed in spelled(row)]
        if len(meant) == 1:
            return meant[0]
    names = [row.name for row in rows]
    raise UserError(f"no platform called “{printable(name)}”{did_you_mean(name, names)} (of {', '.join(names)})")


def _names(row: PlatformFacts) -> set[str]:
    return {row.name.casefold(), row.title.casefold()}


def _title_words(row: PlatformFacts) -> set[str]:
    return set(row.title.casefold().replace("(", " ").replace(")", " ").split())


def _platform(name: str, row: dict[str, Any], where: str) -> PlatformFacts:
    facts = to_row(PlatformFacts, {"name": name, "title": name, **row}, where, "platform")
    for index, disk in enumerate(facts.disks):
        if disk.survives not in ("session", "stop", "release"):
            given = f"`disks[{index}]`: `survives` is {disk.survives!r}"
            raise UserError(f"{where}: {given}: it must be session, stop or release")
    return facts
