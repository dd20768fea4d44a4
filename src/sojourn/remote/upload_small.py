"""Small files to the box: many in one request."""

from __future__ import annotations

from typing import Any

from sojourn.remote.agent_client import Agent, AgentFailed
from sojourn.remote.box.tree import Entry
from sojourn.remote.manifest import Tree
from sojourn.remote.outgoing import Outgoing
from sojourn.remote.sync import BATCH_BYTES, BATCH_FILES, compressed


class Batch:
    """Small files in one request."""

    def __init__(self, upload: Outgoing, tree: Tree, entries: list[Entry]) -> None:
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


def batches(upload: Outgoing, needed: list[tuple[Tree, Entry]]) -> list[Batch]:
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
