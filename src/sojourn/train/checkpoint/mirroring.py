"""Copies finished checkpoints to the mirror in a thread, and fetches them on a new machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from sojourn.config.schema import RunConfig
from sojourn.errors import RunFailed, UserError
from sojourn.machine.platform import detect, is_persistent
from sojourn.run.folder import RunFolder
from sojourn.storage.mirror import Mirror
from sojourn.storage.open_mirror import open_mirror
from sojourn.train.checkpoint.checkpoint import Retention, list_checkpoints, step_of

_REQUIRED = ("run.yaml", "environment.json")  # without these a run cannot resume
_RUN_FILES = (*_REQUIRED, "ledger.json", "ladder.json", "metrics.jsonl", "events.jsonl", "trackers.json")


def open_run_mirror(config: RunConfig, run: RunFolder) -> Mirror | None:
    """Refuses a folder whose parent does not exist: an unmounted drive would fill the system's disk."""
    text = config.save.mirror
    if text is None:
        return None
    mirror = open_mirror(text, config.name or run.path.name)
    if not text.startswith("hub:"):
        parent = Path(text).expanduser().absolute().parent
        if not parent.is_dir():
            raise UserError(
                f"save.mirror: {text}: {parent} does not exist; mount the drive, or create that folder, first"
            )
    return mirror


def mirror_warning(config: RunConfig) -> str | None:
    """For a mirror that would not survive the end of this session."""
    text = config.save.mirror
    if text is None or text.startswith("hub:") or is_persistent(detect(), Path(text).expanduser()) is not False:
        return None
    return f"save.mirror: {text} is deleted when the session on {detect().facts.title} stops; choose another folder"


class Mirroring:
    """Copies one checkpoint at a time; of those that wait only the newest is copied."""

    def __init__(self, mirror: Mirror, run: RunFolder, say: Callable[[str], None]) -> None:
        self._mirror, self._run, self._say = mirror, run, say
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="mirror")
        self._pending: Future[None] | None = None
        self._waiting: tuple[Path, Retention] | None = None
        self.in_use: int | None = None
        self.seconds = 0.0
        self.failed: str | None = None

    def add(self, checkpoint: Path, keep: Retention) -> None:
        self._waiting = checkpoint, keep
        self._next()

    def _next(self) -> None:
        if self._waiting is not None and (self._pending is None or self._pending.done()):
            (checkpoint, keep), self._waiting = self._waiting, None
            self.in_use = step_of(checkpoint)
            self._pending = self._thread.submit(self._copy, checkpoint, keep)

    def _copy(self, checkpoint: Path, keep: Retention) -> None:
        began = time.monotonic()
        try:
            self._mirror.put(checkpoint, f"checkpoints/{checkpoint.name}")
            self._put_run_files()
            names = self._mirror.names("checkpoints")
            for name in names[: -keep.last]:
                if not keep.protects(step_of(Path(name))):
                    self._mirror.remove(f"checkpoints/{name}")
        except RunFailed as error:
            self._report_failure(checkpoint.name, error)
        else:
            self.failed, self.seconds = None, max(self.seconds, time.monotonic() - began)
            seconds = round(time.monotonic() - began, 3)
            self._run.event("mirrored", path=checkpoint.name, where=self._mirror.location, seconds=seconds)
        finally:
            self.in_use = None

    def _report_failure(self, name: str, error: RunFailed) -> None:
        self.failed = str(error)
        self._run.event("mirror_failed", path=name, message=str(error))
        self._say(f"warning: {name} could not be mirrored: {error}; it is tried again with the next checkpoint")

    def _put_run_files(self) -> None:
        for name in _RUN_FILES:
            if (self._run.path / name).is_file():
                self._mirror.put_file(self._run.path / name, name)

    def finish(self) -> None:
        """Waits until every saved checkpoint that is to be mirrored is in the mirror."""
        while self._pending is not None and (not self._pending.done() or self._waiting is not None):
            self._pending.result()
            self._next()

    def mirror_models(self, *folders: Path) -> None:
        """At the end of a run: `final/` and `best/`, then the run's files."""
        self.finish()
        for folder in folders:
            if folder.is_dir():
                try:
                    self._mirror.put(folder, folder.name)
                    self._put_run_files()
                except RunFailed as error:
                    self._report_failure(folder.name, error)

    def close(self) -> None:
        self._thread.shutdown(wait=True)


def fetch_run_files(mirror: Mirror, run: RunFolder) -> None:
    """On a new machine: fetches the run's files, before anything reads them."""
    if run.exists() or not mirror.names("checkpoints"):
        return
    for name in _RUN_FILES:
        try:
            mirror.fetch(name, run.path / name)
        except RunFailed:
            if name in _REQUIRED:
                raise


def fetch_newest_checkpoint(mirror: Mirror, run: RunFolder, say: Callable[[str], None]) -> None:
    """Fetches the mirror's newest undamaged checkpoint, if it is further than those here."""
    newest_here = max(map(step_of, list_checkpoints(run.checkpoints)), default=-1)
    for name in reversed(mirror.names("checkpoints")):
        if step_of(Path(name)) <= newest_here:
            return
        try:
            run.checkpoints.mkdir(parents=True, exist_ok=True)
            mirror.fetch(f"checkpoints/{name}", run.checkpoints / name)
        except RunFailed as error:
            say(f"warning: {name} in {mirror.location} cannot be used: {error}; trying the one before it")
            continue
        say(f"{name} was fetched from {mirror.location}")
        return
