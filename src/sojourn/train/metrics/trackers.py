"""Experiment trackers of a run (`log.trackers`), each in a thread of its own, so that none can end or slow the run.

A missing package is refused before training. A tracker that fails later is reported once, logged in events.jsonl and
not used any more; metrics.jsonl has every value.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable, Sequence

from sojourn.config.load import dump
from sojourn.config.schema import RunConfig
from sojourn.errors import UserError
from sojourn.run import unwritten
from sojourn.run.folder import RunFolder
from sojourn.storage.files import read_json, write_json
from sojourn.train.checkpoint.config_changes import flatten
from sojourn.train.metrics.tracker_backends import BACKENDS, CLOSE_TIMEOUT, End, RunInfo, TrackerBackend

_QUEUE_SIZE = 10_000


def refuse_missing_trackers(trackers: Sequence[str]) -> None:
    """Called before anything costs time."""
    missing = [name for name in trackers if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"log.trackers: {missing[0]} is not installed; pip install {' '.join(missing)}")


class Trackers:
    """All trackers of one run. `say` prints a line for the user."""

    def __init__(self, run: RunFolder, config: RunConfig, say: Callable[[str], None]) -> None:
        refuse_missing_trackers(config.log.trackers)
        self._run, self._config, self._say = run, config, say
        self._threads: list[_TrackerThread] = []

    def start(self) -> None:
        if not self._config.log.trackers or not self._run.is_main_process:
            return
        log = self._config.log
        name = self._config.name or self._run.path.name
        settings = {key: value for key, value in flatten(dump(self._config)).items() if value is not None}
        info = RunInfo(name, log.project, _run_id(self._run), settings, self._run.logs)
        try:
            info.logs.mkdir(parents=True, exist_ok=True)
        except OSError as error:  # each tracker then says that it cannot write
            unwritten.count(str(info.logs), error)
        if "trackio" in log.trackers:  # which reads this at import
            os.environ.setdefault("TRACKIO_DIR", str((info.logs / "trackio").resolve()))
        for tracker in dict.fromkeys(log.trackers):
            thread = _TrackerThread(tracker, BACKENDS[tracker](), info)
            try:
                importlib.import_module(tracker)  # here, since concurrent imports can deadlock
            except Exception as error:
                thread.fail(error)
            else:
                thread.start()
            self._threads.append(thread)

    def log(self, values: dict[str, float], step: int) -> None:
        known = {name: float(value) for name, value in values.items() if math.isfinite(value)}
        for thread in self._threads:
            thread.submit(lambda backend: backend.log(known, step))
        self._report()

    def log_samples(self, samples: list[tuple[str, str]], step: int) -> None:
        for thread in self._threads:
            thread.submit(lambda backend: backend.log_samples(samples, step))

    def close(self, end: End) -> None:
        """Waits for pending uploads, up to CLOSE_TIMEOUT: rented time costs money."""
        for thread in self._threads:
            thread.submit(lambda backend: backend.close(end))
            thread.submit(None)
        until = time.monotonic() + CLOSE_TIMEOUT
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.0, until - time.monotonic()))
            if thread.is_alive():
                thread.fail(TimeoutError(f"it did not finish within {CLOSE_TIMEOUT:g} s"))
        self._report()

    def _report(self) -> None:
        for thread in self._threads:
            while not thread.notes.empty():
                self._say(thread.notes.get())
            if thread.failure and not thread.reported:
                thread.reported = True
                self._run.event("tracker_failed", tracker=thread.tracker, error=thread.failure)
                rest = f"training continues, and {self._run.metrics.name} has every value"
                self._say(f"warning: {thread.tracker}: {thread.failure}; {rest}")


class _TrackerThread(threading.Thread):
    """Sends metrics to one tracker, in order."""

    def __init__(self, tracker: str, backend: TrackerBackend, info: RunInfo) -> None:
        super().__init__(name=f"tracker-{tracker}", daemon=True)
        self.tracker, self._backend, self._info = tracker, backend, info
        self.notes: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.failure, self.reported = "", False
        self._tasks: queue.Queue[Callable[[TrackerBackend], None] | None] = queue.Queue(_QUEUE_SIZE)

    def submit(self, task: Callable[[TrackerBackend], None] | None) -> None:
        if self.failure:
            return
        try:
            self._tasks.put_nowait(task)
        except queue.Full:
            self.fail(TimeoutError("it does not answer"))

    def run(self) -> None:
        try:
            if note := self._backend.start(self._info):
                self.notes.put(note)
            while (task := self._tasks.get()) is not None:
                task(self._backend)
        except (Exception, SystemExit) as error:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        first = str(error).strip().partition("\n")[0]
        self.failure = self.failure or f"{type(error).__name__}: {first[:200]}"


def _run_id(run: RunFolder) -> str:
    """The run's id at the trackers, kept in the run folder, so that it stays when the folder is moved."""
    path = run.path / "trackers.json"
    found = read_json(path)
    if isinstance(found, dict) and isinstance(found.get("id"), str):
        return str(found["id"])
    run_id = secrets.token_hex(8)
    try:
        write_json(path, {"id": run_id})
    except OSError as error:
        unwritten.count(str(path), error)
    return run_id
