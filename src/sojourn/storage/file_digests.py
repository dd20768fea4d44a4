"""SHA-256 of files, cached by path, size and times, so that unchanged files are not read again."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from sojourn.errors import UserError
from sojourn.storage.files import read_json, sha256, write_json

_MTIME_GRAIN_NS = 2_000_000_000  # a file changed more recently may change again with the same modification time


class FileDigests:
    """`setting`: the one that names the files, for messages."""

    def __init__(self, cache_file: Path, setting: str = "data.sources") -> None:
        self._cache_file, self._setting = cache_file, setting
        cached = read_json(cache_file)
        self._cached: dict[str, Any] = cached if isinstance(cached, dict) else {}
        self._changed = False
        self._used: dict[Path, list[int]] = {}

    def known(self, file: Path) -> str | None:
        """The digest of a file that is unchanged since it was read; None for any other."""
        path = file.resolve()
        return self._known(path, path.stat())

    def _known(self, path: Path, stat: os.stat_result) -> str | None:
        cached = self._cached.get(str(path))
        return str(cached[-1]) if isinstance(cached, list) and cached[:-1] == _stamp(stat) else None

    def of(self, file: Path) -> str:
        path = file.resolve()
        try:
            stat = path.stat()
            self._used[path] = _content_stamp(stat)
            if (known := self._known(path, stat)) is not None:
                return known
            stamp = _stamp(stat)
            began = time.time_ns()
            digest = sha256(path)
        except OSError as error:
            raise UserError(f"{self._setting}: {file}: cannot be read: {error.strerror or error}") from None
        if stat.st_mtime_ns < began - _MTIME_GRAIN_NS:
            self._cached[str(path)] = [*stamp, digest]
            self._changed = True
        return digest

    def check_unchanged(self) -> None:
        """No file may change while it is read: what is made of it would have the hash of other bytes."""
        for path, stamp in self._used.items():
            if _content_stamp(path.stat()) != stamp:
                raise UserError(f"{self._setting}: {path}: the file changed while it was read; run the command again")

    def save(self) -> None:
        if self._changed:
            write_json(self._cache_file, self._cached)


def _stamp(stat: os.stat_result) -> list[int]:
    # Nobody can set the change time back, as `cp -p`, rsync and archives do with the modification time.
    return [*_content_stamp(stat), stat.st_ctime_ns]


def _content_stamp(stat: os.stat_result) -> list[int]:
    return [stat.st_size, stat.st_mtime_ns, stat.st_ino]
