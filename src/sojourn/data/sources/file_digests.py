"""SHA-256 of source files, cached by path, size and modification time, so that unchanged files are not read again."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from sojourn.errors import UserError
from sojourn.storage.files import read_json, sha256, write_json

_MTIME_GRAIN_NS = 2_000_000_000  # a file changed more recently may change again with the same modification time


class FileDigests:
    def __init__(self, cache_file: Path) -> None:
        self._cache_file = cache_file
        cached = read_json(cache_file)
        self._cached: dict[str, Any] = cached if isinstance(cached, dict) else {}
        self._changed = False
        self._used: dict[Path, list[int]] = {}

    def of(self, file: Path) -> str:
        path = file.resolve()
        try:
            stat = path.stat()
            self._used[path] = stamp = [stat.st_size, stat.st_mtime_ns, stat.st_ino]
            cached = self._cached.get(str(path))
            if isinstance(cached, list) and cached[:3] == stamp:
                return str(cached[3])
            began = time.time_ns()
            digest = sha256(path)
        except OSError as error:
            raise UserError(f"data.sources: {file}: cannot be read: {error.strerror or error}") from None
        if stat.st_mtime_ns < began - _MTIME_GRAIN_NS:
            self._cached[str(path)] = [*stamp, digest]
            self._changed = True
        return digest

    def check_unchanged(self) -> None:
        """No file may change while it is read: the artefact's hash would belong to other bytes."""
        for path, stamp in self._used.items():
            stat = path.stat()
            if [stat.st_size, stat.st_mtime_ns, stat.st_ino] != stamp:
                raise UserError(f"data.sources: {path}: the file changed while it was read; run the command again")

    def save(self) -> None:
        if self._changed:
            write_json(self._cache_file, self._cached)
