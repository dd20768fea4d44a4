"""The event file of a run for TensorBoard, in `logs/`.

torch's SummaryWriter writes in a thread that dies on a full disk and raises in the training loop later. Here a write
that fails loses its own values only, and leaves no half record, after which TensorBoard would read no further.
"""

from __future__ import annotations

import io
import itertools
import os
import socket
import time
from pathlib import Path
from typing import Any

from sojourn.run import unwritten
from sojourn.storage import disk

_numbers = itertools.count()  # several files of one process


class TensorBoardFile:
    """`first_step`: of this call of `train`. TensorBoard then forgets what an earlier call wrote of later steps."""

    def __init__(self, logs: Path, first_step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        name = f"{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{next(_numbers)}"
        self._path = logs / f"events.out.tfevents.{name}"
        self._header = [Event(wall_time=time.time(), file_version="brain.Event:2")]  # written with the first values
        if first_step:
            start = SessionLog(status=SessionLog.START)
            self._header.append(Event(wall_time=time.time(), step=first_step + 1, session_log=start))

    def add_scalars(self, values: dict[str, float], step: int) -> None:
        from torch.utils.tensorboard.summary import scalar

        self._add(step, [scalar(name, value) for name, value in values.items()])

    def add_text(self, name: str, content: str, step: int) -> None:
        from torch.utils.tensorboard.summary import text

        self._add(step, [text(name, content)])

    def _add(self, step: int, summaries: list[Any]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        now, records = time.time(), io.BytesIO()
        for event in (*self._header, *(Event(wall_time=now, step=step, summary=summary) for summary in summaries)):
            RecordWriter(records).write(event.SerializeToString())
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            _append_whole(self._path, records.getvalue())
        except OSError as error:
            unwritten.count(str(self._path), error)
        else:
            self._header = []


def _append_whole(path: Path, data: bytes) -> None:
    """All of `data`, or nothing."""
    with path.open("ab", buffering=0) as file:
        size = file.tell()
        try:
            disk.write(file, data)
        except OSError:
            file.truncate(size)
            raise
