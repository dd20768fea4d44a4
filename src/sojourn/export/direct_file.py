"""Writes a large file from front to back past the page cache (O_DIRECT), which takes a tenth of the CPU time.

Only on a local disk: a file system on a network gathers small writes better than we do. Where the disk refuses it, the
file is written as any other. What is in the buffer is not on the disk yet: see `DirectFile.written`.
"""

from __future__ import annotations

import contextlib
import errno
import io
import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np

from sojourn.storage import disk

LEAST_BYTES = 64 << 20  # of a file; smaller ones stay in the page cache, where they are read again
_BUFFER_BYTES = 8 << 20
_BLOCK = 4096  # offsets, lengths and addresses of direct writes are multiples of a disk's block
_REFUSED = (errno.EINVAL, errno.EOPNOTSUPP)


class DirectFile:
    """A file of `total` bytes, of which the first `start` are there already. Use with `with`, and `finish` at the
    end."""

    def __init__(self, path: Path, total: int, start: int) -> None:
        self._plain = path.open("r+b" if start else "wb+", buffering=0)
        try:
            self._plain.truncate(total)
            self._direct = _open_direct(path) if total >= LEAST_BYTES else None
            self._buffer = mmap.mmap(-1, _BUFFER_BYTES)  # begins at a page
            self._copied = np.frombuffer(self._buffer, np.uint8)  # NumPy lets other threads run while it copies
            self.written = start if self._direct is None else start // _BLOCK * _BLOCK  # bytes that left the buffer
            self._filled = start - self.written
            self._plain.seek(self.written)
            self._buffer[: self._filled] = self._plain.read(self._filled)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> DirectFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fileno(self) -> int:
        """For fsync, which is of the file, however it was opened."""
        return self._plain.fileno()

    def write(self, data: memoryview) -> None:
        if self._direct is None and not self._filled:
            self._write(self._plain, data)
            return
        while data:
            taken = min(len(data), _BUFFER_BYTES - self._filled)
            self._copied[self._filled : self._filled + taken] = np.frombuffer(data[:taken], np.uint8)
            self._filled, data = self._filled + taken, data[taken:]
            if self._filled == _BUFFER_BYTES:
                self._flush(_BUFFER_BYTES)

    def finish(self) -> None:
        """Writes what is left; its last bytes, less than a block, as of any other file."""
        self._flush(self._filled // _BLOCK * _BLOCK)
        with memoryview(self._buffer) as view:
            self._write(self._plain, view[: self._filled])
        self._filled = 0

    def close(self) -> None:
        for file in (getattr(self, "_direct", None), self._plain):
            if file is not None:
                with contextlib.suppress(OSError):
                    file.close()

    def _flush(self, length: int) -> None:
        """Writes the first `length` bytes of the buffer, whole blocks, and moves the rest to its front."""
        with memoryview(self._buffer) as view:
            if self._direct is not None:
                try:
                    self._write(self._direct, view[:length])
                except OSError as error:
                    if error.errno not in _REFUSED:
                        raise
                    self._direct.close()
                    self._direct = None
            if self._direct is None:
                self._write(self._plain, view[:length])
        self._filled -= length
        self._buffer.move(0, length, self._filled)

    def _write(self, file: Any, view: memoryview) -> None:
        file.seek(self.written)
        disk.write(file, view)
        self.written += len(view)


def _open_direct(path: Path) -> io.FileIO | None:
    """None where the disk, or the system, has no direct writes."""
    flag = getattr(os, "O_DIRECT", 0)
    if not flag or not os.major(path.stat().st_dev):  # 0: NFS, FUSE, overlayfs, a disk in memory
        return None
    try:
        return io.FileIO(path, "r+", opener=lambda name, flags: os.open(name, flags | flag))
    except OSError:
        return None
