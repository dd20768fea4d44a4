"""Brings each new checkpoint of a run home while it trains: another host can take over when this one vanishes."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from types import TracebackType

from sojourn.errors import UserError
from sojourn.remote.box_client import Box
from sojourn.remote.follow import read_report
from sojourn.remote.hosts import Host
from sojourn.remote.job import Job, find_job
from sojourn.remote.pull import has_checkpoint, pull_run
from sojourn.run.checkpoints import list_checkpoints
from sojourn.run.folder import RunFolder

_INTERVAL = 10.0  # seconds
_KEEP = 2


class HomeMirror:
    """A thread with a connection of its own. What it cannot bring now, it brings the next time."""

    def __init__(self, host: Host, job: Job) -> None:
        self._host, self._job = host, job
        self._brought: list[Path] = []
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._bring_regularly, name="home mirror", daemon=True)

    def __enter__(self) -> HomeMirror:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped.set()
        self._thread.join(1.0)

    def _bring_regularly(self) -> None:
        while not self._stopped.is_set():
            try:
                with Box(self._host, patience=_INTERVAL) as box:
                    while not self._stopped.wait(_INTERVAL):
                        self._bring(box)
            except UserError:  # no connection, which the follower says
                self._stopped.wait(_INTERVAL)

    def _bring(self, box: Box) -> None:
        folder = Path(self._job.folder)
        if not has_checkpoint(box, self._host, self._job.run):
            return
        report = read_report(box, self._host, self._job.run)
        (find_job(self._job.run) or self._job).seen(report)  # what it has cost, should this host vanish
        names = pull_run(box, self._host, self._job.run, folder, "checkpoint", report)
        self._brought += [path for name in names if (path := folder / name) not in self._brought]
        kept = list_checkpoints(RunFolder(folder).checkpoints)[-_KEEP:]
        for path in [path for path in self._brought if path not in kept]:
            self._brought.remove(path)
            shutil.rmtree(path, ignore_errors=True)
