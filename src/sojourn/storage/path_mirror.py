"""A mirror in a folder: copied, read back, sealed and renamed, on drives that may lack any of the calls for it."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sojourn.machine.process import alive, this_process
from sojourn.storage import disk
from sojourn.storage.files import read_json, sha256
from sojourn.storage.mirror import (
    SEAL,
    Facts,
    MirrorFailed,
    absent,
    check_manifest,
    check_same,
    files_in,
    read_seal,
    seal_of,
)
from sojourn.storage.stage import staged

_BLOCK = 4 << 20
_DAY = 86400
_STAGE = re.compile(r"\.stage-mirror-(\d+)-(\d+\.\d+)-([\w.]+)-.+")
_FULL = (errno.ENOSPC, errno.EDQUOT)
_REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS)
_NO_SUCH_CALL = (errno.EXDEV, errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


@dataclass(frozen=True)
class PathMirror:
    """A folder on another disk or a network drive, one for each run."""

    root: Path

    @property
    def where(self) -> str:
        return str(self.root)

    def put(self, folder: Path, name: str) -> None:
        target = self.root / name
        if folder.resolve() == target.resolve():
            raise MirrorFailed(f"{folder}: cannot be its own mirror; set save.mirror to a folder on another disk")
        with self._told(f"{name} could not be copied there"):
            _clear_up(target.parent)
            if not _holds(target, folder):
                files = files_in(folder)
                check_free_space(target, sum((folder / file).stat().st_size for file in files), name)
                with _stage(target) as stage:
                    disk.make_folder(stage)
                    facts = _copy(folder, stage, files)
                    check_manifest(folder, facts)
                    _write(stage / SEAL, seal_of(facts))
                    disk.sync_folder(stage)
                    _move_in(stage, target)
                disk.sync_folder(target.parent)
            discard(_aside(target))

    def put_file(self, file: Path, name: str) -> None:
        target = self.root / name
        with self._told(f"{name} could not be copied there"):
            data = file.read_bytes()
            new = hashlib.sha256(data).hexdigest()
            old = sha256(target) if target.is_file() else None
            trusted = [old] if old in _hashes(target) else []
            if trusted == [new]:
                return
            # Both contents are vouched for while one takes the other's place.
            replace(_seal_beside(target), json.dumps([new, *trusted]).encode())
            replace(target, data)

    def names(self, under: str) -> list[str]:
        folder = self.root / under
        with self._told(f"{under or 'it'} cannot be listed"):
            try:
                found = {entry.name.removeprefix(".old-") for entry in folder.iterdir()}
            except (FileNotFoundError, NotADirectoryError):
                return []
            return sorted(name for name in found if not name.startswith(".") and _place(folder / name))

    def fetch(self, name: str, into: Path) -> None:
        target = self.root / name
        with self._told(f"{name} could not be fetched from there into {into}", ""):
            there = _place(target)
            facts = read_seal(there) if there is not None else None
            if there is not None and facts is not None:
                into.parent.mkdir(parents=True, exist_ok=True)
                check_free_space(into, sum(fact.size for fact in facts.values()), name)
                with staged(into) as stage:
                    check_same(f"{self.where}: {name}", facts, _copy(there, stage, facts))
            elif target.is_file():
                data = target.read_bytes()
                if hashlib.sha256(data).hexdigest() not in _hashes(target):
                    raise MirrorFailed(f"{target}: has changed since it was copied there; remove it")
                replace(into, data)
            else:
                raise absent(self, name)

    def remove(self, name: str) -> None:
        target = self.root / name
        with self._told(f"{name} could not be removed"):
            if target.is_file():
                disk.unlink(target)
                discard(_seal_beside(target))
            for folder in (_aside(target), target):
                _unseal(folder)
                discard(folder)
                if folder.exists():
                    raise MirrorFailed(f"{folder}: could not be removed whole; remove it by hand")

    @contextmanager
    def _told(self, what: str, otherwise: str = ", or set save.mirror to another place") -> Iterator[None]:
        try:
            yield
        except OSError as error:
            advice = "check that the disk is there"
            if error.errno in _FULL:
                advice = "make room"
            elif error.errno in _REFUSED:
                advice = "make it writable"
            raise MirrorFailed(f"{self.where}: {what}: {error.strerror or error}; {advice}{otherwise}") from error


def check_free_space(place: Path, needed: int, name: str) -> None:
    """Before anything is written. A drive that cannot tell its size is believed to have room."""
    while not place.exists() and place != place.parent:
        place = place.parent
    usage = shutil.disk_usage(place)
    if usage.total and usage.free < needed:
        mib = 2**20
        raise MirrorFailed(
            f"{place}: {usage.free / mib:,.1f} MiB free, but {name} takes {needed / mib:,.1f} MiB; make room there"
        )


def discard(path: Path) -> None:
    """As far as it can be: nobody believes what is left."""
    with contextlib.suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            disk.remove_folder(path)
        else:
            disk.unlink(path)


def _place(target: Path) -> Path | None:
    """Where the whole entry is: in its place, or aside where a kill came between two renames."""
    return next((folder for folder in (target, _aside(target)) if _is_whole(folder)), None)


def _aside(target: Path) -> Path:
    return target.with_name(f".old-{target.name}")


def _is_whole(folder: Path) -> bool:
    facts = read_seal(folder)
    try:
        return facts is not None and all((folder / file).stat().st_size == fact.size for file, fact in facts.items())
    except OSError:
        return False


def _holds(target: Path, folder: Path) -> bool:
    """Whether every byte of `folder` is there already."""
    facts = read_seal(target)
    if facts is None or not _is_whole(target) or sorted(facts) != files_in(folder):
        return False
    if any((folder / file).stat().st_size != fact.size for file, fact in facts.items()):
        return False
    return all(sha256(folder / file) == sha256(target / file) == fact.sha256 for file, fact in facts.items())


@contextmanager
def _stage(target: Path) -> Iterator[Path]:
    """A path beside `target` whose name tells whose it is."""
    target.parent.mkdir(parents=True, exist_ok=True)
    pid, started = this_process()
    stage = target.with_name(f".stage-mirror-{pid}-{started:.2f}-{_host()}-{target.name}")
    discard(stage)
    try:
        yield stage
    finally:
        discard(stage)


def _host() -> str:
    return re.sub(r"[^\w.]", "_", socket.gethostname()) or "_"


def _clear_up(parent: Path) -> None:
    """Stages whose makers are dead."""
    for entry in list(parent.iterdir()) if parent.is_dir() else ():
        if (owner := _STAGE.fullmatch(entry.name)) and not _at_work(entry, owner):
            discard(entry)


def _at_work(stage: Path, owner: re.Match[str]) -> bool:
    """Whether its process lives. Another machine's cannot be asked: it is given a day."""
    if owner[3] == _host():
        return alive(int(owner[1]), float(owner[2]))
    try:
        return time.time() - stage.stat().st_mtime < _DAY
    except OSError:
        return True


