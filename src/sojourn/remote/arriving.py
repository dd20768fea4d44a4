"""What is on its way here from the box: the state of one `pull`, and of each of its files what the box says of it,
where it will be, and which of its bytes are there."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sojourn.remote.box.hashes import DOWNLOAD
from sojourn.remote.box.transfer import FollowingHash, Partial, Paths
from sojourn.remote.manifest import content_key, local_cache
from sojourn.remote.progress import Meter, ProgressCallback
from sojourn.remote.sync import CHUNK_BYTES, Pieces, Synced

if TYPE_CHECKING:
    from sojourn.remote.box_link import BoxLink

CHANGED = "it changed while it travelled"


@dataclass(frozen=True)
class Remote:
    """A line of the box's manifest."""

    rel: str
    kind: str
    size: int
    digest: str | None
    mode: int
    mtime_ns: int
    inode: int
    target: str

    @property
    def stamp(self) -> list[int]:
        return [self.size, self.mtime_ns, self.inode]


class Incoming:
    """One call of `pull`, as its files need it."""

    def __init__(self, box: BoxLink, remote: str, progress: ProgressCallback | None) -> None:
        self.box, self.remote = box, remote.rstrip("/") or "/"
        self.meter = Meter(progress)
        self.cache = local_cache(DOWNLOAD)
        self.result = Synced()
        self.failed: list[str] = []
        self.chunk = 2 * CHUNK_BYTES  # the first attempt halves it
        self.arrived = 0
        self.lock = threading.Lock()
        self.sync_each = True

    def stored(self, path: str, entry: Remote, status: os.stat_result, digest: str) -> None:
        self.cache.remember(path, status, digest)
        self.result.files += 1
        self.result.bytes += entry.size


class Arriving:
    """A file on its way here."""

    def __init__(self, download: Incoming, root: str, entry: Remote, paths: Paths) -> None:
        self.download, self.root, self.entry, self.paths = download, root, entry, paths
        self.name = entry.rel
        self.pieces = Pieces(entry.size, [], entry.size)
        self.partial: Partial | None = None
        self.hash: FollowingHash | None = None
        self.error: str | None = None

    def path(self, make: bool = True) -> Path:
        return Path(self.paths.of(self.name, make=make))

    def begin(self) -> None:
        entry, size = self.entry, self.entry.size
        key = content_key(self.download.box.host.name, self.root, entry.rel, entry.stamp)
        self.partial = Partial(str(self.path()), key, size)
        self.pieces = Pieces(size, self.partial.begin(), self.download.chunk)
        self.download.meter.done += size - self.pieces.missing_bytes
        self.hash = FollowingHash(self.partial.path, DOWNLOAD)
        self.hash.extend(self.pieces.prefix)

    def arrived(self, start: int, end: int) -> None:
        self.pieces.arrived(start, end)
        if self.hash is not None:
            self.hash.extend(self.pieces.prefix)

    def give_up(self) -> None:
        if self.hash is not None:
            self.hash.stop()
        if self.partial is not None:
            self.partial.close()
