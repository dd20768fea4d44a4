"""Faults inside a training process: a kill before, after or in the middle of a disk call, a call that fails, a disk
that fills up. Also a log of the rows that each step read and of the steps that were trained.

A disk call is named by its kind, its file, its count, and the folder being written: `write checkpoints/.latest.PID 1 of
step-00000006`. The name means the same in every run, resumed ones too.
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
import time
from collections import Counter
from pathlib import Path
from typing import Any

CALLS = ("write", "sync", "rename", "unlink", "make_folder", "remove_folder")


def install_faults(
    run: str, log: str, faults: dict[str, str], log_calls: bool, fill: dict[str, Any] | None, **_: Any
) -> None:
    """Installs the faults of a `TrainCall`, given its fields, in this process."""
    kept = Log(Path(log))
    kept.add("start")
    _record_steps(kept, fill)
    if faults or log_calls:
        _wrap_disk_calls(kept, run, faults, log_calls)


class Log:
    """Each line is one appending write, so that a kill never cuts one short."""

    def __init__(self, path: Path) -> None:
        self._handle = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o644)

    def add(self, what: str, **facts: Any) -> None:
        os.write(
            self._handle, (json.dumps({"what": what, "pid": os.getpid(), "time": time.time(), **facts}) + "\n").encode()
        )


def _record_steps(log: Log, fill: dict[str, Any] | None) -> None:
    from sojourn.train import session
    from sojourn.train.batcher import Prefetcher
    from sojourn.train.fault_tolerant_step import FaultTolerantStep

    step_rows, take, step = session.step_rows, Prefetcher.take, FaultTolerantStep.step

    def noted_rows(number: int, *rest: Any) -> Any:
        rows = step_rows(number, *rest)
        log.add("read", step=number, rows=[int(row) for row in rows], of=rest[0])
        return rows

    def noted_take(self: Any, number: int) -> Any:
        batches, waited = take(self, number)
        digest = hashlib.sha256()
        for batch in batches:
            digest.update(batch.ids.tobytes() + batch.labels.tobytes())
        log.add("fed", step=number, digest=digest.hexdigest())
        return batches, waited

    def noted_step(self: Any) -> Any:
        number = self.session.progress.step
        if fill is not None:
            _fill(fill, number)
        done = step(self)
        if done.outcome == "done":
            log.add("trained", step=number)
        return done

    session.step_rows, Prefetcher.take, FaultTolerantStep.step = noted_rows, noted_take, noted_step


def _fill(fill: dict[str, Any], step: int) -> None:
    """Another program's file fills the disk, and is removed again."""
    filler = Path(fill["folder"]) / "somebody-else"
    if step == fill["until"]:
        filler.unlink(missing_ok=True)
    elif step == fill["from"]:
        with filler.open("wb", buffering=0) as file:
            while (left := shutil.disk_usage(filler.parent).free - fill["leave"]) > 0:
                file.write(bytes(min(left, 1 << 20)))


def _wrap_disk_calls(log: Log, run: str, faults: dict[str, str], log_calls: bool) -> None:
    from sojourn.storage import disk

    mine = threading.local()

    def name_of(kind: str, path: str) -> str:
        about = re.sub(r"(?<=\.stage-)\d+(?=-)|(?<=\.startup-)\d+-\w+|(?<=\.)\d+$", "PID", os.path.relpath(path, run))
        if kind == "make_folder":
            mine.making, mine.seen = about.rpartition("-PID-")[2], Counter()
        making, seen = vars(mine).setdefault("making", "the start"), vars(mine).setdefault("seen", Counter())
        if making.startswith("step-"):
            about = re.sub(rf"/(\.removing-)?step-(?!{making[5:]})\d+", r"/\1step-OLD", about)
        seen[kind, about] += 1
        return f"{kind} {about} {seen[kind, about]} of {making}"

    def wrapped(kind: str, real: Any) -> Any:
        def call(target: Any, *rest: Any) -> None:
            path = _path_of(kind, target)
            name = name_of(kind, path)
            if log_calls:
                log.add("call", name=name)
            how = faults.pop(name, None)
            if how is None:
                real(target, *rest)
                return
            log.add("fault", name=name, how=how)
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
