"""Large files to the box: in chunks over several streams, resumed at the byte, verified before they are in place."""

from __future__ import annotations

import time
import zlib
from concurrent.futures import Future, ThreadPoolExecutor
from errno import ENOENT
from pathlib import Path
from typing import Any

from sojourn.remote.agent_client import Agent, AgentFailed
from sojourn.remote.box.hashes import UPLOAD, hash_file, stamp
from sojourn.remote.box.tree import Entry
from sojourn.remote.manifest import Tree, upload_key
from sojourn.remote.outgoing import Outgoing
from sojourn.remote.streams import Streams
from sojourn.remote.sync import CHUNK_BYTES, OPEN_FILES, Pieces, compressed


class LargeFile:
    """A file that travels in chunks, which may arrive in any order."""

    def __init__(self, upload: Outgoing, tree: Tree, entry: Entry) -> None:
        self.upload, self.tree, self.entry = upload, tree, entry
        self.digest = tree.digests.get(entry.rel)
        self.key = upload_key(entry)
        self.where: dict[str, Any] = {"root": tree.root, "rel": entry.rel, "key": self.key, "size": entry.size}
        self.pieces = Pieces(entry.size, [], entry.size)
        self.hashed = 0
        self.in_order = False  # all of it goes through one stream, whose agent hashes it as it comes
        self.committing = self.stored = False
        self.local: Future[str] | None = None
        self.error: str | None = None

    def begin(self, ranges: list[list[int]]) -> None:
        self.pieces = Pieces(self.entry.size, ranges, self.upload.chunk)
        with self.upload.lock:
            there = self.entry.size - self.pieces.missing_bytes
            self.upload.meter.done += there
            self.upload.found = max(self.upload.found, there)

    def commit_fields(self) -> dict[str, Any]:
        digest = self.digest or (self.local.result() if self.local else None)
        where = {"key": self.key, "cache": self.upload.cache_of(self.tree), "sync": self.upload.durable}
        return {**where, "digest": digest, "mode": self.entry.mode, "mtime_ns": self.entry.status.st_mtime_ns}

    def changed(self) -> bool:
        try:
            return stamp(Path(self.entry.path).stat()) != stamp(self.entry.status)
        except OSError:
            return True


class Chunk:
    def __init__(self, file: LargeFile, start: int, end: int) -> None:
        self._file, self._start, self._end = file, start, end
        self.cost = end - start

    def send(self, agent: Agent) -> None:
        with Path(self._file.entry.path).open("rb", buffering=0) as file:
            file.seek(self._start)
            data = file.read(self.cost)
        if len(data) != self.cost:
            self._file.error = "changed"
            data = data.ljust(self.cost, b"\0")
        blob, packed = compressed(data, self._file.upload.meter)
        agent.send(
            "put",
            blob,
            offset=self._start,
            crc=zlib.crc32(data),
            packed=packed,
            in_order=self._file.in_order,
            **self._file.where,
        )

    def done(self, answer: dict[str, Any], blob: bytes) -> None:
        upload = self._file.upload
        with upload.lock:
            upload.meter.moved(self.cost)
            upload.arrived += 1
            self._file.pieces.arrived(self._start, self._end)

    def failed(self, error: AgentFailed) -> None:
        # Another sync of the same file has completed it, or removed what was there: look again.
        self._file.error = "changed" if error.errno == ENOENT else self._file.error or str(error)


def send_large(upload: Outgoing, agent: Agent, streams: Streams, files: list[LargeFile]) -> bool:
    """True where one of them changed while it travelled."""
    waiting, changed = list(reversed(files)), False
    active: list[LargeFile] = []
    with ThreadPoolExecutor(1) as hasher:
        while waiting or active:
            new = [waiting.pop() for _ in range(min(len(waiting), OPEN_FILES - len(active)))]
            active += _begin(upload, agent, new, hasher, streams.count == 1)
            busy = _feed(streams, active)
            upload.meter.report()
            ended = [file for file in active if file.pieces.complete or file.error]
            for file in [file for file in ended if file.in_order and not file.error and not file.stored]:
                if not file.committing and not file.changed():
                    file.committing = streams.put(Commit(file), wait=1)
                if file.committing:
                    ended.remove(file)
            for file in active:
                prefix = file.pieces.prefix
                if prefix - file.hashed >= 8 * CHUNK_BYTES and not file.error and not file.in_order:
                    agent.ask("hash_to", key=file.key, upto=prefix)
                    file.hashed = prefix
            for file in ended:
                active.remove(file)
                changed |= _commit(upload, agent, file)
            if not busy and not ended:
                time.sleep(0.005)
    return changed


def _feed(streams: Streams, active: list[LargeFile]) -> bool:
    """Chunks of the oldest file first. Whether any could be queued."""
    for file in active:
        if file.pieces.missing and not file.error:
            start, end = file.pieces.missing[-1]
            if streams.put(Chunk(file, start, end), wait=0.05):
                file.pieces.missing.pop()
                return True
            return False
    streams.check()
    return False


def _begin(
    upload: Outgoing, agent: Agent, files: list[LargeFile], hasher: ThreadPoolExecutor, in_order: bool
) -> list[LargeFile]:
    for file in files:
        agent.send("begin", **file.where)
    started = []
    for file in files:
        try:
            file.begin(agent.receive()[0]["ranges"])
        except AgentFailed as error:
            upload.failed.append(f"{file.entry.rel}: {error}")
            continue
        fresh = file.pieces.missing_bytes == file.entry.size
        file.in_order = in_order and fresh
        if not fresh and file.digest is None:
            # What an earlier connection sent is checked too, so this end's hash is needed.
            file.local = hasher.submit(hash_file, file.entry.path, UPLOAD)
        started.append(file)
    return started


class Commit:
    """By the agent that has received the file."""

    cost = 0

    def __init__(self, file: LargeFile) -> None:
        self._file = file

    def send(self, agent: Agent) -> None:
        agent.send("commit", **self._file.commit_fields())

    def done(self, answer: dict[str, Any], blob: bytes) -> None:
        with self._file.upload.lock:
            self._file.upload.stored(self._file.entry, answer["digest"])
        self._file.stored = True

    def failed(self, error: AgentFailed) -> None:
        self._file.error = "changed" if error.errno == ENOENT else str(error)


def _commit(upload: Outgoing, agent: Agent, file: LargeFile) -> bool:
    """True where the file changed while it travelled."""
    entry = file.entry
    if file.stored:
        return False
    if file.changed() or file.error == "changed":
        agent.ask("abandon", key=file.key)
        return upload.look_again(entry)
    if file.error:
        upload.failed.append(f"{entry.rel}: {file.error}")
        return False
    try:
        answer, _ = agent.ask("commit", **file.commit_fields())
    except AgentFailed as error:
        if error.errno == ENOENT:
            return upload.look_again(entry)
        upload.failed.append(f"{entry.rel}: {error}")
        return False
    with upload.lock:
        upload.stored(entry, answer["digest"])
    return False
