"""Files and folders from the box: resumed at the byte, verified by SHA-256 before they take their place.

A folder with a manifest.json (a checkpoint) arrives in a staging folder, which takes its place when it is whole.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import threading
import time
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sojourn.remote.agent_client import Agent, AgentFailed
from sojourn.remote.box.transfer import PREFIX, FollowingHash, Partial, Paths, Refused, sync_folder, write_whole
from sojourn.remote.box.tree import make_links_and_folders, scan
from sojourn.remote.ignore import Ignore
from sojourn.remote.manifest import content_key, local_cache, remote_cache
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
    SyncFailed,
    fail_if_any,
    is_slow,
    smaller,
    streams_of,
)

if TYPE_CHECKING:
    from sojourn.remote.box_client import Box

_MANIFEST = "manifest.json"
_CHANGED = "it changed while it travelled"
_LOOKS = 3
_SYNC_EACH = 32  # files


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


class Download:
    """One call of `pull`; survives lost connections by being run again."""

    def __init__(
        self, box: Box, remote: str, local: Path, progress: ProgressCallback | None, ignore: Ignore | None
    ) -> None:
        self.box, self.remote, self.local, self.ignore = box, remote.rstrip("/") or "/", local, ignore
        self.meter = Meter(progress)
        self.cache = local_cache()
        self.result = Synced()
        self.failed: list[str] = []
        self.chunk = 2 * CHUNK_BYTES  # the first attempt halves it
        self.arrived = 0
        self.lock = threading.Lock()
        self.sync_each = True

    def run(self) -> Synced:
        began = time.monotonic()
        for look in range(1, _LOOKS + 1):
            try:
                self.box.again(self._once, lambda: self.arrived)
                break
            except SyncFailed as error:
                if look == _LOOKS or _CHANGED not in str(error):
                    raise
            finally:
                self.cache.save()
        self._sync_all()
        self.meter.report(last=True)
        self.result.seconds = time.monotonic() - began
        return self.result

    def _sync_all(self) -> None:
        """What is reported as brought home is on this machine's disk: many files by one call, a few each by its own."""
        if self.result.files and not self.sync_each:
            os.sync()

    def _once(self) -> None:
        self.failed, self.result.skipped = [], []
        self.chunk = smaller(self.chunk)
        with self.box.agent() as agent:
            is_file, entries = self._manifest(agent)
            if is_file:
                self._pull_into(agent, self.local.parent, entries, self.remote.rpartition("/")[0] or "/")
            elif any(entry.rel == _MANIFEST for entry in entries):
                self._pull_staged(agent, entries)
            else:
                self.local.mkdir(parents=True, exist_ok=True)
                self._pull_into(agent, self.local, entries, self.remote)

    def _manifest(self, agent: Agent) -> tuple[bool, list[Remote]]:
        here = self.local if self.local.is_dir() else self._staging()
        sizes = {entry.rel: entry.size for entry in scan(str(here), lambda line: None) if entry.kind == "file"}
        if self.local.is_file():
            sizes = {self.remote.rpartition("/")[2]: self.local.stat().st_size}
        blob = zlib.compress(json.dumps(sizes).encode(), 1)
        cache = remote_cache(self.box.host.home, self.remote)
        answer, blob = agent.ask("manifest", blob, root=self.remote, cache=cache, small=SMALL_BYTES)
        if not answer["exists"]:
            raise MissingOnBox(f"{self.box.host.name}: there is no {self.remote} on the box")
        self.result.skipped += answer["skipped"]
        entries = [Remote(*line) for line in json.loads(zlib.decompress(blob))]
        keeps = (self.ignore or Ignore()).keeps
        gone: set[str] = set()
        kept = []
        for entry in entries:
            if entry.rel.rpartition("/")[0] in gone or not keeps(entry.rel, entry.kind == "folder"):
                gone.add(entry.rel)
            else:
                kept.append(entry)
        return answer["is_file"], kept

    # a folder that is whole or not there

    def _staging(self) -> Path:
        name = content_key(self.box.host.name, self.remote, self.local.name)[:16]
        return self.local.parent / f"{PREFIX}{name}.staging"

    def _pull_staged(self, agent: Agent, entries: list[Remote]) -> None:
        if self._is_here(self.local, entries):
            self.result.unchanged = len(entries)
            return
        staging = self._staging()
        staging.mkdir(parents=True, exist_ok=True)
        _remove_others(staging, entries)
        self._pull_into(agent, staging, entries, self.remote)
        _check_manifest(staging)
        self._sync_all()
        _take_place(staging, self.local)

    def _is_here(self, folder: Path, entries: list[Remote]) -> bool:
        for entry in entries:
            path = folder / entry.rel
            if entry.kind == "file" and not (path.is_file() and entry.digest and self._digest(path) == entry.digest):
                return False
        return folder.is_dir()

    def _digest(self, path: Path) -> str:
        return self.cache.of(str(path), path.stat())

    # files

    def _pull_into(self, agent: Agent, folder: Path, entries: list[Remote], root: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        paths = Paths(str(folder))
        files = [Arriving(self, root, entry, paths) for entry in entries if entry.kind == "file"]
        if len(entries) == 1 and folder == self.local.parent and root != self.remote:
            files[0].name = self.local.name
        needed = [file for file in files if self._is_needed(file)]
        self.result.unchanged = len(files) - len(needed)
        self.meter.total = self.meter.done + sum(file.entry.size for file in needed)
        self.sync_each = len(needed) <= _SYNC_EACH or not hasattr(os, "sync")
        if needed:
            self._receive(agent, needed)
        others = [[entry.rel, entry.kind, entry.target] for entry in entries if entry.kind != "file"]
        self.failed += make_links_and_folders(paths, others)
        fail_if_any(self.failed, "brought home")

    def _is_needed(self, file: Arriving) -> bool:
        try:
            path = file.path(make=False)
        except Refused as error:
            self.failed.append(str(error))
            return False
        if file.entry.digest is None or not path.is_file() or path.stat().st_size != file.entry.size:
            return True
        return self._digest(path) != file.entry.digest

    def _receive(self, agent: Agent, needed: list[Arriving]) -> None:
        small = [file for file in needed if file.entry.size <= SMALL_BYTES]
        large = [file for file in needed if file.entry.size > SMALL_BYTES]
        total = sum(file.entry.size + 512 for file in needed)
        with streams_of(self.box, total, self.chunk, None if large else agent) as streams:
            for batch in _batches(self, small):
                while not streams.put(batch):
                    self.meter.report()
            if large:
                _receive_large(self, agent, streams, large)

    def stored(self, path: str, entry: Remote, status: os.stat_result, digest: str) -> None:
        self.cache.remember(path, status, digest)
        self.result.files += 1
        self.result.bytes += entry.size


class MissingOnBox(SyncFailed):
    """There is no such file or folder."""


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
        self.hash = FollowingHash(self.partial.path)
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


class Piece:
    """A chunk of a large file."""

    def __init__(self, file: Arriving, start: int, end: int) -> None:
        self._file, self._start, self._end = file, start, end
        self.cost = end - start

    def send(self, agent: Agent) -> None:
        file = self._file
        pack = is_slow(file.download.meter)
        where: dict[str, Any] = {"root": file.root, "rel": file.entry.rel, "stamp": file.entry.stamp}
        agent.send("get", offset=self._start, length=self.cost, pack=pack, **where)

    def done(self, answer: dict[str, Any], blob: bytes) -> None:
        file = self._file
        if answer.get("changed") or len(blob) != self.cost:
            file.error = _CHANGED
            return
        try:
            if file.partial is not None:
                file.partial.write(self._start, blob)
        except OSError as error:
            file.error = error.strerror or str(error)
            return
        with file.download.lock:
            file.download.meter.moved(self.cost)
            file.download.arrived += 1
            file.arrived(self._start, self._end)

    def failed(self, error: AgentFailed) -> None:
        self._file.error = str(error)


def _receive_large(download: Download, agent: Agent, streams: Streams, files: list[Arriving]) -> None:
    """The agent hashes each file while the streams read it; the page cache serves both."""
    waiting = list(reversed(files))
    active: list[Arriving] = []
    try:
        while waiting or active:
            while waiting and len(active) < OPEN_FILES:
                file = waiting.pop()
                _begin(download, agent, file, active)
            busy = False
            for file in active:
                missing = file.pieces.missing
                while missing and not file.error and streams.put(Piece(file, *missing[-1]), wait=0.0):
                    missing.pop()
                    busy = True
            streams.check()
            download.meter.report()
            while active and (active[0].pieces.complete or active[0].error):
                _finish(download, agent, active.pop(0))
                busy = True
            if not busy:
                time.sleep(0.005)
    finally:
        for file in active:
            file.give_up()


def _begin(download: Download, agent: Agent, file: Arriving, active: list[Arriving]) -> None:
    try:
        file.begin()
    except (OSError, Refused) as error:
        download.failed.append(f"{file.name}: {error}")
        return
    active.append(file)
    if file.entry.digest is None:
        agent.send(
            "hash",
            root=file.root,
            rel=file.entry.rel,
            cache=remote_cache(download.box.host.home, download.remote),
        )


def _finish(download: Download, agent: Agent, file: Arriving) -> None:
    """Hashes are answered in the order of the files."""
    expected = file.entry.digest
    if expected is None:
        try:
            expected = str(agent.receive()[0]["digest"])
        except AgentFailed as error:
            file.error = file.error or str(error)
    if file.error or file.partial is None or file.hash is None:
        file.give_up()
        download.failed.append(f"{file.name}: {file.error}")
        return
    try:
        digest = file.hash.digest(file.entry.size)
        status = file.partial.finish(digest, expected, file.entry.mode, file.entry.mtime_ns, download.sync_each)
    except Refused:
        download.failed.append(f"{file.name}: {_CHANGED}, or was damaged on its way")
    except OSError as error:
        download.failed.append(f"{file.name}: {error}")
    else:
        with download.lock:
            download.stored(str(file.path()), file.entry, status, digest)


class Batch:
    """Small files in one answer."""

    def __init__(self, download: Download, files: list[Arriving]) -> None:
        self._download, self._files = download, files
        self.cost = sum(file.entry.size for file in files) + 100 * len(files)

    def send(self, agent: Agent) -> None:
        pack = is_slow(self._download.meter)
        agent.send("get_many", root=self._files[0].root, files=[file.entry.rel for file in self._files], pack=pack)

    def done(self, answer: dict[str, Any], blob: bytes) -> None:
        download, at, view = self._download, 0, memoryview(blob)
        for file, (size, digest) in zip(self._files, answer["sizes"], strict=True):
            if size < 0:
                download.failed.append(f"{file.name}: {_CHANGED}: {digest}")
                continue
            data = view[at : at + size]
            at += size
            expected = file.entry.digest or digest
            try:
                if hashlib.sha256(data).hexdigest() != expected:
                    raise Refused(_CHANGED)
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


def _batches(download: Download, files: list[Arriving]) -> list[Batch]:
    result, group, size = [], list[Arriving](), 0
    for file in files:
        if group and (size + file.entry.size > BATCH_BYTES or len(group) >= BATCH_FILES):
            result.append(Batch(download, group))
            group, size = [], 0
        group.append(file)
        size += file.entry.size
    return [*result, Batch(download, group)] if group else result


def _remove_others(staging: Path, entries: list[Remote]) -> None:
    """What an earlier attempt brought and the box no longer has."""
    listed = {entry.rel for entry in entries}
    for found in scan(str(staging), lambda line: None):
        if found.rel not in listed and found.kind != "folder":
            Path(found.path).unlink(missing_ok=True)


def _check_manifest(folder: Path) -> None:
    """Every file that manifest.json lists is there with that size and hash."""
    try:
        listed = json.loads((folder / _MANIFEST).read_bytes())
    except ValueError:
        return  # a manifest of another program
    if not isinstance(listed, dict) or not all(isinstance(line, dict) and "sha256" in line for line in listed.values()):
        return
    from sojourn.run.checkpoints import file_damage

    for name, line in listed.items():
        damage = file_damage(folder / name, line)
        if damage:
            raise SyncFailed(f"{folder.name}: {_CHANGED}, or is damaged on the box: {damage}")


def _take_place(staging: Path, target: Path) -> None:
    """Renames; an older folder of this name is kept until the new one is in place."""
    for rest in [path for path in staging.rglob(f"{PREFIX}*") if path.is_file()]:
        rest.unlink()  # of files that changed on the box meanwhile
    old = target.with_name(f"{PREFIX}{target.name}.old")
    if target.exists():
        shutil.rmtree(old, ignore_errors=True)
        target.rename(old)
    staging.rename(target)
    sync_folder(str(target.parent))
    with contextlib.suppress(OSError):
        shutil.rmtree(old, ignore_errors=True)
