"""When a checkpoint is due, and how it is written while training continues."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from sojourn.config.quantities import Duration
from sojourn.config.schema import RunConfig
from sojourn.errors import RunFailed
from sojourn.machine.out_of_memory import is_oom
from sojourn.run.folder import RunFolder
from sojourn.run.identity import Identity
from sojourn.run.lock import OwnershipLost
from sojourn.storage.mirror_process import MirrorProcess
from sojourn.train.checkpoint.checkpoint import Checkpoint, Retention, recover, save
from sojourn.train.checkpoint.mirroring import Mirroring
from sojourn.train.checkpoint.rescue import write_elsewhere
from sojourn.train.checkpoint.snapshot import Snapshots
from sojourn.train.checkpoint.training_state import Progress, TrainingState
from sojourn.train.faults.guard import wait_for

Say = Callable[[str], None]
_RETRY_PAUSES = (0.5, 2.0)  # seconds between attempts of the last save


@dataclass(frozen=True)
class Saved:
    """A finished save. `stalled`: how many of its `seconds` training waited."""

    step: int
    path: Path
    keep: Retention
    stalled: float
    seconds: float


class Saver:
    """Saves by steps, by epochs and by time, whichever comes first.

    Weights are copied to (pinned) host memory and written by a thread, where memory allows. The loop learns of finished
    and failed saves in `poll`, between two steps.
    """

    def __init__(
        self,
        config: RunConfig,
        run: RunFolder,
        training_state: TrainingState,
        progress: Progress,
        total: int,
        epoch_rows: int,
        say: Say,
        mirror: MirrorProcess | None = None,
        identity: Identity | None = None,
    ) -> None:
        self._config, self._run, self._training_state, self._progress = config, run, training_state, progress
        self._total, self._epoch_rows, self._say = total, epoch_rows, say
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="save")
        self._snapshots: Snapshots | None = Snapshots()
        self._pending: Future[Saved] | None = None
        self._mark = {} if identity is None else identity.mark
        self.mirroring = None if mirror is None else Mirroring(mirror, run, say)
        self._last_attempt = self._last_success = time.monotonic()
        self._last_step = progress.step
        self._failure: str | None = None
        self._longest_save = 0.0
        if run.is_main_process and run.checkpoints.is_dir():
            keep = self._retention(progress.best_step)
            recover(run.checkpoints, keep)
            if self.mirroring is not None:
                self.mirroring.catch_up(keep)

    def due(self) -> bool:
        every, step = self._config.save.every_steps, self._progress.step
        if step == self._last_step:
            return False
        if every == "epoch":
            batch = self._config.train.global_batch
            by_step = step * batch // self._epoch_rows > (step - 1) * batch // self._epoch_rows
        else:
            by_step = every is not None and step % every == 0
        return by_step or time.monotonic() - self._last_attempt >= self._config.save.every

    @property
    def seconds(self) -> float:
        """The longest save so far, including the mirror."""
        return self._longest_save + (self.mirroring.seconds if self.mirroring is not None else 0.0)

    def save(self, must: bool = False) -> None:
        """A save that fails is reported and tried again at the next interval, unless it `must` succeed."""
        engine = self._training_state.engine
        if not self._run.is_main_process and not engine.syncs_every_micro_batch:
            return
        if (
            must or self._config.save.every_steps is not None
        ):  # save every requested step, even if the one before is not written yet
            self._finish_pending(wait=True)
        is_new = self._progress.step != self._last_step and self._pending is None
        if not (engine.ranks.broadcast(is_new) if engine.syncs_every_micro_batch else is_new):
            return
        self._last_attempt = time.monotonic()
        checkpoint = self._training_state.checkpoint(self._progress)  # sharded weights: gathered by all ranks
        checkpoint.state.update(self._mark)
        if not self._run.is_main_process:
            return
        copy = checkpoint if engine.gathers_copies else None
        if copy is None and self._snapshots is not None:
            copy = self._snapshots.take(checkpoint)
        self._pending = self._thread.submit(self._write, copy or checkpoint, self._last_attempt)
        if must:
            self._finish_last(copy or checkpoint)
        elif copy is None:
            self._finish_pending(wait=True)

    def _finish_last(self, checkpoint: Checkpoint) -> None:
        """The last save before the process ends: tried again, then written elsewhere. Raises where it is not in the run
        folder in the end."""
        for pause in _RETRY_PAUSES:
            try:
                self._finish_pending(wait=True, must=True)
            except OwnershipLost:
                raise
            except RunFailed as error:
                self._say(f"warning: {error}; trying again")
                time.sleep(pause)
                self._pending = self._thread.submit(self._write, checkpoint, self._last_attempt)
            else:
                return
        try:
            self._finish_pending(wait=True, must=True)
        except OwnershipLost:
            raise
        except RunFailed as error:
            try:
                path = write_elsewhere(
                    self._config.save, self._run, lambda folder: save(folder, checkpoint, Retention(1))
                )
            except RunFailed as nowhere:
                raise RunFailed(f"{error}; {nowhere}") from error
            raise RunFailed(
                f"{error}; it was written to {path} instead; when the disk works again, resume with: save.resume={path}"
            ) from error

    def _retention(self, best_step: int) -> Retention:
        save, in_use = self._config.save, self.mirroring.in_use if self.mirroring is not None else None
        return Retention(save.keep, best_step or None, save.milestones, in_use)

    def _write(self, checkpoint: Checkpoint, began: float) -> Saved:
        min_free, keep = int(self._config.save.min_free), self._retention(checkpoint.state["best_step"])
        stalled = time.monotonic() - began
        try:
            path = save(self._run.checkpoints, checkpoint, keep, min_free, self._run.check_ownership)
        except (RuntimeError, MemoryError) as error:
            if not is_oom(error):
                raise
            raise RunFailed(
                f"the checkpoint of step {checkpoint.step} could not be written: host memory is full"
            ) from error
        return Saved(checkpoint.step, path, keep, stalled, time.monotonic() - began)

    def poll(self) -> None:
        """Handles a save that has finished, and stops the run where nothing could be saved for `save.at_risk`, or where
        another process has taken over the run."""
        self._finish_pending(wait=False)
        if self._run.lock is not None and self._run.lock.lost is not None:
            raise OwnershipLost(self._run.lock.lost)
        if self.mirroring is not None and self.mirroring.lost is not None:
            raise self.mirroring.lost
        unsaved = time.monotonic() - self._last_success
        if self._failure is not None and unsaved >= self._config.save.at_risk:
            raise RunFailed(
                f"nothing could be saved for {Duration(round(unsaved))} ({self._failure}), so training stops at step "
                f"{self._progress.step} before more is lost (save.at_risk); free some space, then run the same command "
                f"to resume from step {self._last_step}"
            )

    def _finish_pending(self, wait: bool, must: bool = False) -> None:
        if self._pending is None or not (wait or self._pending.done()):
            return
        pending, self._pending = self._pending, None
        try:
            saved = wait_for(pending)
        except OwnershipLost:
            raise
        except RunFailed as error:
            self._failure = str(error)
            self._run.event("save_failed", step=self._progress.step, message=str(error))
            if must:
                raise
            self._say(f"warning: {error}; training continues and saving is tried again later")
            return
        self._failure, self._last_step, self._last_success = None, saved.step, time.monotonic()
        self._longest_save = max(self._longest_save, saved.seconds)
        self._run.event("saved", step=saved.step, seconds=round(saved.seconds, 3), stalled=round(saved.stalled, 3),
                        path=saved.path.name)  # fmt: skip
        self._run.set_status("running", saved.step, self._total)
        if self.mirroring is not None:
            self.mirroring.add(saved.path, saved.keep)

    def forget_saves(self) -> None:
        """The checkpoints are gone: a save is due at once."""
        self._last_step, self._last_attempt = -1, -math.inf

    def disable_snapshots(self) -> None:
        """From now on training waits for each save: host memory is too short for a copy."""
        self._finish_pending(wait=True)
        self._snapshots = None

    def finish(self, timeout: float | None = None) -> None:
        """Returns when everything is on disk and in the mirror; `timeout`: seconds to wait for the mirror."""
        self._finish_pending(wait=True)
        if self.mirroring is not None:
            self.mirroring.finish(timeout)

    def close(self) -> None:
        self._thread.shutdown(wait=True)
        if self.mirroring is not None:
            self.mirroring.close()
