"""Small files from the box: many in one answer."""

from __future__ import annotations

import hashlib
from typing import Any

from sojourn.remote.agent_client import Agent, AgentFailed
from sojourn.remote.arriving import CHANGED, Arriving, Incoming
from sojourn.remote.box.transfer import Refused, write_whole
from sojourn.remote.sync import BATCH_BYTES, BATCH_FILES, is_slow


class Batch:
    """Small files in one answer."""

    def __init__(self, download: Incoming, files: list[Arriving]) -> None:
        self._download, self._files = download, files
        self.cost = sum(file.entry.size for file in files) + 100 * len(files)

    def send(self, agent: Agent) -> None:
        pack = is_slow(self._download.meter)
        agent.send("get_many", root=self._files[0].root, files=[file.entry.rel for file in self._files], pack=pack)

    def done(self, answer: dict[str, Any], blob: bytes) -> None:
        download, at, view = self._download, 0, memoryview(blob)
        for file, (size, digest) in zip(self._files, answer["sizes"], strict=True):
            if size < 0:
                download.failed.append(f"{file.name}: {CHANGED}: {digest}")
                continue
            data = view[at : at + size]
            at += size
            expected = file.entry.digest or digest
            try:
                if hashlib.sha256(data).hexdigest() != expected:
                    raise Refused(CHANGED)
                path = str(file.path())
                status = write_whole(path, data, file.entry.mode, file.entry.mtime_ns, download.sync_each)
            except (OSError, Refused) as error:
                download.failed.append(f"{file.name}: {error}")
                continue
            with download.lock:
                download.meter.moved(size)
                download.arrived += 1
                download.stored(path, file.entry, status, expected)

    def failed(self, error: AgentFailed) -> None:
        self._download.failed.append(str(error))


def batches(download: Incoming, files: list[Arriving]) -> list[Batch]:
    result, group, size = [], list[Arriving](), 0
    for file in files:
        if group and (size + file.entry.size > BATCH_BYTES or len(group) >= BATCH_FILES):
            result.append(Batch(download, group))
            group, size = [], 0
        group.append(file)
        size += file.entry.size
    return [*result, Batch(download, group)] if group else result
