"""Files and folders to the box: only what changed travels, in several streams; a cut transfer goes on where it was."""

from __future__ import annotations

import hashlib
import os
import threading
import time
import zlib
from concurrent.futures import Future, ThreadPoolExecutor
from errno import ENOENT
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sojourn.errors import UserError
from sojourn.remote.agent_client import Agent, AgentFailed
from sojourn.remote.box.hashes import HashCache, sha256, stamp
from sojourn.remote.box.tree import Entry
from sojourn.remote.ignore import Ignore
from sojourn.remote.manifest import Tree, list_trees, local_cache, remote_cache, upload_key
from sojourn.remote.progress import Meter, ProgressCallback
from sojourn.remote.streams import Streams
from sojourn.remote.sync import (
    BATCH_BYTES,
    BATCH_FILES,
    CHUNK_BYTES,
    OPEN_FILES,
    SMALL_BYTES,
    Pieces,
    Synced,
    compressed,
    fail_if_any,
    smaller,
    streams_of,
    streams_opened_early,
)

if TYPE_CHECKING:
    from sojourn.remote.box_client import Box

_CHANGES_ALLOWED = 3


class Upload:
    """One call of `push`; survives lost connections by being run again."""

    def __init__(
        self,
        box: Box,
        items: list[tuple[Path, str]],
        progress: ProgressCallback | None,
        ignore: Ignore | None,
        delete: bool,
        durable: bool,
    ) -> None:
        for local, _ in items:
            if not os.path.lexists(local):
                raise UserError(f"{local}: there is no such file or folder")
        self.box, self.items, self.ignore, self.delete, self.durable = box, items, ignore, delete, durable
        self.meter = Meter(progress)
        self.cache: HashCache = local_cache()
        self.result = Synced()
        self.failed: list[str] = []
        self.changes: dict[str, int] = {}
        self.chunk = 2 * CHUNK_BYTES  # the first attempt halves it
        self.arrived = 0  # requests that the box has confirmed
        self.found = 0  # bytes of large files that earlier attempts have brought
        self.lock = threading.Lock()

    def run(self) -> Synced:
        began = time.monotonic()
        try:
            while not self.box.again(self._once, lambda: (self.arrived, self.found)):
                continue
        finally:
            self.cache.save()
        self.meter.report(last=True)
        fail_if_any(self.failed, "sent")
        self.result.seconds = time.monotonic() - began
        return self.result

    def _once(self) -> bool:
        """False where files changed while they travelled, so that another look is needed."""
        self.failed, self.result.skipped = [], []
        self.chunk, chunk = smaller(self.chunk), self.chunk
        trees = list_trees(self.items, self.cache, self.ignore, self.result.skipped.append)
        with streams_opened_early(self.box, sum(tree.unknown_bytes for tree in trees)), self.box.agent() as agent:
            needed = self._compare(agent, trees)
        with self.box.agent() as agent:
            self.meter.total = self.meter.done + sum(entry.size for _, entry in needed)
            for tree in trees if self.delete else ():
                self._delete(agent, tree)  # first, since a folder may stand where a file will be
            again = self._send(agent, needed)
            if self.durable:
                agent.ask("sync")
        self.chunk = chunk
        return not again

    def _compare(self, agent: Agent, trees: list[Tree]) -> list[tuple[Tree, Entry]]:
        """What of the trees must travel; makes their folders and links with the same round trip."""
        for tree in trees:
            agent.send("compare", tree.packed(), root=tree.root, cache=self._cache_of(tree))
            agent.send("folders", root=tree.root, entries=_without_files(tree))
        needed, self.result.unchanged = [], 0
        answers = [(agent.receive()[0], agent.receive()[0]) for _ in trees]
        for tree, (answer, made) in zip(trees, answers, strict=True):
            self.failed += made["failed"]
            numbers = set(answer["need"])
            for number, digest in answer["hashes"].items():
                entry = tree.entries[int(number)]
                tree.digests[entry.rel] = self.cache.of(entry.path, entry.status)
                if tree.digests[entry.rel] != digest:
                    numbers.add(int(number))
            needed += [(tree, tree.entries[number]) for number in sorted(numbers)]
            files = sum(entry.kind == "file" for entry in tree.entries)
            self.result.unchanged += files - len(numbers)
        return needed

    def _cache_of(self, tree: Tree) -> str:
        return remote_cache(self.box.host.home, tree.root)

    def _send(self, agent: Agent, needed: list[tuple[Tree, Entry]]) -> bool:
        if not needed:
            return False
        large = [LargeFile(self, tree, entry) for tree, entry in needed if entry.size > SMALL_BYTES]
        batches = _batches(self, [(tree, entry) for tree, entry in needed if entry.size <= SMALL_BYTES])
        total = sum(entry.size + 512 for _, entry in needed)
        with streams_of(self.box, total, self.chunk, None if large else agent) as streams:
            for batch in batches:
                while not streams.put(batch):
                    self.meter.report()
            return _send_large(self, agent, streams, large) if large else False

    def _delete(self, agent: Agent, tree: Tree) -> None:
        import json

        _, blob = agent.ask("manifest", root=tree.root, cache=self._cache_of(tree), small=1 << 62)
        here = {entry.rel for entry in tree.entries}
        keeps = (self.ignore or Ignore()).keeps
        gone = [line[0] for line in json.loads(zlib.decompress(blob)) if line[0] not in here]
        gone = [rel for rel in gone if keeps(rel, False)]
        agent.ask("delete", root=tree.root, files=sorted(gone, key=lambda rel: -rel.count("/")))

    def stored(self, entry: Entry, digest: str) -> None:
        self.result.files += 1
        self.result.bytes += entry.size
        if stamp(entry.status)[2] < time.time_ns() - 2_000_000_000:
            self.cache.remember(entry.path, entry.status, digest)


