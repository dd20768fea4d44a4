"""A mirror in a folder on another disk or a network drive.

An entry is copied to a stage path beside its target, every byte is read back, the seal is written, and the stage is
renamed into place. An entry that is replaced is first renamed to `.old-NAME`, so at every moment one complete entry is
at `NAME` or `.old-NAME`. Drives that cannot rename a folder get the files copied one by one, the seal last.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sojourn.storage import disk
from sojourn.storage.files import NotValid, read_bytes, read_json, sha256
from sojourn.storage.mirror import (
    SEAL,
    MirrorDamaged,
    MirrorFailed,
    check_manifest,
    check_unchanged,
    format_seal,
    list_files,
    missing_entry_error,
    read_seal,
)
from sojourn.storage.stage import staged
from sojourn.storage.verified_copy import (
    UNSUPPORTED,
    check_free_space,
    copy_files,
    discard,
    make_folders,
    remove_abandoned_stages,
    replace_file,
    staged_path,
    write_verified,
)

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_NOT_PERMITTED = (errno.EACCES, errno.EPERM, errno.EROFS)


@dataclass(frozen=True)
class PathMirror:
    """`root`: one folder for each run. It is made for the first entry; where it is gone later, so is its drive."""

    root: Path
    _made: list[Path] = field(default_factory=list, init=False, compare=False)

    @property
    def location(self) -> str:
        return str(self.root)

    def put(self, folder: Path, name: str) -> None:
        target = self.root / name
        if folder.resolve() == target.resolve():
            raise MirrorFailed(f"{folder}: cannot be its own mirror; set save.mirror to a folder on another disk")
        with self._os_errors_as_mirror_failed(f"{name} could not be copied there"):
            remove_abandoned_stages(target.parent)
            if not _is_up_to_date(target, folder):
                files = list_files(folder)
                check_free_space(target, sum((folder / file).stat().st_size for file in files), name)
                self._make(target.parent)
                with staged_path(target) as stage:
                    disk.make_folder(stage)
                    digests = copy_files(folder, stage, files)
                    check_manifest(folder, digests)
                    write_verified(stage / SEAL, format_seal(digests))
                    disk.sync_folder(stage)
                    _rename_into_place(stage, target)
                disk.sync_folder(target.parent)
            discard(_old_path(target))

    def put_file(self, file: Path, name: str) -> None:
        target = self.root / name
        with self._os_errors_as_mirror_failed(f"{name} could not be copied there"):
            data = file.read_bytes()
            new = hashlib.sha256(data).hexdigest()
            old = sha256(target) if target.is_file() else None
            trusted = [old] if old in _sealed_hashes(target) else []
            if trusted == [new]:
                return
            self._make(target.parent)
            # The seal lists both hashes until the new content has replaced the old one.
            replace_file(_file_seal(target), json.dumps([new, *trusted]).encode())
            replace_file(target, data)

    def names(self, under: str) -> list[str]:
        folder = self.root / under
        with self._os_errors_as_mirror_failed(f"{under or 'it'} cannot be listed"):
            try:
                names = {entry.name.removeprefix(".old-") for entry in folder.iterdir()}
            except (FileNotFoundError, NotADirectoryError):
                return []
            return sorted(name for name in names if not name.startswith(".") and _find_complete(folder / name))

    def fetch(self, name: str, into: Path) -> None:
        target = self.root / name
        with self._os_errors_as_mirror_failed(f"{name} could not be fetched from there into {into}", ""):
            entry = _find_complete(target)
            digests = read_seal(entry) if entry is not None else None
            if entry is not None and digests is not None:
                into.parent.mkdir(parents=True, exist_ok=True)
                check_free_space(into, sum(digest.size for digest in digests.values()), name)
                with staged(into) as stage:
                    check_unchanged(f"{self.location}: {name}", digests, copy_files(entry, stage, digests))
            elif target.is_file():
                data = _read_sealed(target)
                into.parent.mkdir(parents=True, exist_ok=True)
                replace_file(into, data)
            else:
                raise missing_entry_error(self, name)

    def read(self, name: str) -> bytes | None:
        target = self.root / name
        with self._os_errors_as_mirror_failed(f"{name} cannot be read", ""):
            if not os.path.lexists(target):
                return None
            return _read_sealed(target)

    def remove(self, name: str) -> None:
        target = self.root / name
        with self._os_errors_as_mirror_failed(f"{name} could not be removed"):
            if target.is_file():
                disk.unlink(target)
                discard(_file_seal(target))
            for folder in (_old_path(target), target):
                _unseal(folder)
                discard(folder)
                if folder.exists():
                    raise MirrorFailed(f"{folder}: could not be removed completely")

    def set_aside(self, name: str) -> None:
        target = self.root / name
        with self._os_errors_as_mirror_failed(f"{name} could not be set aside"):
            for folder in (target, _old_path(target)):
                _unseal(folder)  # a drive may not be able to rename
            with contextlib.suppress(OSError):
                disk.rename(target, target.with_name(f"damaged-{target.name}"))

    def _make(self, folder: Path) -> None:
        if not self._made:
            self.root.mkdir(parents=True, exist_ok=True)
            self._made.append(self.root)
        make_folders(folder, self.root)

    @contextmanager
    def _os_errors_as_mirror_failed(
        self, what: str, otherwise: str = ", or set save.mirror to another folder"
    ) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            advice = "check that the disk is mounted"
            if error.errno in _DISK_FULL:
                advice = "free some space"
            elif error.errno in _NOT_PERMITTED:
                advice = "make it writable"
            raise MirrorFailed(f"{self.location}: {what}: {error.strerror or error}; {advice}{otherwise}") from error


def _read_sealed(file: Path) -> bytes:
    try:
        data = read_bytes(file)
    except NotValid as error:
        raise MirrorDamaged(f"{file}: {error}") from None
    if hashlib.sha256(data).hexdigest() not in _sealed_hashes(file):
        raise MirrorDamaged(f"{file}: has changed since it was mirrored")
    return data


def _find_complete(target: Path) -> Path | None:
    """The complete entry: at `target`, or at its old path where a kill came between two renames."""
    return next((folder for folder in (target, _old_path(target)) if _is_complete(folder)), None)


def _old_path(target: Path) -> Path:
    return target.with_name(f".old-{target.name}")


def _is_complete(folder: Path) -> bool:
    digests = read_seal(folder)
    try:
        return digests is not None and all(
            (folder / file).stat().st_size == digest.size for file, digest in digests.items()
        )
    except OSError:
        return False


def _is_up_to_date(target: Path, folder: Path) -> bool:
    """Whether `target` already holds every byte of `folder`."""
    digests = read_seal(target)
    if digests is None or not _is_complete(target) or sorted(digests) != list_files(folder):
        return False
    if any((folder / file).stat().st_size != digest.size for file, digest in digests.items()):
        return False
    return all(sha256(folder / file) == sha256(target / file) == digest.sha256 for file, digest in digests.items())


def _rename_into_place(stage: Path, target: Path) -> None:
    """At every moment one complete entry is at `target` or at its old path."""
    try:
        if _is_complete(target):
            discard(_old_path(target))
            disk.rename(target, _old_path(target))
        else:
            discard(target)
        disk.rename(stage, target)
    except OSError as error:
        if error.errno in UNSUPPORTED:
            return _copy_into_place(stage, target)
        if not target.exists() and _is_complete(_old_path(target)):
            with contextlib.suppress(OSError):
                disk.rename(_old_path(target), target)
        raise


def _copy_into_place(stage: Path, target: Path) -> None:
    """For drives that cannot rename a folder: file by file, the seal last. An entry that is replaced is removed only
    after a second copy of the new one is complete."""
    for folder in (_old_path(target), target) if _is_complete(target) else (target,):
        _unseal(folder)
        discard(folder)
        folder.mkdir(exist_ok=True)
        digests = read_seal(stage) or {}
        check_unchanged(str(stage), digests, copy_files(stage, folder, digests))
        write_verified(folder / SEAL, format_seal(digests))


def _unseal(folder: Path) -> None:
    """Called before the files are removed, so that a kill half-way leaves no entry that looks complete."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        disk.unlink(folder / SEAL)


def _file_seal(file: Path) -> Path:
    return file.with_name(f".{file.name}{SEAL}")


def _sealed_hashes(file: Path) -> list[Any]:
    """SHA-256 of the contents that the seal of `file` accepts."""
    found = read_json(_file_seal(file))
    return found if isinstance(found, list) else []
