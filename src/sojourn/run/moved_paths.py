"""Where a run's models lie on this machine, of a run that was brought home from another: `paths.json` in its folder.

The run's own files name the other machine's paths. They stay as they are, byte for byte.
"""

from __future__ import annotations

from pathlib import Path

from sojourn.expand_user import expand_user
from sojourn.storage.files import read_json_object, write_json

FILE = "paths.json"


def write_moved_paths(run: Path, paths: dict[str, str]) -> None:
    """`paths`: there → here."""
    if paths:
        write_json(run / FILE, {**read_json_object(run / FILE), **paths})


def path_here(path: str, near: Path) -> str:
    """The same file on this machine; `near`: a folder of the run, or within it."""
    if expand_user(path).exists():
        return path
    for folder in (near, *list(near.parents)[:2]):
        here = read_json_object(folder / FILE).get(path)
        if isinstance(here, str):
            return here
    return path
