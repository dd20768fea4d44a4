"""Files and folders from the box: resumed at the byte, verified by SHA-256 before they take their place.

A folder with a manifest.json (a checkpoint) arrives in a staging folder, which takes its place when it is whole.
"""

from __future__ import annotations

import json
import os
import time
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

from sojourn.remote.agent_client import Agent
from sojourn.remote.arriving import CHANGED, Arriving, Incoming, Remote
from sojourn.remote.box.hashes import DOWNLOAD
from sojourn.remote.box.transfer import PREFIX, Paths, Refused
from sojourn.remote.box.tree import make_links_and_folders, scan
from sojourn.remote.download_large import receive_large
from sojourn.remote.download_small import batches
from sojourn.remote.ignore import Ignore
from sojourn.remote.manifest import content_key, remote_cache
from sojourn.remote.progress import ProgressCallback
from sojourn.remote.staging import MANIFEST, check_manifest, remove_others, take_place
from sojourn.remote.sync import (
    SMALL_BYTES,
    Synced,
    SyncFailed,
    fail_if_any,
    smaller,
    streams_of,
    whole_bytes,
)

if TYPE_CHECKING:
    from sojourn.remote.box_link import BoxLink

_LOOKS = 3
_SYNC_EACH = 32  # files


class Download(Incoming):
    """One call of `pull`; survives lost connections by being run again."""

    def __init__(
        self, box: BoxLink, remote: str, local: Path, progress: ProgressCallback | None, ignore: Ignore | None
    ) -> None:
        super().__init__(box, remote, progress)
        self.local, self.ignore = local, ignore

    def run(self) -> Synced:
        began = time.monotonic()
        for look in range(1, _LOOKS + 1):
            try:
                self.box.again(self._once, lambda: self.arrived)
                break
            except SyncFailed as error:
                if look == _LOOKS or CHANGED not in str(error):
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
            elif any(entry.rel == MANIFEST for entry in entries):
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
        cache = remote_cache(self.box.host.home, self.remote, DOWNLOAD)
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
        remove_others(staging, entries)
        self._pull_into(agent, staging, entries, self.remote)
        check_manifest(staging)
        self._sync_all()
        take_place(staging, self.local)

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
        most = whole_bytes(self.chunk)
        small = [file for file in needed if file.entry.size <= most]
        large = [file for file in needed if file.entry.size > most]
        total = sum(file.entry.size + 512 for file in needed)
        with streams_of(self.box, total, self.chunk, None if large else agent) as streams:
            for batch in batches(self, small):
                while not streams.put(batch):
                    self.meter.report()
            if large:
                receive_large(self, agent, streams, large)


class MissingOnBox(SyncFailed):
    """There is no such file or folder."""
