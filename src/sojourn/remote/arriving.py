"""A file of the box on its way here: what the box says of it, where it will be, which of its bytes are there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sojourn.remote.box.hashes import DOWNLOAD
from sojourn.remote.box.transfer import FollowingHash, Partial, Paths
from sojourn.remote.manifest import content_key
from sojourn.remote.sync import Pieces

if TYPE_CHECKING:
    from sojourn.remote.download import Download

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


class Arriving:
    """A file on its way here."""

    def __init__(self, download: Download, root: str, entry: Remote, paths: Paths) -> None:
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
