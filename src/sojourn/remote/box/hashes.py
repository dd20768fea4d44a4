"""Hashes of files, remembered by size, times and inode, so that unchanged files are not read again. Stdlib only.

What goes to a box is compared by BLAKE2b, which is fast on every processor; SHA-256 takes twice as long on one without
instructions for it, and then decides how fast a large file travels. What comes home is verified by SHA-256, by which
runs know their files.
"""

from __future__ import annotations

import hashlib
import json
import os
import time

_RECENT_NS = 2_000_000_000  # a file changed so recently may change again with the same times


UPLOAD, DOWNLOAD = "blake2b", "sha256"


def new_hash(algorithm: str, data: bytes | memoryview = b"") -> hashlib._Hash | hashlib.blake2b:
    return hashlib.blake2b(data, digest_size=32) if algorithm == UPLOAD else hashlib.sha256(data)


def hash_file(path: str, algorithm: str) -> str:
    digest = new_hash(algorithm)
    with open(path, "rb", buffering=0) as file:
        block = file.read(1 << 20)
        while block:
            digest.update(block)
            block = file.read(1 << 20)
    return digest.hexdigest()


def stamp(stat: os.stat_result) -> list[int]:
    """Changes whenever the content does; nobody can set the change time back."""
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]


class HashCache:
    """A file of lines, only appended to, so that several processes may use it at once; a path's last line counts."""

    def __init__(self, file: str, algorithm: str) -> None:
        self._file, self._algorithm = file, algorithm
        self._known: dict[str, list[object]] = {}
        self._new: list[str] = []
        self._lines = 0
        try:
            with open(file, "rb") as lines:
                for line in lines:
                    self._lines += 1
                    try:
                        path, size, modified, changed, inode, digest = json.loads(line)
                    except (ValueError, TypeError):
                        continue  # cut short by a kill
                    self._known[path] = [size, modified, changed, inode, digest]
        except OSError:
            pass

    def cached(self, path: str, stat: os.stat_result) -> str | None:
        found = self._known.get(path)
        if found and found[:4] == stamp(stat):
            return str(found[4])
        return None

    def of(self, path: str, stat: os.stat_result) -> str:
        digest = self.cached(path, stat)
        if digest is None:
            began = time.time_ns()
            digest = hash_file(path, self._algorithm)
            self.remember_read(path, stat, digest, began)
        return digest

    def remember_read(self, path: str, stat: os.stat_result, digest: str, began_ns: int) -> None:
        """Of what was read from `began_ns` on; not where the file may have changed since with the same times."""
        if stat.st_ctime_ns < began_ns - _RECENT_NS:
            self.remember(path, stat, digest)

    def remember(self, path: str, stat: os.stat_result, digest: str) -> None:
        """`stat` of a file whose content is known, because it was just written for example."""
        line: list[object] = [*stamp(stat), digest]
        if self._known.get(path) != line:
            self._known[path] = line
            self._new.append(path)

    def save(self) -> None:
        """Failing here costs only time at the next call."""
        if not self._new:
            return
        try:
            os.makedirs(os.path.dirname(self._file), exist_ok=True)
            if self._lines + len(self._new) > 2 * len(self._known) + 1000:
                self._rewrite()
            else:
                with open(self._file, "ab", buffering=0) as file:
                    file.write(b"".join(self._line(path) for path in self._new))
                self._lines += len(self._new)
            self._new = []
        except OSError:
            pass

    def _rewrite(self) -> None:
        new = "%s.%d" % (self._file, os.getpid())
        with open(new, "wb") as file:
            for path in self._known:
                file.write(self._line(path))
        os.replace(new, self._file)
        self._lines = len(self._known)

    def _line(self, path: str) -> bytes:
        """Of thousands of files: most of json's time is for lists."""
        return ('[%s, %s, %s, %s, %s, "%s"]\n' % (json.dumps(path), *self._known[path])).encode()
