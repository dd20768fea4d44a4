"""A mirror: a second copy of finished checkpoints, from which a run can resume on another machine.

An entry is a folder (a checkpoint, `final/`, `best/`) or a small file. It counts only when its seal is complete: the
seal is written last and holds the size and SHA-256 of every file. Readers ignore folders without a seal, or with files
missing. `path_mirror.py` mirrors to a folder, `hub_mirror.py` to a repository on the hub; `open_mirror.py` chooses.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Protocol

from sojourn.errors import RunFailed
from sojourn.storage.files import read_json

SEAL = ".mirror.json"


class MirrorFailed(RunFailed):
    """The mirror could not be written or read. The run folder is unchanged."""


class MirrorDamaged(MirrorFailed):
    """An entry of the mirror is not what was mirrored. Others may be good."""


class Mirror(Protocol):
    @property
    def location(self) -> str:
        """For messages."""

    def put(self, folder: Path, name: str) -> None:
        """Copies a folder as `name`, such as checkpoints/step-00000040; the copy is verified before it returns."""

    def put_file(self, file: Path, name: str) -> None:
        """The same for one small file, such as run.yaml."""

    def names(self, under: str) -> list[str]:
        """The complete folders under `under`, sorted."""

    def fetch(self, name: str, into: Path) -> None:
        """Copies a folder or a file back; `into` is replaced only after the copy is verified."""

    def read(self, name: str) -> bytes | None:
        """One small file; None where there is none."""

    def remove(self, name: str) -> None:
        """No error where there is none."""

    def set_aside(self, name: str) -> None:
        """A damaged folder: `names` does not list it any more."""


@dataclass(frozen=True)
class FileDigest:
    """One file in a seal."""

    size: int
    sha256: str


def list_files(folder: Path) -> list[str]:
    """Paths of all files below `folder`, relative to it and with forward slashes, as in a seal."""
    found = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()} - {SEAL}
    if not found:
        raise MirrorFailed(f"{folder}: no files to mirror")
    return sorted(found)


def format_seal(digests: dict[str, FileDigest]) -> bytes:
    return (json.dumps({file: asdict(digest) for file, digest in digests.items()}, indent=2) + "\n").encode()


def read_seal(folder: Path) -> dict[str, FileDigest] | None:
    """None where there is no seal, or an invalid one."""
    found = read_json(folder / SEAL)
    try:
        digests = {str(file): FileDigest(int(fact["size"]), str(fact["sha256"])) for file, fact in found.items()}
    except (AttributeError, KeyError, TypeError, ValueError):
        return None
    outside = any(PurePosixPath(file).is_absolute() or ".." in file.split("/") or "\\" in file for file in digests)
    return digests if digests and not outside else None


def check_manifest(folder: Path, digests: dict[str, FileDigest]) -> None:
    """Refuses to mirror a checkpoint that is damaged in the run folder."""
    if "manifest.json" not in digests:
        return
    manifest = read_json(folder / "manifest.json")
    if not isinstance(manifest, dict):
        raise MirrorFailed(f"{folder}: manifest.json cannot be read; nothing was mirrored")
    listed = {file: fact for file, fact in manifest.items() if isinstance(fact, dict) and "sha256" in fact}
    for file, fact in listed.items():
        if file not in digests or asdict(digests[file]) != {"size": fact.get("size"), "sha256": fact["sha256"]}:
            raise MirrorFailed(f"{folder}: {file} does not match manifest.json; nothing was mirrored")


def check_unchanged(what: str, sealed: dict[str, FileDigest], found: dict[str, FileDigest]) -> None:
    for file, digest in sealed.items():
        if found.get(file) != digest:
            raise MirrorDamaged(f"{what}: {file} has changed since it was mirrored")


def missing_entry_error(mirror: Mirror, name: str) -> MirrorFailed:
    under = name.rpartition("/")[0]
    there = ", ".join(mirror.names(under)) or "none"
    return MirrorFailed(f"{mirror.location}: no complete {name}; complete entries under {under or 'it'}: {there}")
