"""Small files, read and hashed while the box is being connected to."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from sojourn.remote.box.hashes import UPLOAD, HashCache, new_hash, stamp
from sojourn.remote.box.tree import Entry
from sojourn.remote.manifest import Tree
from sojourn.remote.sync import SMALL_BYTES

_MOST_AHEAD_BYTES = 32 << 20


@dataclass(frozen=True)
class Content:
    """`status`: of the file when it was read."""

    data: bytes
    status: os.stat_result
    digest: str

    def is_of(self, entry: Entry) -> bool:
        return len(self.data) == self.status.st_size and stamp(self.status) == stamp(entry.status)


def _read(path: str) -> Content:
    with open(path, "rb", buffering=0) as file:  # noqa: PTH123 -- a Path for each of thousands takes as long as the read
        data, status = file.readall(), os.fstat(file.fileno())
    return Content(data, status, new_hash(UPLOAD, data).hexdigest())


class ReadAhead:
    """Contents of files that will probably travel."""

    def __init__(self, cache: HashCache) -> None:
        self._cache = cache
        self._contents: dict[str, Content] = {}

    def read(self, files: list[tuple[Tree, Entry]], enough: Callable[[], bool]) -> None:
        """Those that are small; the trees know their hashes then."""
        size = 0
        for tree, entry in files:
            if enough() or size > _MOST_AHEAD_BYTES:
                return
            if entry.size > SMALL_BYTES:
                continue
            began = time.time_ns()
            try:
                content = _read(entry.path)
            except OSError:
                continue  # said when it is sent
            self._contents[entry.path] = content
            size += len(content.data)
            if content.is_of(entry):
                tree.digests[entry.rel] = content.digest
                self._cache.remember_read(entry.path, entry.status, content.digest, began)

    def take(self, path: str) -> Content:
        """The file as it is now."""
        content = self._contents.pop(path, None)
        if content is None or stamp(os.stat(path)) != stamp(content.status):  # noqa: PTH116 -- as in _read
            return _read(path)
        return content
