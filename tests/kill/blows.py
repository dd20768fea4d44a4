"""What befalls a trainer from inside: a kill before, after or in the middle of a disk call, a call that fails, a disk
that fills up. Also its diary: which rows each step read, and which steps were really trained.

A disk call is named by what it does to which file, the how many-th time, while what is being made: `write
checkpoints/.latest.PID 1 of step-00000006`. So the name means the same in every run, continued ones too.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import signal
import threading
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kill.forge import Order

CALLS = ("write", "sync", "rename", "unlink", "make_folder", "remove_folder")


def hit(order: Order) -> None:
    """Makes this process the one that `order` is about."""
    notes = Notes(Path(order.notes))
    _keep_diary(notes, order.fill)
    if order.blows or order.note_calls:
        _lie_in_wait(notes, order)


class Notes:
    """Lines that are whole even if the next instant is the last: each is one write to the end of the file."""

    def __init__(self, path: Path) -> None:
        self._handle = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o644)

    def add(self, what: str, **facts: Any) -> None:
        os.write(self._handle, (json.dumps({"what": what, "pid": os.getpid(), **facts}) + "\n").encode())


def _keep_diary(notes: Notes, fill: dict[str, Any] | None) -> None:
    from sojourn.train import session
    from sojourn.train.batcher import Prefetcher
    from sojourn.train.fault_tolerant_step import FaultTolerantStep

    step_rows, take, step = session.step_rows, Prefetcher.take, FaultTolerantStep.step

    def noted_rows(number: int, *rest: Any) -> Any:
        rows = step_rows(number, *rest)
        notes.add("read", step=number, rows=[int(row) for row in rows], of=rest[0])
        return rows

    def noted_take(self: Any, number: int) -> Any:
        batches, waited = take(self, number)
        digest = hashlib.sha256()
        for batch in batches:
            digest.update(batch.ids.tobytes() + batch.labels.tobytes())
        notes.add("fed", step=number, digest=digest.hexdigest())
        return batches, waited

    def noted_step(self: Any) -> Any:
        number = self.session.progress.step
        if fill is not None:
            _fill(fill, number)
        done = step(self)
        if done is not None and not done.skipped:
            notes.add("trained", step=number)
        return done

    session.step_rows, Prefetcher.take, FaultTolerantStep.step = noted_rows, noted_take, noted_step


def _fill(fill: dict[str, Any], step: int) -> None:
    """Somebody else's file takes the room, and gives it back."""
    filler = Path(fill["folder"]) / "somebody-else"
    if step == fill["until"]:
        filler.unlink(missing_ok=True)
    elif step == fill["from"]:
        with filler.open("wb", buffering=0) as file:
            while (left := shutil.disk_usage(filler.parent).free - fill["leave"]) > 0:
                file.write(bytes(min(left, 1 << 20)))


def _lie_in_wait(notes: Notes, order: Order) -> None:
    from sojourn.storage import disk

    mine = threading.local()

    def name_of(kind: str, path: str) -> str:
        about = re.sub(r"(?<=\.stage-)\d+(?=-)|(?<=\.)\d+$", "PID", os.path.relpath(path, order.run))
        if kind == "make_folder":
            mine.making, mine.seen = about.rpartition("-PID-")[2], Counter()
        making, seen = vars(mine).setdefault("making", "the start"), vars(mine).setdefault("seen", Counter())
        if making.startswith("step-"):
            about = re.sub(rf"/step-(?!{making[5:]})\d+", "/step-OLD", about)
        seen[kind, about] += 1
        return f"{kind} {about} {seen[kind, about]} of {making}"

    def wrapped(kind: str, real: Any) -> Any:
        def call(target: Any, *rest: Any) -> None:
            path = _path_of(kind, target)
            name = name_of(kind, path)
            if order.note_calls:
                notes.add("call", name=name)
            how = order.blows.pop(name, None)
            if how is None:
                real(target, *rest)
                return
            notes.add("blow", name=name, how=how)
            if how == "before":
                _die()
            if how in ("after", "half"):
                real(target, *([_half(rest[0])] if how == "half" else rest))
                _die()
            if kind == "write":
                real(target, _half(rest[0]))
            number = getattr(errno, how)
            raise OSError(number, os.strerror(number), str(path))

        return call

    for kind in CALLS:
        setattr(disk, kind, wrapped(kind, getattr(disk, kind)))


def _path_of(kind: str, target: Any) -> str:
    if kind == "write":
        return str(target.name)
    return str(Path(f"/proc/self/fd/{target}").readlink() if kind == "sync" else target)


def _half(data: Any) -> Any:
    view = memoryview(data).cast("B")
    return view[: len(view) // 2]


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
