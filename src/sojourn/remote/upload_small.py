"""Small files to the box: many in one request; read and hashed while the box is being connected to."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sojourn.remote.agent_client import Agent, AgentFailed
from sojourn.remote.box.hashes import UPLOAD, HashCache, new_hash, stamp
from sojourn.remote.box.tree import Entry
from sojourn.remote.manifest import Tree
from sojourn.remote.sync import BATCH_BYTES, BATCH_FILES, SMALL_BYTES, compressed

if TYPE_CHECKING:
    from sojourn.remote.upload import Upload

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


class Batch:
    """Small files in one request."""

    def __init__(self, upload: Upload, tree: Tree, entries: list[Entry]) -> None:
        self._upload, self._tree, self._entries = upload, tree, entries
        self.cost = sum(entry.size for entry in entries) + 200 * len(entries)
        self._sent: list[tuple[Entry, str, int]] = []

    def send(self, agent: Agent) -> None:
        files, parts = [], []
        for entry in self._entries:
            try:
                content = self._upload.ahead.take(entry.path)
            except OSError as error:
                self._upload.failed.append(f"{entry.path}: {error.strerror}")
                continue
            sent = entry if content.is_of(entry) else Entry(entry.rel, entry.path, "file", content.status)
            size = len(content.data)
            self._sent.append((sent, content.digest, size))
            files.append([entry.rel, size, entry.mode, content.status.st_mtime_ns, content.digest])
            parts.append(content.data)
        blob, packed = compressed(b"".join(parts), self._upload.meter)
        where = {"root": self._tree.root, "cache": self._upload.cache_of(self._tree)}
        agent.send("put_many", blob, files=files, sync=False, packed=packed, **where)

    def done(self, answer: dict[str, Any], blob: bytes) -> None:
        failed = {index: message for index, message, _ in answer["failed"]}
        upload = self._upload
        with upload.lock:
            for index, (entry, digest, size) in enumerate(self._sent):
                upload.meter.moved(size)
                if index in failed:
                    upload.failed.append(f"{entry.rel}: {failed[index]}")
                else:
                    upload.arrived += 1
                    upload.stored(entry, digest)

    def failed(self, error: AgentFailed) -> None:
        with self._upload.lock:
            self._upload.failed.append(str(error))


def batches(upload: Upload, needed: list[tuple[Tree, Entry]]) -> list[Batch]:
    result: list[Batch] = []
    group: list[Entry] = []
    at, size = None, 0
    for tree, entry in needed:
        if group and (tree is not at or size + entry.size > BATCH_BYTES or len(group) >= BATCH_FILES):
            result.append(Batch(upload, at or tree, group))
            group, size = [], 0
        at, size = tree, size + entry.size
        group.append(entry)
    if group and at is not None:
        result.append(Batch(upload, at, group))
    return result
