"""Copies finished checkpoints to the mirror in a thread."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import replace
from pathlib import Path

from sojourn.config.schema import RunConfig
from sojourn.errors import RunFailed, UserError
from sojourn.expand_user import expand_user
from sojourn.machine.platform import detect, is_persistent
from sojourn.run.checkpoints import find_damage, list_checkpoints, step_of
from sojourn.run.folder import RunFolder
from sojourn.run.identity import is_foreign, read_identity
from sojourn.run.lock import OwnershipLost
from sojourn.run.mirror_claim import MirrorClaim
from sojourn.storage.files import CannotRead, read_json
from sojourn.storage.mirror import MirrorFailed
from sojourn.storage.mirror_process import MirrorProcess
from sojourn.train.checkpoint.checkpoint import Retention

RUN_FILES = (
    "identity.json", "run.yaml", "environment.json", "ledger.json", "ladder.json", "metrics.jsonl", "events.jsonl",
    "trackers.json",
)  # fmt: skip


def open_run_mirror(config: RunConfig, run: RunFolder) -> MirrorProcess | None:
    """Refuses a folder whose parent does not exist: an unmounted drive would fill the system's disk."""
    text = config.save.mirror
    if text is None:
        return None
    mirror = MirrorProcess(text, config.name or run.path.name)
    if not text.startswith("hub:"):
        parent = expand_user(text).absolute().parent
        if not parent.is_dir():
            raise UserError(
                f"save.mirror: {text}: {parent} does not exist; mount the drive, or create that folder, first"
            )
    return mirror


def mirror_warning(config: RunConfig) -> str | None:
    """For a mirror that would not survive the end of this session."""
    text = config.save.mirror
    if text is None or text.startswith("hub:") or is_persistent(detect(), expand_user(text)) is not False:
        return None
    return f"save.mirror: {text} is deleted when the session on {detect().facts.title} stops; choose another folder"


class Mirroring:
    """Copies one checkpoint at a time; of those that wait only the newest is copied."""

    def __init__(self, mirror: MirrorProcess, run: RunFolder, say: Callable[[str], None]) -> None:
        self._mirror, self._run, self._say = mirror, run, say
        self._claim = MirrorClaim(mirror, run)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="mirror")
        self._pending: Future[None] | None = None
        self._waiting: tuple[Path, Retention] | None = None
        self._last: tuple[Path, Retention] | None = None
        self._copied: set[str] = set()  # names that this process has copied and verified
        self.in_use: int | None = None
        self.seconds = 0.0
        self.failed: str | None = None
        self.lost: OwnershipLost | None = None
        try:
            self._claim.take()
        except MirrorFailed as error:
            say(f"warning: {error}; mirroring is tried again with each checkpoint")

    def catch_up(self, keep: Retention) -> None:
        """Copies what an earlier process has saved and not mirrored."""
        here = list_checkpoints(self._run.checkpoints)
        if here:
            self._last = here[-1], keep
            self._pending = self._thread.submit(self._copy_missing, replace(keep, in_use=None))

    def _copy_missing(self, keep: Retention) -> None:
        try:
            self._catch_up(keep)
        except RunFailed as error:
            self._report_failure("an earlier checkpoint", error)

    def add(self, checkpoint: Path, keep: Retention) -> None:
        self._waiting = self._last = checkpoint, keep
        self._next()

    def _next(self) -> None:
        if self._waiting is not None and (self._pending is None or self._pending.done()):
            (checkpoint, keep), self._waiting = self._waiting, None
            self.in_use = step_of(checkpoint)
            self._pending = self._thread.submit(self._copy, checkpoint, keep)

    def _copy(self, checkpoint: Path, keep: Retention) -> None:
        began, keep = time.monotonic(), replace(keep, in_use=None)  # that is about the run folder
        try:
            self._put(checkpoint, f"checkpoints/{checkpoint.name}")
            self._copied.add(checkpoint.name)
            self._catch_up(keep)
            self._prune(keep)
        except RunFailed as error:
            self._report_failure(checkpoint.name, error)
        else:
            self.failed, self.seconds = None, max(self.seconds, time.monotonic() - began)
            seconds = round(time.monotonic() - began, 3)
            self._run.event("mirrored", path=checkpoint.name, where=self._mirror.location, seconds=seconds)
        finally:
            self.in_use = None

    def _put(self, folder: Path, name: str) -> None:
        """A folder and the run's files. The mirror must be the same before and after: a drive may disappear."""
        self._run.check_ownership()
        self._claim.take()
        self._claim.check()
        self._mirror.put(folder, name)
        for file in RUN_FILES:
            if (self._run.path / file).is_file():
                self._mirror.put_file(self._run.path / file, file)
        self._claim.check()
        with contextlib.suppress(OSError):
            self._claim.record()

    def _catch_up(self, keep: Retention) -> None:
        """Checkpoints that retention keeps and the mirror lacks, because it was away when they were saved."""
        there = set(self._mirror.names("checkpoints"))
        here = list_checkpoints(self._run.checkpoints)
        for path in here:
            wanted = path in here[-keep.last :] or keep.protects(step_of(path))
            if wanted and path.name not in there and self._waiting is None and self._is_good(path):
                self._put(path, f"checkpoints/{path.name}")
                self._copied.add(path.name)

    def _is_good(self, path: Path) -> bool:
        """One that is damaged here, or another run's, is no failure of the mirror."""
        try:
            return find_damage(path) is None and not is_foreign(
                read_json(path / "state.json"), read_identity(self._run.identity)
            )
        except CannotRead:
            return False

    def _prune(self, keep: Retention) -> None:
        """Removes what is older than the last few that this process has copied: those are verified."""
        verified = sorted(self._copied)[-keep.last :]
        if len(verified) < keep.last:
            return
        for name in self._mirror.names("checkpoints"):
            if name < verified[0] and not keep.protects(step_of(Path(name))):
                self._mirror.remove(f"checkpoints/{name}")

    def _report_failure(self, name: str, error: RunFailed) -> None:
        self.failed = str(error)
        if isinstance(error, OwnershipLost):
            self.lost = error
        self._run.event("mirror_failed", path=name, message=str(error))
        self._say(f"warning: {name} could not be mirrored: {error}; it is tried again with the next checkpoint")

    def finish(self, timeout: float | None = None) -> None:
        """Waits until every saved checkpoint that is to be mirrored is in the mirror. After `timeout` seconds, the
        mirror is abandoned."""
        until = None if timeout is None else time.monotonic() + timeout
        retried = False
        while self._pending is not None:
            wait_for([self._pending], None if until is None else max(0.0, until - time.monotonic()))
            if not self._pending.done():
                self._mirror.abandon()
                wait_for([self._pending])
                return
            if self.failed is not None and self._waiting is None and not retried and self.lost is None:
                self._waiting, retried = self._last, True  # the mirror may be back
            if self._waiting is None:
                return
            self._next()

    def mirror_models(self, *folders: Path) -> None:
        """At the end of a run: `final/` and `best/`. Raises where they did not reach the mirror."""
        self.finish()
        if self.failed is not None:
            raise self.lost or MirrorFailed(self.failed)
        for folder in folders:
            if folder.is_dir():
                self._put(folder, folder.name)

    def close(self) -> None:
        self._mirror.abandon()
        self._thread.shutdown(wait=True)
        self._mirror.close()
