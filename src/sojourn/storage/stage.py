"""A folder that is either wholly there or not: made beside its place under another name, then moved in."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sojourn.storage import disk


@contextmanager
def staged(target: Path) -> Iterator[Path]:
    """Where to put the files; they must be durable when the block ends. What was at `target` before then goes."""
    clear_up(target)
    stage = target.with_name(f".stage-{os.getpid()}-{target.name}")
    try:
        disk.make_folder(stage)
        yield stage
        disk.sync_folder(stage)
        if target.exists():
            disk.rename(target, _aside(target))
        disk.rename(stage, target)
    except BaseException:
        disk.remove_folder(stage)
        if not target.exists() and _aside(target).exists():
            _aside(target).replace(target)
        raise
    disk.sync_folder(target.parent)
    disk.remove_folder(_aside(target))


def clear_up(target: Path) -> None:
    """What a kill left: half of a new one goes; an old one that was just moved aside comes back."""
    for stage in target.parent.glob(f".stage-*-{target.name}"):
        disk.remove_folder(stage)
    aside = _aside(target)
    if aside.exists():
        if not target.exists():
            disk.rename(aside, target)
        else:
            disk.remove_folder(aside)


def _aside(target: Path) -> Path:
    return target.with_name(f".old-{target.name}")
