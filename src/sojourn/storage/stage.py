"""A folder that is either complete or absent: written beside its target under another name, then renamed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sojourn.storage import disk


@contextmanager
def staged(target: Path) -> Iterator[Path]:
    """Yields the folder to write to; its files must be fsynced when the block ends. It then replaces `target`."""
    recover(target)
    stage = target.with_name(f".stage-{os.getpid()}-{target.name}")
    try:
        disk.make_folder(stage)
        yield stage
        disk.sync_folder(stage)
        if target.exists():
            disk.rename(target, _old_path(target))
        disk.rename(stage, target)
    except BaseException:
        disk.remove_folder(stage)
        if not target.exists() and _old_path(target).exists():
            _old_path(target).replace(target)
        raise
    disk.sync_folder(target.parent)
    disk.remove_folder(_old_path(target))


def recover(target: Path) -> None:
    """After a kill: removes stages, and moves the old folder back where the new one is not in place."""
    for stage in target.parent.glob(f".stage-*-{target.name}"):
        disk.remove_folder(stage)
    old = _old_path(target)
    if old.exists():
        if not target.exists():
            disk.rename(old, target)
        else:
            disk.remove_folder(old)


def _old_path(target: Path) -> Path:
    return target.with_name(f".old-{target.name}")


def live_stages(folder: Path, name: str = "*") -> list[Path]:
    """Stages for `name` that other processes write at this moment; those of processes that are gone are removed."""
    import psutil

    live = []
    for stage in folder.glob(f".stage-*-{name}"):
        pid = stage.name.split("-")[1]
        if not (pid.isdigit() and psutil.pid_exists(int(pid))):
            shutil.rmtree(stage, ignore_errors=True)
        elif int(pid) != os.getpid():
            live.append(stage)
    return live
