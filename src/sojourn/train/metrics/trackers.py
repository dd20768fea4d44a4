"""Curves elsewhere (`log.trackers`): each service has a thread of its own, so that none ends or slows a run.

A service that is not installed is told before training. One that fails later is told once, noted in events.jsonl, and
left alone; metrics.jsonl has everything anyway.
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
from sojourn.run.folder import RunFolder
from sojourn.storage.files import read_json, write_json
from sojourn.train.checkpoint.config_changes import flatten
from sojourn.train.metrics.tracker_backends import BACKENDS, PATIENCE, End, RunInfo, TrackerBackend

_MOST_WAITING = 10_000


def refuse_missing_trackers(wanted: Sequence[str]) -> None:
    """Before anything costs time: every wanted service must be installed."""
    missing = [name for name in wanted if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"log.trackers: {missing[0]} is not installed; pip install {' '.join(missing)}")


class Trackers:
    """All services of one run. `say` prints a line for the user."""

    def __init__(self, run: RunFolder, config: RunConfig, say: Callable[[str], None]) -> None:
        refuse_missing_trackers(config.log.trackers)
        self._run, self._config, self._say = run, config, say
        self._senders: list[_Sender] = []

    def start(self) -> None:
        if not self._config.log.trackers:
            return
        log = self._config.log
        name = self._config.name or self._run.path.name
        settings = {key: value for key, value in flatten(dump(self._config)).items() if value is not None}
        about = RunInfo(name, log.project, _identity(self._run), settings, self._run.logs)
        about.logs.mkdir(parents=True, exist_ok=True)
        if "trackio" in log.trackers:  # which reads this once, when it is imported
            os.environ.setdefault("TRACKIO_DIR", str((about.logs / "trackio").resolve()))
        for service in dict.fromkeys(log.trackers):
            sender = _Sender(service, BACKENDS[service](), about)
            try:
                importlib.import_module(service)  # here, since imports in two threads at once may trip over each other
            except Exception as error:
                sender.fail(error)
            else:
                sender.start()
            self._senders.append(sender)

    def log(self, values: dict[str, float], step: int) -> None:
        known = {name: float(value) for name, value in values.items() if math.isfinite(value)}
        for sender in self._senders:
            sender.give(lambda sink: sink.log(known, step))
        self._tell()

    def log_samples(self, samples: list[tuple[str, str]], step: int) -> None:
        for sender in self._senders:
            sender.give(lambda sink: sink.log_samples(samples, step))

    def close(self, end: End) -> None:
        """Waits for what is still on its way, but not for ever: rented time runs on."""
        for sender in self._senders:
            sender.give(lambda sink: sink.close(end))
            sender.give(None)
        until = time.monotonic() + PATIENCE
        for sender in self._senders:
            if sender.ident is not None:
                sender.join(max(0.0, until - time.monotonic()))
            if sender.is_alive():
                sender.fail(TimeoutError(f"it did not take everything within {PATIENCE:g} s"))
        self._tell()

    def _tell(self) -> None:
        for sender in self._senders:
            while not sender.notes.empty():
                self._say(sender.notes.get())
            if sender.failure and not sender.told:
                sender.told = True
                self._run.event("tracker_failed", tracker=sender.service, error=sender.failure)
                has_all = f"the run goes on, and {self._run.metrics.name} has every value"
                self._say(f"warning: {sender.service}: {sender.failure}; {has_all}")


class _Sender(threading.Thread):
    """Carries what it is given to one service, in order."""

    def __init__(self, service: str, sink: TrackerBackend, about: RunInfo) -> None:
        super().__init__(name=f"tracker-{service}", daemon=True)
        self.service, self._sink, self._about = service, sink, about
        self.notes: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.failure, self.told = "", False
        self._tasks: queue.Queue[Callable[[TrackerBackend], None] | None] = queue.Queue(_MOST_WAITING)

    def give(self, task: Callable[[TrackerBackend], None] | None) -> None:
        if self.failure:
            return
        try:
            self._tasks.put_nowait(task)
        except queue.Full:
            self.fail(TimeoutError("it does not answer"))

    def run(self) -> None:
        try:
            if note := self._sink.start(self._about):
                self.notes.put(note)
            while (task := self._tasks.get()) is not None:
                task(self._sink)
        except (Exception, SystemExit) as error:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        first = str(error).strip().partition("\n")[0]
        self.failure = self.failure or f"{type(error).__name__}: {first[:200]}"


def _identity(run: RunFolder) -> str:
    """The run's name at the services: made once, kept in the run folder, so that it stays when the folder travels."""
    path = run.path / "trackers.json"
    found = read_json(path)
    if isinstance(found, dict) and isinstance(found.get("id"), str):
        return str(found["id"])
    made = secrets.token_hex(8)
    write_json(path, {"id": made})
    return made
