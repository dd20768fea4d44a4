"""Large files from the box: in pieces over several streams, resumed at the byte, verified before they are in place."""

from __future__ import annotations

import time
from typing import Any

from sojourn.remote.agent_client import Agent, AgentFailed
from sojourn.remote.arriving import CHANGED, Arriving, Incoming
from sojourn.remote.box.hashes import DOWNLOAD
from sojourn.remote.box.transfer import Refused
from sojourn.remote.manifest import remote_cache
from sojourn.remote.streams import Streams
from sojourn.remote.sync import OPEN_FILES, is_slow


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
            file.error = CHANGED
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


def receive_large(download: Incoming, agent: Agent, streams: Streams, files: list[Arriving]) -> None:
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


def _begin(download: Incoming, agent: Agent, file: Arriving, active: list[Arriving]) -> None:
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
            cache=remote_cache(download.box.host.home, download.remote, DOWNLOAD),
        )


def _finish(download: Incoming, agent: Agent, file: Arriving) -> None:
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
        download.failed.append(f"{file.name}: {CHANGED}, or was damaged on its way")
    except OSError as error:
        download.failed.append(f"{file.name}: {error}")
    else:
        with download.lock:
            download.stored(str(file.path()), file.entry, status, digest)
