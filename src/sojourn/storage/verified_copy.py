"""Writing onto drives that may lack fsync or rename, such as network drives: every byte is read back and compared."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import shutil
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from sojourn.machine.process import current_process, is_alive
from sojourn.storage import disk
from sojourn.storage.files import sha256
from sojourn.storage.mirror import FileDigest, MirrorFailed

UNSUPPORTED = (errno.EXDEV, errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_CHUNK_BYTES = 4 << 20
_DAY = 86400  # seconds
_STAGE = re.compile(r"\.stage-mirror-(\d+)-(\d+\.\d+)-([\w.]+)-.+")


def check_free_space(path: Path, needed: int, name: str) -> None:
    """Raises before anything is written. A drive that reports a size of 0 is assumed to have space."""
    while not path.exists() and path != path.parent:
        path = path.parent
    usage = shutil.disk_usage(path)
    if usage.total and usage.free < needed:
        mib = 2**20
        raise MirrorFailed(
            f"{path}: {usage.free / mib:,.1f} MiB free, but {name} takes {needed / mib:,.1f} MiB; free some space there"
        )


def discard(path: Path) -> None:
    """Removes a file or folder as far as possible; what remains has no seal, so readers ignore it."""
    with contextlib.suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            disk.remove_folder(path)
        else:
            disk.unlink(path)


def make_folders(folder: Path, below: Path) -> None:
    """`folder` and what is missing between it and `below`, which must be there: where a drive has gone, no folder of
    its name may take its place."""
    missing = []
    while folder != below and not folder.is_dir():
        missing.append(folder)
        folder = folder.parent
    for one in reversed(missing):
        one.mkdir(exist_ok=True)


@contextmanager
def staged_path(target: Path) -> Iterator[Path]:
    """A path beside `target` whose name holds pid, start time and host of its process."""
    pid, started = current_process()
    stage = target.with_name(f".stage-mirror-{pid}-{started:.2f}-{_host_name()}-{target.name}")
    discard(stage)
    try:
        yield stage
    finally:
        discard(stage)


def _host_name() -> str:
    return re.sub(r"[^\w.]", "_", socket.gethostname()) or "_"


def remove_abandoned_stages(parent: Path) -> None:
    """Removes stages whose processes have died."""
    for entry in list(parent.iterdir()) if parent.is_dir() else ():
        if (owner := _STAGE.fullmatch(entry.name)) and not _is_in_use(entry, owner):
            discard(entry)


def _is_in_use(stage: Path, owner: re.Match[str]) -> bool:
    """Whether the process that made it is alive. A stage of another host counts as in use for a day."""
    if owner[3] == _host_name():
        return is_alive(int(owner[1]), float(owner[2]))
    try:
        return time.time() - stage.stat().st_mtime < _DAY
    except OSError:
        return True


def copy_files(source: Path, target: Path, files: Iterable[str]) -> dict[str, FileDigest]:
    """Copies `files` and reads each back, since network drives may report success for data that is lost."""
    digests = {}
    for file in files:
        new = target / file
        make_folders(new.parent, target)
        digest, size = hashlib.sha256(), 0
        with (source / file).open("rb") as reader, new.open("xb", buffering=0) as writer:
            while chunk := reader.read(_CHUNK_BYTES):
                digest.update(chunk)
                size += len(chunk)
                disk.write(writer, chunk)
            _sync(writer.fileno())
        digests[file] = FileDigest(size, digest.hexdigest())
        if sha256(new) != digests[file].sha256:
            raise MirrorFailed(f"{target.parent}: {file} came back different from what was written; use another disk")
    for folder in {(target / file).parent for file in digests}:
        disk.sync_folder(folder)
    return digests


def write_verified(path: Path, data: bytes) -> None:
    with path.open("wb", buffering=0) as file:
        disk.write(file, data)
        _sync(file.fileno())
    if path.read_bytes() != data:
        raise MirrorFailed(f"{path}: came back different from what was written; use another disk")


def _sync(handle: int) -> None:
    """fsync where the drive supports it; drops the page cache, so that reading back reads the drive."""
    try:
        disk.sync(handle)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)


def replace_file(path: Path, data: bytes) -> None:
    """Atomic where the drive can rename."""
    with staged_path(path) as stage:
        write_verified(stage, data)
        try:
            disk.rename(stage, path)
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
            write_verified(path, data)
    disk.sync_folder(path.parent)
