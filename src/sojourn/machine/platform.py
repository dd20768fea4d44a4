"""Which platform this is, what survives on it, and where runs should live; with no more than the standard library."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from sojourn.catalog.platforms import PlatformFacts, platforms

ROOT = Path("/")


@dataclass(frozen=True)
class Platform:
    """The catalogue's row for this machine, and the variable or folder that identified it."""

    facts: PlatformFacts
    detected_by: str

    @property
    def name(self) -> str:
        return self.facts.name

    @property
    def is_known(self) -> bool:
        return self.facts.name != "generic"


@dataclass(frozen=True)
class Home:
    """Where runs should be kept here; None where the machine is the user's own. `warning` if that folder gets wiped."""

    path: Path | None
    warning: str | None = None
    fix: str | None = None


def detect(
    env: Mapping[str, str] = os.environ, root: Path = ROOT, has_folder: Callable[[str], bool] | None = None
) -> Platform:
    """The platform by its variables, else by its folders, else generic; `has_folder` asks another machine."""
    rows = platforms()
    has_folder = has_folder or (lambda folder: _under(root, folder).is_dir())
    for facts in rows:
        for variable in facts.env:
            name, _, value = variable.partition("=")
            if name in env and (not value or env[name] == value):
                return Platform(facts, f"the variable {name}")
    for facts in rows:
        for folder in facts.folders:
            if has_folder(folder):
                return Platform(facts, f"the folder {folder}")
    generic = next(facts for facts in rows if facts.name == "generic")
    return Platform(generic, "no platform's variables or folders were found")


def find_home(platform: Platform, root: Path = ROOT, is_writable: Callable[[str], bool] | None = None) -> Home:
    """The best folder for runs on this platform, and a warning when what is there does not survive."""
    facts = platform.facts
    is_writable = is_writable or (lambda place: (at := _under(root, place)).is_dir() and os.access(at, os.W_OK))
    for place in facts.home:
        mount, _, sub = place.partition("!")
        folder = _under(root, mount)
        if is_writable(mount):
            return Home(folder / sub if sub else folder)
    if not platform.is_known:
        return Home(None)
    lasting = " or ".join(place.replace("!", "/") for place in facts.home)
    fix = facts.mount_hint or f"make {lasting} available, or copy finished runs off this machine before it stops"
    for place in facts.fallback:
        if is_writable(place):
            return Home(_under(root, place), f"{place} does not survive on {facts.title}: {lasting} is not there", fix)
    return Home(None, f"no folder that survives was found on {facts.title}: {lasting} is not there", fix)


def persistent_home(env: Mapping[str, str] = os.environ, root: Path = ROOT) -> Path | None:
    """The folder under which `runs/` should live on this platform, or None on a laptop or an unknown box."""
    return find_home(detect(env, root), root).path


def is_persistent(platform: Platform, path: Path, root: Path = ROOT) -> bool | None:
    """Whether a path outlives a stop here: the longest matching path of the catalogue decides; None when unknown."""
    if not platform.is_known:
        return None
    where = _real(path)
    best, verdict = -1, False
    for listed, lasting in ((platform.facts.volatile, False), (platform.facts.persistent, True)):
        for place in listed:
            real = _real(_under(root, place))  # platforms link their folders to where the disk is mounted
            if where.is_relative_to(real) and len(real.parts) > best:
                best, verdict = len(real.parts), lasting
    return verdict


def _under(root: Path, absolute: str) -> Path:
    return root / absolute.lstrip("/")


def _real(path: Path) -> Path:
    return Path(os.path.realpath(path))
