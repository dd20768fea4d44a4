"""What a folder of this machine contains, for a sync: files with the hashes that are known, links, folders."""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from sojourn.remote.box.hashes import HashCache, stamp
from sojourn.remote.box.tree import Entry, scan
from sojourn.remote.hosts import Host, config_folder
from sojourn.remote.ignore import Ignore


@dataclass
class Tree:
    """Entries that belong below one folder on the box, `root`. `digests` are those that need no reading now."""

    root: str
    entries: list[Entry] = field(default_factory=list)
    digests: dict[str, str] = field(default_factory=dict)

    @property
    def unknown(self) -> list[Entry]:
        """Files that no sync has seen as they are now: most of them will travel."""
        return [entry for entry in self.entries if entry.kind == "file" and entry.rel not in self.digests]

    def packed(self, without: set[int]) -> bytes:
        """As the agent compares it. `without`: the ids of entries that it is not asked about."""
        lines = [
            [entry.rel, entry.kind, entry.size, self.digests.get(entry.rel), entry.mode]
            if entry.kind == "file" and id(entry) not in without
            else None
            for entry in self.entries
        ]
        return zlib.compress(json.dumps(lines).encode(), 1)


def local_cache(algorithm: str) -> HashCache:
    """Hashes of this machine's files."""
    return HashCache(str(config_folder() / "cache" / f"hashes.{algorithm}"), algorithm)


def remote_cache(home: str, root: str, algorithm: str) -> str:
    """The file on the box that keeps the hashes of `root`."""
    name = hashlib.sha256(os.fsencode(root)).hexdigest()[:16]
    return f"{home or '~'}/.sojourn/cache/{name}.{algorithm}"


def first_push(host: Host, root: str) -> bool:
    """Whether this machine has never sent anything to this folder of the box; it has from now on."""
    folder = config_folder() / "cache" / "pushed"
    mark = folder / content_key(host.name, host.address, host.port, root)[:32]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        mark.touch(exist_ok=False)
    except OSError:  # it exists, or cannot be written
        return False
    return True


def list_trees(
    items: list[tuple[Path, str]], cache: HashCache, ignore: Ignore | None, skipped: Callable[[str], None]
) -> list[Tree]:
    """A folder becomes a tree of its own; files that go to the same folder become one."""
    trees: dict[tuple[str, bool], Tree] = {}
    for local, given in items:
        remote = given.rstrip("/")
        if local.is_dir():
            keep = (ignore or Ignore()).keeps
            tree = trees.setdefault((remote, True), Tree(remote))
            tree.entries += scan(str(local), skipped, keep)
        else:
            folder, _, name = remote.rpartition("/")
            tree = trees.setdefault((folder or "/", False), Tree(folder or "/"))
            tree.entries.append(Entry(name, str(local), "file", local.stat()))
    for tree in trees.values():
        for entry in tree.entries:
            if entry.kind == "file" and (known := cache.cached(entry.path, entry.status)):
                tree.digests[entry.rel] = known
    return list(trees.values())


def content_key(*parts: object) -> str:
    """Names a partial file after what it will contain."""
    return hashlib.sha256("\0".join(str(part) for part in parts).encode("utf-8", "surrogateescape")).hexdigest()


def upload_key(entry: Entry) -> str:
    """By path, size, times and inode rather than by hash, so that a file travels while it is hashed."""
    return content_key(Path(entry.path).absolute(), stamp(entry.status))
