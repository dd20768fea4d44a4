"""What both directions of a sync share: the result, sizes, how many streams, when compression pays."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sojourn.errors import RunFailed, UserError
from sojourn.remote.connection import FAR_SECONDS
from sojourn.remote.progress import Meter

if TYPE_CHECKING:
    from sojourn.remote.agent_client import Agent
    from sojourn.remote.box_link import BoxLink
    from sojourn.remote.streams import Streams

SMALL_BYTES = 1 << 20  # files up to here travel together
BATCH_BYTES, BATCH_FILES = 15 << 15, 100  # four, with what is said about each file, fit into a window of 2 MiB
CHUNK_BYTES, LEAST_CHUNK_BYTES = 1 << 20, 1 << 15  # of a large file; smaller where connections do not last
OPEN_FILES = 4  # large files that travel at once
_STREAM_BYTES = 2 << 20  # what a server lets a channel send before it hears back
_STARTED_BYTES = 8 << 20  # what makes a stream worth a login shell and a Python on the box, where it needs them
_FAR_STREAMS = 6
_BULK_BYTES = 64 << 20
_SAMPLE_BYTES = 1 << 14
_SLOW_SPEED, _PAYS = 8 << 20, 0.8


class SyncFailed(RunFailed):
    """Some files could not travel; the message names the first ones."""


@dataclass
class Synced:
    """`bytes` and `files` that travelled; `skipped`: what was left out, with the reason."""

    files: int = 0
    bytes: int = 0
    unchanged: int = 0
    skipped: list[str] = field(default_factory=list)
    seconds: float = 0.0


class Pieces:
    """Which bytes of a file are there. `prefix`: how many of its first bytes are."""

    def __init__(self, size: int, ranges: list[list[int]], chunk: int) -> None:
        """`ranges`: [start, end) that are there, in order and apart from each other."""
        self.size, self.prefix = size, 0
        self._after: dict[int, int] = {}
        self.missing: list[tuple[int, int]] = []
        at = 0
        for start, end in [*ranges, [size, size]]:
            self.missing += [(first, min(first + chunk, start)) for first in range(at, start, max(1, chunk))]
            at = end
        for start, end in ranges:
            self.arrived(start, end)
        self.missing.reverse()  # the next one is popped

    @property
    def missing_bytes(self) -> int:
        return sum(end - start for start, end in self.missing)

    def arrived(self, start: int, end: int) -> None:
        self._after[start] = end
        while self.prefix in self._after:
            self.prefix = self._after.pop(self.prefix)

    @property
    def complete(self) -> bool:
        return self.prefix == self.size


def smaller(chunk: int) -> int:
    """After a lost connection: less is lost by the next one."""
    return max(LEAST_CHUNK_BYTES, chunk // 2)


def whole_bytes(chunk: int) -> int:
    """Files up to here travel whole: where connections do not last, one that is larger than a chunk would never come
    through."""
    return min(SMALL_BYTES, chunk)


def fail_if_any(failed: list[str], verb: str) -> None:
    if failed:
        more = f" and {len(failed) - 3} more" if len(failed) > 3 else ""
        raise SyncFailed(f"{len(failed)} of the files could not be {verb}: {'; '.join(failed[:3])}{more}")


def stream_count(box: BoxLink, total: int) -> int:
    """The round trip is asked for only where it matters: the first answer takes one."""
    return 1 if total < _STREAM_BYTES or not is_far(box) else min(_FAR_STREAMS, 1 + total // _STREAM_BYTES)


def is_far(box: BoxLink) -> bool:
    return box.round_trip >= FAR_SECONDS


def compressed(data: bytes, meter: Meter) -> tuple[bytes, bool]:
    """Compressed where the link is slower than zlib and a sample says that it pays."""
    if len(data) < 512 or not is_slow(meter):
        return data, False
    middle = len(data) // 2
    sample = data[middle : middle + _SAMPLE_BYTES]
    if len(zlib.compress(sample, 1)) > _PAYS * len(sample):
        return data, False
    return zlib.compress(data, 1), True


def is_slow(meter: Meter) -> bool:
    return meter.seconds > 1 and meter.speed() < _SLOW_SPEED


def _is_bulk(box: BoxLink, total: int) -> bool:
    """Whether encryption in Python would be slower than the link."""
    return total > _BULK_BYTES and not is_far(box)


@contextmanager
def streams_of(box: BoxLink, total: int, chunk: int, idle: Agent | None, sending: bool = False) -> Iterator[Streams]:
    """`idle`: an agent that has nothing else to do, and is the first stream. `sending`: to the box, whose server lets
    each of several streams send about a window before it hears back; more under way only keeps it from the others."""
    from sojourn.remote.streams import Streams

    def open_agent(index: int) -> AbstractContextManager[Agent]:
        if index == 0 and idle is not None:
            return nullcontext(idle)
        if _is_bulk(box, total) and (agent := box.bulk_agent()) is not None:
            return closing(agent)
        return _stream_agent(box, index, total)

    # What is under way is lost with the connection: little, where connections do not last.
    lasting = chunk >= CHUNK_BYTES // 2
    count = stream_count(box, total) if lasting else 1
    most = (2 if sending and count > 1 else 6) * chunk + (1 << 19 if lasting else 0)
    streams = Streams(open_agent, count, most)
    try:
        yield streams
    except BaseException:
        streams.stop()
        raise
    streams.finish()


def _stream_agent(box: BoxLink, index: int, total: int) -> AbstractContextManager[Agent]:
    return box.agent(f"stream-{index}", start=index <= total // _STARTED_BYTES)


@contextmanager
def streams_opened_early(box: BoxLink, likely: int) -> Iterator[None]:
    """Opens channels for `likely` bytes while the body waits for the box; they are kept for what follows."""

    def open_one(index: int) -> None:
        with suppress(UserError):
            if _is_bulk(box, likely):
                box.keep_bulk_agent()
            else:
                with _stream_agent(box, index, likely):
                    pass

    box.connection(with_agent=True)
    count = stream_count(box, likely)
    if count > 1:
        with box.agent():  # the others start beside it
            pass
    first = 0 if _is_bulk(box, likely) else 1
    threads = [threading.Thread(target=open_one, args=(index,), daemon=True) for index in range(first, count)]
    for thread in threads:
        thread.start()
    yield
    for thread in threads:
        thread.join()
