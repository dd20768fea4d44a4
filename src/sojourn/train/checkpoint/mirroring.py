"""Finished checkpoints into the mirror, in a thread of their own; and back from there on a new machine."""

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

_FIRST = ("run.yaml", "environment.json")  # without these a run cannot be continued
_BESIDE = (*_FIRST, "ledger.json", "ladder.json", "metrics.jsonl", "events.jsonl", "trackers.json")


def open_run_mirror(config: RunConfig, run: RunFolder) -> Mirror | None:
    """A drive that is not mounted must not be taken for an empty one, and filled up on the system's disk."""
    text = config.save.mirror
    if text is None:
        return None
    mirror = open_mirror(text, config.name or run.path.name)
    if not text.startswith("hub:"):
        above = Path(text).expanduser().absolute().parent
        if not above.is_dir():
            raise UserError(f"save.mirror: {text}: there is no {above}; mount the drive, or make that folder, first")
    return mirror


def mirror_warning(config: RunConfig) -> str | None:
    """What to tell before a run whose mirror would not outlive this session."""
    text = config.save.mirror
    if text is None or text.startswith("hub:") or is_persistent(detect(), Path(text).expanduser()) is not False:
        return None
    return f"save.mirror: {text} does not outlive a stop on {detect().facts.title}; choose another place"


class Mirroring:
    """The newest checkpoint that waits is copied next; one that a newer overtakes is left out."""

    def __init__(self, mirror: Mirror, run: RunFolder, say: Callable[[str], None]) -> None:
        self._mirror, self._run, self._say = mirror, run, say
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="mirror")
        self._under_way: Future[None] | None = None
        self._waiting: tuple[Path, Retention] | None = None
        self.busy: int | None = None
        self.seconds = 0.0
        self.failed: str | None = None

    def add(self, checkpoint: Path, keep: Retention) -> None:
        self._waiting = checkpoint, keep
        self._next()

    def _next(self) -> None:
        if self._waiting is not None and (self._under_way is None or self._under_way.done()):
            (checkpoint, keep), self._waiting = self._waiting, None
            self.busy = step_of(checkpoint)
            self._under_way = self._thread.submit(self._copy, checkpoint, keep)

    def _copy(self, checkpoint: Path, keep: Retention) -> None:
        began = time.monotonic()
        try:
            self._mirror.put(checkpoint, f"checkpoints/{checkpoint.name}")
            self._put_beside()
            there = self._mirror.names("checkpoints")
            for name in there[: -keep.last]:
                if not keep.always(step_of(Path(name))):
                    self._mirror.remove(f"checkpoints/{name}")
        except RunFailed as error:
            self._failed(checkpoint.name, error)
        else:
            self.failed, self.seconds = None, max(self.seconds, time.monotonic() - began)
            took = round(time.monotonic() - began, 3)
            self._run.event("mirrored", path=checkpoint.name, where=self._mirror.location, seconds=took)
        finally:
            self.busy = None

    def _failed(self, what: str, error: RunFailed) -> None:
        self.failed = str(error)
        self._run.event("mirror_failed", path=what, message=str(error))
        self._say(f"warning: {what} could not be mirrored: {error}; tried again with the next checkpoint")

    def _put_beside(self) -> None:
        for name in _BESIDE:
            if (self._run.path / name).is_file():
                self._mirror.put_file(self._run.path / name, name)

    def finish(self) -> None:
        """Waits until everything that was saved is there too."""
        while self._under_way is not None and (not self._under_way.done() or self._waiting is not None):
            self._under_way.result()
            self._next()

    def mirror_models(self, *folders: Path) -> None:
        """The model itself, at the end; then what is to be read beside it."""
        self.finish()
        for folder in folders:
            if folder.is_dir():
                try:
                    self._mirror.put(folder, folder.name)
                    self._put_beside()
                except RunFailed as error:
                    self._failed(folder.name, error)

    def close(self) -> None:
        self._thread.shutdown(wait=True)


def fetch_run_files(mirror: Mirror, run: RunFolder) -> None:
    """On a new machine: the run's own files, if the mirror has any, before anything else looks at them."""
    if run.exists() or not mirror.names("checkpoints"):
        return
    for name in _BESIDE:
        try:
            mirror.fetch(name, run.path / name)
        except RunFailed:
            if name in _FIRST:
                raise


def fetch_newest_checkpoint(mirror: Mirror, run: RunFolder, say: Callable[[str], None]) -> None:
    """The mirror's newest good checkpoint, if it is further than any here."""
    here = max(map(step_of, list_checkpoints(run.checkpoints)), default=-1)
    for name in reversed(mirror.names("checkpoints")):
        if step_of(Path(name)) <= here:
            return
        try:
            run.checkpoints.mkdir(parents=True, exist_ok=True)
            mirror.fetch(f"checkpoints/{name}", run.checkpoints / name)
        except RunFailed as error:
            say(f"warning: {name} in {mirror.location} cannot be used: {error}; going back to the one before")
            continue
        say(f"{name} comes from {mirror.location}")
        return
