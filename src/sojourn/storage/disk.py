"""Every call by which a run changes its disk. What must survive a kill goes through this module alone, so that tests
can kill the process before, in or after each call, or make the call fail."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import Any

_CHUNK_BYTES = 16 << 20


def write(file: Any, data: Any) -> None:
    """All of `data` into an unbuffered file."""
    rest = memoryview(data).cast("B")
    while rest:
        rest = rest[file.write(rest[:_CHUNK_BYTES]) :]


def sync(handle: int) -> None:
    os.fsync(handle)


def rename(old: Path, new: Path) -> None:
    old.replace(new)


def unlink(path: Path) -> None:
    path.unlink()


def make_folder(path: Path) -> None:
    path.mkdir()


def remove_folder(path: Path) -> None:
    """Recursively, file by file. Of a symlink only the link is removed. What cannot be removed stays."""
    if path.is_symlink():
        with contextlib.suppress(OSError):
            unlink(path)
        return
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
    """Makes renames inside `folder` durable. Does nothing on Windows and on drives that refuse it."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            sync(handle)
    finally:
        os.close(handle)
