"""Files that arrive: safe paths, atomic writes, partial files that a later connection completes. Stdlib only.

Both ends use it: the agent for uploads, the laptop for downloads. A partial file is named after what it will contain,
so whoever writes to it writes the same bytes, and no lock is needed.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import stat
import threading
import time

from sojourn.remote.box.hashes import UPLOAD, new_hash

PREFIX = ".sojourn-"  # of every temporary file; no manifest lists them
_OLD_SECONDS = 7 * 86400
_NUMBERS = itertools.count()
_BINARY = getattr(os, "O_BINARY", 0)


class Refused(Exception):
    """A path that must not be written, or content that is not what was announced."""


class Paths:
    """Paths below one root; refuses `..`, absolute names, and folders that are links out of it."""

    def __init__(self, root: str) -> None:
        self.root = root
        self._real: str | None = None
        self._checked: set[tuple[str, bool]] = set()

    def of(self, rel: str, make: bool = False) -> str:
        parts = rel.split("/")
        if not rel or rel.startswith("/") or "\0" in rel or any(part in ("", ".", "..") for part in parts):
            raise Refused("%r is not a path inside the folder" % rel)
        if os.name == "nt" and any(mark in rel for mark in '\\:<>"|?*'):
            raise Refused("%r cannot be a name on Windows" % rel)
        if any(part.startswith(PREFIX) for part in parts):
            raise Refused("%r is reserved for temporary files" % rel)
        parent = os.path.join(self.root, *parts[:-1])
        if (parent, make) not in self._checked:
            if make:
                self._make(parts[:-1])
            self._check(parent)
            self._checked.add((parent, make))
        return os.path.join(parent, parts[-1])

    def _make(self, parts: list[str]) -> None:
        """The folders on the way; a file in their place gives way, since it is a folder now at the other end."""
        os.makedirs(self.root, exist_ok=True)
        path = self.root
        for part in parts:
            path = os.path.join(path, part)
            try:
                os.mkdir(path)
            except FileExistsError:
                if not os.path.isdir(path):
                    os.unlink(path)
                    os.mkdir(path)
                elif os.path.islink(path):
                    self._check(path)

    def _check(self, parent: str) -> None:
        if self._real is None:
            self._real = os.path.realpath(self.root)
        real = os.path.realpath(parent)
        if real != self._real and not real.startswith(self._real.rstrip(os.sep) + os.sep):
            raise Refused("%s leads out of %s" % (parent, self.root))


def temporary(path: str) -> str:
    name = "%s%d-%d-%d.tmp" % (PREFIX, os.getpid(), next(_NUMBERS), time.monotonic_ns())
    return os.path.join(os.path.dirname(path), name)


def write_whole(
    path: str, data: bytes | memoryview, mode: int = 0o644, mtime_ns: int | None = None, sync: bool = False
) -> os.stat_result:
    """Replaces `path` atomically; a kill leaves the old or the new content."""
    new = temporary(path)
    handle = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _BINARY, 0o600)
    try:
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(handle, view) :]
            if os.name != "nt":
                os.fchmod(handle, mode)
            if sync:
                os.fsync(handle)
        finally:
            os.close(handle)
        return put_in_place(new, path, mtime_ns, sync)
    except BaseException:
        remove_quietly(new)
        raise


def put_in_place(new: str, path: str, mtime_ns: int | None, sync: bool) -> os.stat_result:
    if mtime_ns is not None:
        os.utime(new, ns=(mtime_ns, mtime_ns))
    try:
        os.replace(new, path)
    except (IsADirectoryError, PermissionError):
        if not os.path.isdir(path) or os.path.islink(path):
            raise
        os.rmdir(path)  # an empty folder gives way to the file; another one is an error that says so
        os.replace(new, path)
    if sync:
        sync_folder(os.path.dirname(path))
    return os.lstat(path)


def sync_folder(folder: str) -> None:
    if os.name == "nt":
        return
    handle = os.open(folder or ".", os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError:
        pass  # some network drives cannot
    finally:
        os.close(handle)


def remove_quietly(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)


class Partial:
    """A large file that is not complete: its bytes, and beside it a list of the ranges that are there."""

    def __init__(self, target: str, key: str, size: int) -> None:
        if not key.isalnum():
            raise Refused("not a key: %r" % key)
        self.target, self.size = target, size
        self.path = os.path.join(os.path.dirname(target), PREFIX + key[:40] + ".partial")
        self._done_path = self.path + "-ranges"
        self._handle: int | None = None
        self._done: int | None = None
        self._inode = -1
        self._lock = threading.Lock()

    def begin(self) -> list[list[int]]:
        """The ranges [start, end) that are there, in order, merged."""
        remove_old(os.path.dirname(self.path))
        handle = os.open(self.path, os.O_RDWR | os.O_CREAT | _BINARY, 0o600)
        os.close(handle)
        return merged(self._ranges())

    def _ranges(self) -> list[list[int]]:
        found = []
        have = os.stat(self.path).st_size
        try:
            with open(self._done_path, "rb") as file:
                for line in file:
                    parts = line.split()
                    if len(parts) == 3 and parts[2] == b"." and int(parts[1]) <= min(have, self.size):
                        found.append([int(parts[0]), int(parts[1])])
        except (OSError, ValueError):
            pass
        return found

    def write(self, offset: int, data: bytes | memoryview) -> None:
        with self._lock:
            if self._done is not None and os.stat(self.path).st_ino != self._inode:
                self.close()  # completed, or removed and started again, by somebody else
            if self._handle is None or self._done is None:
                self._handle = os.open(self.path, os.O_WRONLY | _BINARY)
                self._inode = os.fstat(self._handle).st_ino
                self._done = os.open(self._done_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | _BINARY, 0o600)
            os.lseek(self._handle, offset, os.SEEK_SET)
            view, end = memoryview(data), offset + len(data)
            while view:
                view = view[os.write(self._handle, view) :]
            os.write(self._done, b"%d %d .\n" % (offset, end))

    def close(self) -> None:
        for handle in (self._handle, self._done):
            if handle is not None:
                os.close(handle)
        self._handle = self._done = None

    def finish(self, digest: str, expected: str | None, mode: int, mtime_ns: int | None, sync: bool) -> os.stat_result:
        """Puts it in place if `digest`, which is of its bytes, is the expected one; else removes it."""
        if expected is not None and digest != expected:
            self.close()
            self.discard()
            raise Refused("%s: the bytes that arrived are not those that were sent" % self.target)
        if self._handle is not None and sync:
            os.fsync(self._handle)
        self.close()
        if os.name != "nt":
            os.chmod(self.path, mode)
        done = put_in_place(self.path, self.target, mtime_ns, sync)
        remove_quietly(self._done_path)
        return done

    def discard(self) -> None:
        remove_quietly(self._done_path)
        remove_quietly(self.path)


class FollowingHash:
    """Hash of a file in order, in a thread of its own, as far as its bytes are there."""

    def __init__(self, path: str, algorithm: str) -> None:
        self._path = path
        self._digest = new_hash(algorithm)
        self._at = self._upto = 0
        self._changed = threading.Condition()
        self._error: OSError | None = None
        self._stopped = False
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def extend(self, upto: int) -> None:
        with self._changed:
            self._upto = max(self._upto, upto)
            self._changed.notify_all()

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def digest(self, size: int) -> str:
        self.extend(size)
        with self._changed:
            while self._at < size and self._error is None:
                self._changed.wait(0.1)
            if self._error is not None:
                raise self._error
        self.stop()
        return self._digest.hexdigest()

    def _follow(self) -> None:
        try:
            with open(self._path, "rb", buffering=0) as file:
                while True:
                    with self._changed:
                        while self._at >= self._upto and not self._stopped:
                            self._changed.wait(0.5)
                        if self._stopped:
                            return
                        wanted = min(1 << 20, self._upto - self._at)
                    block = file.read(wanted)
                    if not block:
                        raise OSError("%s is shorter than expected" % self._path)
                    self._digest.update(block)
                    with self._changed:
                        self._at += len(block)
                        self._changed.notify_all()
        except OSError as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()


class ArrivingHash:
    """Hash of blocks that come in order, in a thread of its own, without reading them back."""

    def __init__(self) -> None:
        import queue

        self._digest = new_hash(UPLOAD)
        self._blocks: queue.Queue[bytes | None] = queue.Queue(8)
        self.size = 0
        self._thread = threading.Thread(target=self._update, daemon=True)
        self._thread.start()

    def _update(self) -> None:
        while True:
            block = self._blocks.get()
            if block is None:
                return
            self._digest.update(block)

    def add(self, offset: int, data: bytes) -> bool:
        """False where `data` is not what comes next: whoever asked reads the file instead."""
        if offset != self.size:
            return False
        self.size += len(data)
        self._blocks.put(data)
        return True

    def digest(self) -> str:
        self._blocks.put(None)
        self._thread.join()
        return self._digest.hexdigest()


def merged(ranges: list[list[int]]) -> list[list[int]]:
    result: list[list[int]] = []
    for start, end in sorted(ranges):
        if result and start <= result[-1][1]:
            result[-1][1] = max(result[-1][1], end)
        elif end > start:
            result.append([start, end])
    return result


def remove_old(folder: str) -> None:
    """Temporary files that nobody came back to complete."""
    try:
        for entry in os.scandir(folder):
            if entry.name.startswith(PREFIX) and entry.name.endswith((".tmp", ".partial", ".partial-ranges")):
                found = entry.stat(follow_symlinks=False)
                if stat.S_ISREG(found.st_mode) and time.time() - found.st_mtime > _OLD_SECONDS:
                    remove_quietly(entry.path)
    except OSError:
        pass
