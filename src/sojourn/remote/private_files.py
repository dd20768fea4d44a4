"""Files that only their owner may read: written whole or not at all, by one process at a time."""

from __future__ import annotations

import contextlib
import os
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sojourn.config.messages import printable
from sojourn.errors import UserError
from sojourn.storage import disk
from sojourn.storage.files import NotValid, load_json

_OWNER_ONLY = 0o600
_LOCK_SECONDS = 20.0


def private_folder(path: Path) -> Path:
    """Made with mode 0700 where it is missing; one that is there keeps its mode."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path


def write_private(path: Path, text: str) -> None:
    """Replaces `path` atomically; nobody else can read it at any time. A link is written through."""
    path = Path(os.path.realpath(path))
    private_folder(path.parent)
    stage = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    stage.unlink(missing_ok=True)
    handle = os.open(stage, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), _OWNER_ONLY)
    try:
        with os.fdopen(handle, "wb", buffering=0) as file:
            disk.write(file, text.encode())
            disk.sync(file.fileno())
        disk.rename(stage, path)
    except BaseException:
        stage.unlink(missing_ok=True)
        raise
    disk.sync_folder(path.parent)


def read_object(path: Path, repair: str) -> dict[str, Any]:
    """A JSON object; {} where there is no file. `repair`: what to do about a damaged one, which is left as it is."""
    try:
        found = load_json(path)
    except FileNotFoundError:
        return {}
    except NotValid as error:
        raise UserError(f"{path}: {error}; {repair}") from None
    if not isinstance(found, dict):
        raise UserError(f"{path}: not a JSON object; {repair}")
    return found


def refuse_if_others_can_read(path: Path) -> None:
    """Windows has no such modes: a user's profile is closed to others there."""
    if os.name != "posix":
        return
    with contextlib.suppress(FileNotFoundError):
        if stat.S_IMODE(path.stat().st_mode) & 0o077:
            raise UserError(f"{path}: others can read this file, and it holds secrets; type: chmod 600 {path}")


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Excludes other processes and threads that change `path`; released by the system when the process dies."""
    lock = path.with_name(f".{path.name}.lock")
    private_folder(lock.parent)
    handle = os.open(lock, os.O_RDWR | os.O_CREAT, _OWNER_ONLY)
    try:
        until = time.monotonic() + _LOCK_SECONDS
        while not try_lock(handle):
            if time.monotonic() > until:
                raise UserError(f"{path}: another sojourn has been changing it for {_LOCK_SECONDS:.0f} s; try again")
            time.sleep(0.01)
        yield
    finally:
        os.close(handle)


def try_lock(handle: int) -> bool:
    """An open file; False: another process has it. It ends with the process, or when the file is closed."""
    try:
        if os.name == "nt":
            import msvcrt

            msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined, unused-ignore]
        else:
            import fcntl

            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        import errno

        return error.errno not in (errno.EACCES, errno.EAGAIN, errno.EDEADLK)  # a drive without locks: go on
    return True


def described(value: object) -> str:
    """For messages about a file's content."""
    return printable(repr(value), 40)
