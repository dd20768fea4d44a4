"""A folder that is whole or not there: it arrives in a staging folder, is checked, and takes its place."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path

from sojourn.remote.arriving import CHANGED, Remote
from sojourn.remote.box.transfer import PREFIX, sync_folder
from sojourn.remote.box.tree import scan
from sojourn.remote.sync import SyncFailed

MANIFEST = "manifest.json"


def remove_others(staging: Path, entries: list[Remote]) -> None:
    """What an earlier attempt brought and the box no longer has."""
    listed = {entry.rel for entry in entries}
    for found in scan(str(staging), lambda line: None):
        if found.rel not in listed and found.kind != "folder":
            Path(found.path).unlink(missing_ok=True)


def check_manifest(folder: Path) -> None:
    """Every file that manifest.json lists is there with that size and hash."""
    try:
        listed = json.loads((folder / MANIFEST).read_bytes())
    except ValueError:
        return  # a manifest of another program
    if not isinstance(listed, dict) or not all(isinstance(line, dict) and "sha256" in line for line in listed.values()):
        return
    from sojourn.run.checkpoints import file_damage

    for name, line in listed.items():
        damage = file_damage(folder / name, line)
        if damage:
            raise SyncFailed(f"{folder.name}: {CHANGED}, or is damaged on the box: {damage}")


def take_place(staging: Path, target: Path) -> None:
    """Renames; an older folder of this name is kept until the new one is in place."""
    for rest in [path for path in staging.rglob(f"{PREFIX}*") if path.is_file()]:
        rest.unlink()  # of files that changed on the box meanwhile
    old = target.with_name(f"{PREFIX}{target.name}.old")
    if target.exists():
        shutil.rmtree(old, ignore_errors=True)
        target.rename(old)
    staging.rename(target)
    sync_folder(str(target.parent))
    with contextlib.suppress(OSError):
        shutil.rmtree(old, ignore_errors=True)