def _copy(source: Path, target: Path, files: Iterable[str]) -> dict[str, Facts]:
    """The files, and what they were when read. Each is read back: network drives say `written` of what is not."""
    facts = {}
    for file in files:
        new = target / file
        new.parent.mkdir(parents=True, exist_ok=True)
        digest, size = hashlib.sha256(), 0
        with (source / file).open("rb") as reader, new.open("xb", buffering=0) as writer:
            while block := reader.read(_BLOCK):
                digest.update(block)
                size += len(block)
                disk.write(writer, block)
            _sync(writer.fileno())
        facts[file] = Facts(size, digest.hexdigest())
        if sha256(new) != facts[file].sha256:
            raise MirrorFailed(f"{target.parent}: {file} came back different from what was written; use another disk")
    for folder in {(target / file).parent for file in facts}:
        disk.sync_folder(folder)
    return facts


def _write(path: Path, data: bytes) -> None:
    with path.open("wb", buffering=0) as file:
        disk.write(file, data)
        _sync(file.fileno())
    if path.read_bytes() != data:
        raise MirrorFailed(f"{path}: came back different from what was written; use another disk")


def _sync(handle: int) -> None:
    """Where a drive knows no such call, reading back must do. What is read back should come from the drive."""
    try:
        disk.sync(handle)
    except OSError as error:
        if error.errno not in _NO_SUCH_CALL:
            raise
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)


def _move_in(stage: Path, target: Path) -> None:
    """At every instant one whole entry is in its place or aside."""
    try:
        if _is_whole(target):
            discard(_aside(target))
            disk.rename(target, _aside(target))
        else:
            discard(target)
        disk.rename(stage, target)
    except OSError as error:
        if error.errno in _NO_SUCH_CALL:
            return _lay_in(stage, target)
        if not target.exists() and _is_whole(_aside(target)):
            with contextlib.suppress(OSError):
                disk.rename(_aside(target), target)
        raise


def _lay_in(stage: Path, target: Path) -> None:
    """For drives that cannot rename a folder: file by file, the seal last; what is replaced goes after a second copy
    of the new one is whole."""
    for place in (_aside(target), target) if _is_whole(target) else (target,):
        _unseal(place)
        discard(place)
        place.mkdir(exist_ok=True)
        facts = read_seal(stage) or {}
        check_same(str(stage), facts, _copy(stage, place, facts))
        _write(place / SEAL, seal_of(facts))


def _unseal(folder: Path) -> None:
    """Before its files go, so that a kill half-way leaves something that is plainly no entry."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        disk.unlink(folder / SEAL)


def _seal_beside(file: Path) -> Path:
    return file.with_name(f".{file.name}{SEAL}")


def _hashes(file: Path) -> list[Any]:
    """The contents that its seal vouches for."""
    found = read_json(_seal_beside(file))
    return found if isinstance(found, list) else []


def replace(path: Path, data: bytes) -> None:
    """Atomically, where the drive can."""
    with _stage(path) as stage:
        _write(stage, data)
        try:
            disk.rename(stage, path)
        except OSError as error:
            if error.errno not in _NO_SUCH_CALL:
                raise
            _write(path, data)
    disk.sync_folder(path.parent)
