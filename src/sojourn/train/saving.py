"""When a checkpoint is due, what goes into it, and how a run is put back to one."""

from __future__ import annotations

import math
import re
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from sojourn.config.schema import RunConfig, SaveConfig
from sojourn.errors import RunFailed
from sojourn.model.weights import load_weights, weights
from sojourn.run.folder import RunFolder
from sojourn.train.checkpoint import Checkpoint, load, load_one, save
from sojourn.train.meters import Meters
from sojourn.train.optim import Optimizer
from sojourn.train.random_state import random_tensors, restore_random


@dataclass
class Progress:
    """How far the run is; the numbers that a checkpoint carries. `worse`: evaluations since the best one."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    best_loss: float | None = None
    best_step: int = 0
    worse: int = 0

    def note(self, loss: float) -> bool:
        """Takes note of a held-out loss; whether it is the best so far."""
        better = math.isfinite(loss) and (self.best_loss is None or loss < self.best_loss)
        if better:
            self.best_loss, self.best_step, self.worse = loss, self.step, 0
        else:
            self.worse += 1
        return better


@dataclass(frozen=True)
class Live:
    """The things in memory that a checkpoint holds a copy of."""

    model: Any
    optimizer: Optimizer
    scaler: Any

    def checkpoint(self, progress: Progress) -> Checkpoint:
        state = {**asdict(progress), "seconds": round(progress.seconds, 3), "scaler": self.scaler.state_dict()}
        return Checkpoint(weights(self.model), self.optimizer.tensors(), random_tensors(), state)

    def restore(self, found: Checkpoint) -> Progress:
        load_weights(self.model, found.model)
        self.optimizer.load_tensors(found.optimizer)
        if found.state["scaler"]:
            self.scaler.load_state_dict(found.state["scaler"])
        restore_random(found.random)
        known = {field.name for field in fields(Progress)}
        return Progress(**{key: value for key, value in found.state.items() if key in known})


def resume(how: SaveConfig, run: RunFolder, live: Live) -> Progress:
    """Puts everything back to the checkpoint to continue from; a fresh run starts at 0."""

    def warn(line: str) -> None:
        print(f"warning: {line}", flush=True)
        run.event("damaged", says=line)

    newest = load(run.checkpoints, warn)
    if how.resume != "auto":
        named = _named(Path(how.resume).expanduser())
        start = load_one(named)
        if newest is None or newest[0].step < start.step:
            newest = start, named
        else:  # the same command typed again: going back would lose work
            print(f"{run.path} is already further than {named.name}; to go back to it, begin another run: name=NEW")
    if newest is None:
        return Progress()
    found, place = newest
    print(f"continuing from step {found.step} ({place.name})", flush=True)
    return live.restore(found)


def _named(path: Path) -> Path:
    """`RUN/checkpoint-80`, as other trainers call it, is our `RUN/checkpoints/step-00000080`."""
    found = re.fullmatch(r"checkpoint-(\d{1,8})", path.name)
    if found is None or path.exists():
        return path
    ours = path.parent / "checkpoints" / f"step-{int(found[1]):08d}"
    return ours if ours.exists() else path


class Saver:
    """Saves by steps, by epochs and by time, whichever comes first."""

    def __init__(self, config: RunConfig, run: RunFolder, live: Live, progress: Progress, epoch_rows: int) -> None:
        self._config, self._run, self._live, self._progress = config, run, live, progress
        self._epoch_rows = epoch_rows
        self._last_time, self._last_step = time.monotonic(), progress.step

    def due(self) -> bool:
        every, step = self._config.save.every_steps, self._progress.step
        if every == "epoch":
            batch = self._config.train.global_batch
            by_step = step * batch // self._epoch_rows > (step - 1) * batch // self._epoch_rows
        else:
            by_step = every is not None and step % every == 0
        return by_step or time.monotonic() - self._last_time >= self._config.save.every

    def save(self, meters: Meters, total: int, must: bool) -> None:
        """A save that fails is told and tried again at the next interval, unless it `must` succeed."""
        step = self._progress.step
        if step == self._last_step:
            return
        self._last_time = time.monotonic()
        try:
            place = save(self._run.checkpoints, self._live.checkpoint(self._progress),
                         self._config.save.keep, int(self._config.save.min_free))  # fmt: skip
        except RunFailed as error:
            self._run.event("save_failed", step=step, says=str(error))
            if must:
                raise
            meters.say(f"warning: {error}; training goes on and saving is tried again later")
            return
        self._last_step = step
        self._run.event("saved", step=step, seconds=round(time.monotonic() - self._last_time, 3), path=place.name)
        self._run.set_status("running", step, total)
