"""The state of one `push`, as its files need it."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from sojourn.remote.box.hashes import UPLOAD, HashCache
from sojourn.remote.box.tree import Entry
from sojourn.remote.manifest import Tree, local_cache, remote_cache
from sojourn.remote.progress import Meter, ProgressCallback
from sojourn.remote.read_ahead import ReadAhead
from sojourn.remote.sync import CHUNK_BYTES, Synced

if TYPE_CHECKING:
    from sojourn.remote.box_link import BoxLink

_CHANGES_ALLOWED = 3


class Outgoing:
    """See `Upload`."""

    def __init__(self, box: BoxLink, progress: ProgressCallback | None, durable: bool) -> None:
        self.box, self.durable = box, durable
        self.meter = Meter(progress)
        self.cache: HashCache = local_cache(UPLOAD)
        self.ahead = ReadAhead(self.cache)
        self.result = Synced()
        self.failed: list[str] = []
        self.changes: dict[str, int] = {}
        self.chunk = 2 * CHUNK_BYTES  # the first attempt halves it
        self.arrived = 0  # requests that the box has confirmed
        self.found = 0  # bytes of large files that earlier attempts have brought
        self.lock = threading.Lock()

    def cache_of(self, tree: Tree) -> str:
        return remote_cache(self.box.host.home, tree.root, UPLOAD)

    def stored(self, entry: Entry, digest: str) -> None:
        self.result.files += 1
        self.result.bytes += entry.size
        self.cache.remember_read(entry.path, entry.status, digest, time.time_ns())

    def look_again(self, entry: Entry) -> bool:
        """Whether a file that changed while it travelled is tried once more."""
        count = self.changes[entry.path] = self.changes.get(entry.path, 0) + 1
        if count >= _CHANGES_ALLOWED:
            self.failed.append(f"{entry.path}: it changes while it travels")
        return count < _CHANGES_ALLOWED
