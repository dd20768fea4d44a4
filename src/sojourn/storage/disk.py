"""The few calls by which a run changes its disk. What must survive a kill goes through here and nowhere else, so that
tests can make each call the last one, or have it fail."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import Any

_BLOCK = 16 << 20


def write(file: Any, data: Any) -> None:
    """All of `data` into an unbuffered file."""
    left = memoryview(data).cast("B")
    while left:
        left = left[file.write(left[:_BLOCK]) :]


def sync(handle: int) -> None:
    os.fsync(handle)


def rename(old: Path, new: Path) -> None:
    old.replace(new)


def unlink(path: Path) -> None:
    path.unlink()


def make_folder(path: Path) -> None:
    path.mkdir()


def remove_folder(path: Path) -> None:
    """With all that is in it, file by file. What cannot be removed stays."""
    with contextlib.suppress(OSError):
        for entry in list(os.scandir(path)):
            if entry.is_dir(follow_symlinks=False):
                remove_folder(Path(entry.path))
            else:
                with contextlib.suppress(OSError):
                    unlink(Path(entry.path))
    shutil.rmtree(path, ignore_errors=True)


def sync_file(path: Path) -> None:
    with path.open("rb+") as file:
        sync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Makes renames inside `folder` durable. Windows cannot, and some network drives refuse: there it does nothing."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            sync(handle)
    finally:
        os.close(handle)
