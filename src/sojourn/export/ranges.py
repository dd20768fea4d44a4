"""Writes a large file part by part, in order: reading, computing and writing overlap, and a call that was killed goes
on after the last part that reached the disk."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sojourn.export.direct_file import DirectFile
from sojourn.export.progress import Progress
from sojourn.storage import disk

_AHEAD = 3  # parts that are loaded while one is written; with it they bound the memory
_SYNC_BYTES = 256 << 20  # what a kill may make a call write again, at most, beside a part


@dataclass(frozen=True)
class Part:
    """`load` gives `length` bytes, to be written at `offset`. Some tens of MiB: a few of them are in memory at once."""

    offset: int
    length: int
    load: Callable[[], Any]  # bytes, or what has the buffer protocol


def write_ranges(
    path: Path,
    total: int,
    parts: Sequence[Part],
    done: int,
    record: Callable[[int], None],
    progress: Progress,
) -> None:
    """Writes all parts but the first `done`. `record(n)`: n parts are on the disk. Parts must follow each other without
    gaps."""
    _check(parts, total)
    start = parts[done - 1].offset + parts[done - 1].length if done else 0
    with DirectFile(path, total, start) as file, _Syncer(file.fileno(), record) as syncer:
        with closing(_loaded(parts[done:])) as loaded:
            whole = done  # parts that left the file's buffer
            for number, data in enumerate(loaded, done):
                part, view = parts[number], memoryview(data).cast("B")
                if len(view) != part.length:
                    raise ValueError(f"{path.name}: part {number} has {len(view):,} bytes instead of {part.length:,}")
                file.write(view)
                while whole <= number and parts[whole].offset + parts[whole].length <= file.written:
                    syncer.wrote(whole + 1, parts[whole].length)
                    whole += 1
                progress.advance(part.length)
        file.finish()
        syncer.wrote(len(parts), 0)


def _check(parts: Sequence[Part], total: int) -> None:
    end = 0
    for part in parts:
        if part.offset != end:
            raise ValueError(f"a part begins at {part.offset:,} instead of {end:,}")
        end += part.length
    if end != total:
        raise ValueError(f"the parts have {end:,} bytes instead of {total:,}")


def _loaded(parts: Iterable[Part]) -> Generator[Any, None, None]:
    """Their bytes, in order, loaded ahead by two threads: one reads while the other computes."""
    waiting: deque[Future[Any]] = deque()
    with ThreadPoolExecutor(2, "load", initializer=_compute_alone) as threads:
        try:
            for part in parts:
                waiting.append(threads.submit(part.load))
                if len(waiting) >= _AHEAD:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def _compute_alone() -> None:
    """torch's operations in this thread have no helper threads, which would spin in between and hold up the others."""
    import torch

    torch.set_num_threads(1)


class _Syncer:
    """A thread that fsyncs the file now and then and records what is on the disk; the writer does not wait for it."""

    def __init__(self, handle: int, record: Callable[[int], None]) -> None:
        self._handle, self._record = handle, record
        self._count = self._bytes = 0
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._ended = self._abandoned = False
        self._thread = threading.Thread(target=self._run, name="sync", daemon=True)

    def wrote(self, count: int, length: int) -> None:
        with self._changed:
            self._count, self._bytes = count, self._bytes + length
            self._changed.notify()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        recorded = 0
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._ended or self._bytes >= _SYNC_BYTES)
                count, self._bytes, ended = self._count, 0, self._ended
            if count > recorded:
                try:
                    disk.sync(self._handle)
                    with self._changed:
                        if not self._abandoned:
                            self._record(count)
                except OSError as error:
                    self._error = error
                    return
                recorded = count
            if ended:
                return

    def __enter__(self) -> _Syncer:
        self._thread.start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """After an error or Ctrl-C nothing more is synced: that may take a while."""
        with self._changed:
            self._ended, self._abandoned = True, kind is not None
            self._count = 0 if self._abandoned else self._count
            self._changed.notify()
        if self._abandoned:
            return
        self._thread.join()
        if self._error is not None:
            raise self._error