def _without_files(tree: Tree) -> list[list[str]]:
    return [[entry.rel, entry.kind, entry.target] for entry in tree.entries if entry.kind != "file"]


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
                with Path(entry.path).open("rb") as file:
                    data, status = file.read(), os.fstat(file.fileno())
            except OSError as error:
                self._upload.failed.append(f"{entry.path}: {error.strerror}")
                continue
            digest = hashlib.sha256(data).hexdigest()
            if len(data) == status.st_size and stamp(status) == stamp(entry.status):
                self._sent.append((entry, digest, len(data)))
            else:
                self._sent.append((Entry(entry.rel, entry.path, "file", status), digest, len(data)))
            files.append([entry.rel, len(data), entry.mode, status.st_mtime_ns, digest])
            parts.append(data)
        blob, packed = compressed(b"".join(parts), self._upload.meter)
        where = {"root": self._tree.root, "cache": self._upload._cache_of(self._tree)}
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


def _batches(upload: Upload, needed: list[tuple[Tree, Entry]]) -> list[Batch]:
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


class LargeFile:
    """A file that travels in chunks, which may arrive in any order."""

    def __init__(self, upload: Upload, tree: Tree, entry: Entry) -> None:
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
        where = {"key": self.key, "cache": self.upload._cache_of(self.tree), "sync": self.upload.durable}
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


def _send_large(upload: Upload, agent: Agent, streams: Streams, files: list[LargeFile]) -> bool:
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
    upload: Upload, agent: Agent, files: list[LargeFile], hasher: ThreadPoolExecutor, in_order: bool
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
            file.local = hasher.submit(sha256, file.entry.path)
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


def _commit(upload: Upload, agent: Agent, file: LargeFile) -> bool:
    """True where the file changed while it travelled."""
    entry = file.entry
    if file.stored:
        return False
    if file.changed() or file.error == "changed":
        agent.ask("abandon", key=file.key)
        return _look_again(upload, entry)
    if file.error:
        upload.failed.append(f"{entry.rel}: {file.error}")
        return False
    try:
        answer, _ = agent.ask("commit", **file.commit_fields())
    except AgentFailed as error:
        if error.errno == ENOENT:
            return _look_again(upload, entry)
        upload.failed.append(f"{entry.rel}: {error}")
        return False
    with upload.lock:
        upload.stored(entry, answer["digest"])
    return False


def _look_again(upload: Upload, entry: Entry) -> bool:
    count = upload.changes[entry.path] = upload.changes.get(entry.path, 0) + 1
    if count >= _CHANGES_ALLOWED:
        upload.failed.append(f"{entry.path}: it changes while it travels")
    return count < _CHANGES_ALLOWED
