"""Files and folders to the box: only what changed travels, in several streams; a cut transfer goes on where it was."""

from __future__ import annotations

import os
import time
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sojourn.errors import UserError
from sojourn.remote.agent_client import Agent, AgentFailed
from sojourn.remote.box.tree import Entry
from sojourn.remote.ignore import Ignore
from sojourn.remote.manifest import Tree, first_push, list_trees
from sojourn.remote.outgoing import Outgoing
from sojourn.remote.progress import ProgressCallback
from sojourn.remote.read_ahead import ReadAhead
from sojourn.remote.streams import Task
from sojourn.remote.sync import (
    SMALL_BYTES,
    Synced,
    fail_if_any,
    is_far,
    smaller,
    streams_of,
    streams_opened_early,
    whole_bytes,
)
from sojourn.remote.upload_large import LargeFile, send_large
from sojourn.remote.upload_small import batches

if TYPE_CHECKING:
    from sojourn.remote.box_link import BoxLink

_AT_ONCE_BYTES = 16 << 20  # about what travels anyway while a distant box answers


class Upload(Outgoing):
    """One call of `push`; survives lost connections by being run again."""

    def __init__(
        self,
        box: BoxLink,
        items: list[tuple[Path, str]],
        progress: ProgressCallback | None,
        ignore: Ignore | None,
        delete: bool,
        durable: bool,
    ) -> None:
        for local, _ in items:
            if not os.path.lexists(local):
                raise UserError(f"{local}: there is no such file or folder")
        super().__init__(box, progress, durable)
        self.items, self.ignore, self.delete = items, ignore, delete

    def run(self) -> Synced:
        began = time.monotonic()
        try:
            while not self.box.again(self._once, lambda: (self.arrived, self.found)):
                continue
        finally:
            self.cache.save()
        self.meter.report(last=True)
        fail_if_any(self.failed, "sent")
        self.result.seconds = time.monotonic() - began
        return self.result

    def _once(self) -> bool:
        """False where files changed while they travelled, so that another look is needed."""
        self.failed, self.result.skipped = [], []
        self.ahead = ReadAhead(self.cache)
        self.chunk, chunk = smaller(self.chunk), self.chunk
        new: list[tuple[Tree, Entry]] = []
        with self.box.connecting() as connected:
            trees = list_trees(self.items, self.cache, self.ignore, self.result.skipped.append)
            new += [(tree, entry) for tree in trees for entry in tree.unknown]
            self.ahead.read(new, connected)
        needed = self._compare(trees, new)
        with self.box.agent() as agent:
            self.meter.total = self.meter.done + sum(entry.size for _, entry in needed)
            for tree in trees if self.delete else ():
                self._delete(agent, tree)  # first, since a folder may stand where a file will be
            again = self._send(agent, needed)
            if self.durable:
                agent.ask("sync")
        self.chunk = chunk
        return not again

    def _compare(self, trees: list[Tree], new: list[tuple[Tree, Entry]]) -> list[tuple[Tree, Entry]]:
        """What of the trees must still travel; makes their folders and links with the same round trip. What goes at
        once is sent behind the questions."""
        at_once = self._at_once(trees, new)
        self.meter.total = self.meter.done + sum(entry.size for _, entry in at_once)
        sent = {id(entry) for _, entry in at_once}
        comparisons = [Comparison(tree, self.cache_of(tree), sent) for tree in trees]
        folders = [Folders(tree) for tree in trees]
        with (
            streams_opened_early(self.box, 0 if at_once else _bytes(new)),
            self.box.agent() as agent,
            streams_of(self.box, _bytes(at_once), self.chunk, agent, sending=True) as streams,
        ):
            tasks: list[Task] = [*comparisons, *folders, *batches(self, at_once)]
            for task in tasks:
                while not streams.put(task):
                    self.meter.report()
        needed, self.result.unchanged = [], 0
        for tree, comparison, made in zip(trees, comparisons, folders, strict=True):
            self.failed += made.answer()["failed"]
            numbers = {number for number, entry in enumerate(tree.entries) if id(entry) in sent}
            numbers |= self._differing(tree, comparison.answer())
            needed += [
                (tree, tree.entries[number]) for number in sorted(numbers) if id(tree.entries[number]) not in sent
            ]
            self.result.unchanged += sum(entry.kind == "file" for entry in tree.entries) - len(numbers)
        return needed

    def _at_once(self, trees: list[Tree], new: list[tuple[Tree, Entry]]) -> list[tuple[Tree, Entry]]:
        """Small files that no sync has seen, on their first way to a distant box: they are hardly ever there, and the
        question would take a round trip. A second attempt asks."""
        first = {id(tree) for tree in trees if first_push(self.box.host, tree.root)}
        if self.delete or not first or not new or not is_far(self.box):
            return []
        found, size = [], 0
        for tree, entry in new:
            if id(tree) in first and entry.size <= SMALL_BYTES and size + entry.size <= _AT_ONCE_BYTES:
                found.append((tree, entry))
                size += entry.size
        return found

    def _differing(self, tree: Tree, answer: dict[str, Any]) -> set[int]:
        numbers = set(answer["need"])
        for number, digest in answer["hashes"].items():
            entry = tree.entries[int(number)]
            tree.digests[entry.rel] = self.cache.of(entry.path, entry.status)
            if tree.digests[entry.rel] != digest:
                numbers.add(int(number))
        return numbers

    def _send(self, agent: Agent, needed: list[tuple[Tree, Entry]]) -> bool:
        if not needed:
            return False
        most = whole_bytes(self.chunk)
        large = [LargeFile(self, tree, entry) for tree, entry in needed if entry.size > most]
        small = [(tree, entry) for tree, entry in needed if entry.size <= most]
        with streams_of(self.box, _bytes(needed), self.chunk, None if large else agent, sending=True) as streams:
            for batch in batches(self, small):
                while not streams.put(batch):
                    self.meter.report()
            return send_large(self, agent, streams, large) if large else False

    def _delete(self, agent: Agent, tree: Tree) -> None:
        import json

        _, blob = agent.ask("manifest", root=tree.root, cache=self.cache_of(tree), small=1 << 62)
        here = {entry.rel for entry in tree.entries}
        keeps = (self.ignore or Ignore()).keeps
        gone = [line[0] for line in json.loads(zlib.decompress(blob)) if line[0] not in here]
        gone = [rel for rel in gone if keeps(rel, False)]
        agent.ask("delete", root=tree.root, files=sorted(gone, key=lambda rel: -rel.count("/")))


def _bytes(files: list[tuple[Tree, Entry]]) -> int:
    """That travel, with what is said about each."""
    return sum(entry.size + 512 for _, entry in files)


class Question:
    """A request about a tree; `answer` when it was answered."""

    cost = 0

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self._answer: dict[str, Any] = {}
        self._error: AgentFailed | None = None

    def done(self, answer: dict[str, Any], blob: bytes) -> None:
        self._answer = answer

    def failed(self, error: AgentFailed) -> None:
        self._error = error

    def answer(self) -> dict[str, Any]:
        if self._error is not None:
            raise self._error
        return self._answer


class Comparison(Question):
    def __init__(self, tree: Tree, cache: str, without: set[int]) -> None:
        super().__init__(tree)
        self._cache, self._without = cache, without

    def send(self, agent: Agent) -> None:
        agent.send("compare", self.tree.packed(self._without), root=self.tree.root, cache=self._cache)


class Folders(Question):
    def send(self, agent: Agent) -> None:
        entries = [[entry.rel, entry.kind, entry.target] for entry in self.tree.entries if entry.kind != "file"]
        agent.send("folders", root=self.tree.root, entries=entries)
