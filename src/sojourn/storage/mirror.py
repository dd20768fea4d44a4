"""A second place for finished checkpoints: each is copied there, checked, and sealed by the hashes of its files, so
that a run can go on from there alone. What has no seal, or not all of its files, is not there for anyone who asks."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Protocol

from sojourn.errors import RunFailed, UserError
from sojourn.storage.files import read_json

SEAL = ".mirror.json"


class MirrorFailed(RunFailed):
    """The second place could not be written or read; the first is as it was."""


class Mirror(Protocol):
    @property
    def where(self) -> str:
        """For people."""

    def put(self, folder: Path, name: str) -> None:
        """Copies a folder as `name`, such as checkpoints/step-00000040; when it returns, the copy has been checked."""

    def put_file(self, file: Path, name: str) -> None:
        """The same for one small file, such as run.yaml."""

    def names(self, under: str) -> list[str]:
        """The whole folders under `under`, sorted."""

    def fetch(self, name: str, into: Path) -> None:
        """Brings a folder or a file back; `into` is replaced only by what has been checked."""

    def remove(self, name: str) -> None:
        """No complaint where it is not there."""


def open_mirror(text: str, run_name: str) -> Mirror:
    """A folder, or `hub:USER/REPOSITORY`. Nothing is made or asked yet."""
    if text.startswith("hub:"):
        from sojourn.storage.hub_mirror import HubMirror

        return HubMirror(text.removeprefix("hub:"), run_name)
    if not text.strip():
        raise UserError("save.mirror: empty; write a folder such as /root/autodl-fs, or hub:USER/REPOSITORY")
    from sojourn.storage.path_mirror import PathMirror

    try:
        return PathMirror(Path(text).expanduser().absolute() / run_name)
    except RuntimeError:
        raise UserError(f"save.mirror={text}: no such user's home; write the folder's full path") from None


@dataclass(frozen=True)
class Facts:
    """What a seal says of a file."""

    size: int
    sha256: str


def files_in(folder: Path) -> list[str]:
    """Of all files, also those in folders below: the paths as a seal has them."""
    found = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()} - {SEAL}
    if not found:
        raise MirrorFailed(f"{folder}: no files there to be mirrored")
    return sorted(found)


def seal_of(facts: dict[str, Facts]) -> bytes:
    return (json.dumps({file: asdict(fact) for file, fact in facts.items()}, indent=2) + "\n").encode()


def read_seal(folder: Path) -> dict[str, Facts] | None:
    """None where there is no seal, or one that cannot be believed."""
    found = read_json(folder / SEAL)
    try:
        facts = {str(file): Facts(int(fact["size"]), str(fact["sha256"])) for file, fact in found.items()}
    except (AttributeError, KeyError, TypeError, ValueError):
        return None
    inside = not any(PurePosixPath(file).is_absolute() or ".." in file.split("/") or "\\" in file for file in facts)
    return facts if facts and inside else None


def check_manifest(folder: Path, facts: dict[str, Facts]) -> None:
    """A checkpoint that is damaged where it comes from is not worth a copy."""
    if "manifest.json" not in facts:
        return
    manifest = read_json(folder / "manifest.json")
    if not isinstance(manifest, dict):
        raise MirrorFailed(f"{folder}: manifest.json cannot be read; nothing was mirrored")
    said = {file: fact for file, fact in manifest.items() if isinstance(fact, dict) and "sha256" in fact}
    for file, fact in said.items():
        if file not in facts or asdict(facts[file]) != {"size": fact.get("size"), "sha256": fact["sha256"]}:
            raise MirrorFailed(f"{folder}: {file} is not what manifest.json says; nothing was mirrored")


def check_same(what: str, sealed: dict[str, Facts], found: dict[str, Facts]) -> None:
    for file, fact in sealed.items():
        if found.get(file) != fact:
            raise MirrorFailed(f"{what}: {file} has changed since it was copied there; take an older one, or remove it")


def absent(mirror: Mirror, name: str) -> MirrorFailed:
    under = name.rpartition("/")[0]
    there = ", ".join(mirror.names(under)) or "nothing"
    return MirrorFailed(f"{mirror.where}: there is no whole {name}; under {under or 'it'} there is: {there}")
