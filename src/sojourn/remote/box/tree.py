"""What is in a folder: files, links inside it, folders; for both ends of a sync. Stdlib only."""

from __future__ import annotations

import os
import stat

from sojourn.remote.box.transfer import PREFIX, Paths, Refused, remove_quietly

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Iterator


class Entry:
    """`rel` has "/" between its parts on every system."""

    __slots__ = ("kind", "path", "rel", "size", "status", "target")

    def __init__(self, rel: str, path: str, kind: str, status: os.stat_result, target: str = "") -> None:
        self.rel, self.path, self.kind, self.status, self.target = rel, path, kind, status, target
        self.size = status.st_size if kind == "file" else 0

    @property
    def mode(self) -> int:
        return 0o755 if os.name != "nt" and self.status.st_mode & stat.S_IXUSR else 0o644


def scan(
    root: str, skipped: Callable[[str], None], keep: Callable[[str, bool], bool] = lambda rel, is_folder: True
) -> Iterator[Entry]:
    """In a fixed order; a folder before its content. Where `root` is a file, that alone, named as it is."""
    if os.path.isfile(root):
        yield Entry(os.path.basename(root), root, "file", os.stat(root))
        return
    if not os.path.isdir(root):
        return
    real = os.path.realpath(root)
    folders = [""]
    while folders:
        folder = folders.pop()
        try:
            entries = sorted(os.scandir(os.path.join(root, folder) if folder else root), key=lambda entry: entry.name)
        except OSError as error:
            skipped("%s: %s" % (folder or root, error.strerror))
            continue
        inner = []
        for entry in entries:
            rel = "%s/%s" % (folder, entry.name) if folder else entry.name
            if entry.name.startswith(PREFIX):
                continue
            try:
                found = _entry(entry, rel, real, skipped)
            except OSError as error:
                skipped("%s: %s" % (rel, error.strerror))
                continue
            if found is None or not keep(rel, found.kind == "folder"):
                continue
            yield found
            if found.kind == "folder":
                inner.append(rel)
        folders.extend(reversed(inner))


def _entry(entry: os.DirEntry[str], rel: str, real: str, skipped: Callable[[str], None]) -> Entry | None:
    if entry.is_symlink():
        return _link(entry, rel, real, skipped)
    if entry.is_dir():
        return Entry(rel, entry.path, "folder", entry.stat())
    if entry.is_file():
        # Windows gives an entry's inode and link count only by another call.
        return Entry(rel, entry.path, "file", os.stat(entry.path) if os.name == "nt" else entry.stat())
    skipped("%s: neither a file nor a folder" % rel)
    return None


def _link(entry: os.DirEntry[str], rel: str, real: str, skipped: Callable[[str], None]) -> Entry | None:
    """A link inside the tree stays a link, relative; one that leads out travels as the file that it names."""
    try:
        target = os.path.realpath(entry.path, strict=True)  # type: ignore[call-arg,unused-ignore]
    except TypeError:  # Python 3.8 and 3.9
        target = os.path.realpath(entry.path)
        os.stat(target)
    if target == real or target.startswith(real.rstrip(os.sep) + os.sep):
        here = os.path.dirname(os.path.join(real, *rel.split("/")))
        # One step of a chain of links: what the link itself says, not where the chain ends.
        text = os.readlink(entry.path)
        if os.path.isabs(text) or not _stays_inside(here, text, real):
            text = os.path.relpath(target, os.path.realpath(here))
        return Entry(rel, entry.path, "link", entry.stat(follow_symlinks=False), text.replace(os.sep, "/"))
    if os.path.isfile(target):
        return Entry(rel, target, "file", os.stat(target))
    skipped("%s: a link to a folder outside, %s" % (rel, target))
    return None


def _stays_inside(here: str, text: str, real: str) -> bool:
    reached = os.path.normpath(os.path.join(here, text))
    return reached == real or reached.startswith(real.rstrip(os.sep) + os.sep)


def describe(entry: Entry, digest: str | None) -> list[Any]:
    """One line of a manifest."""
    status = entry.status
    return [entry.rel, entry.kind, entry.size, digest, entry.mode, status.st_mtime_ns, status.st_ino, entry.target]


def make_links_and_folders(paths: Paths, entries: list[list[str]]) -> list[str]:
    """[rel, kind, target] each; what could not be made, with the reason."""
    failed = []
    for rel, kind, target in entries:
        try:
            path = paths.of(rel, make=True)
            if kind == "folder":
                if os.path.lexists(path) and not os.path.isdir(path):
                    os.unlink(path)
                os.makedirs(path, exist_ok=True)
            else:
                _make_link(paths, path, rel, target)
        except (OSError, Refused) as error:
            failed.append("%s: %s" % (rel, error))
    return failed


def _make_link(paths: Paths, path: str, rel: str, target: str) -> None:
    real = os.path.realpath(paths.root)
    here = os.path.realpath(os.path.dirname(path))
    if os.path.isabs(target) or not _stays_inside(here, target, real):
        raise Refused("the link leads out of the folder, to %s" % target)
    if os.path.islink(path) and os.readlink(path) == target:
        return
    new = os.path.join(os.path.dirname(path), "%s%d.tmp" % (PREFIX, os.getpid()))
    remove_quietly(new)
    os.symlink(target, new)
    try:
        os.replace(new, path)
    except OSError:
        remove_quietly(new)
        raise
