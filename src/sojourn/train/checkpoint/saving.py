"""When a checkpoint is due, what goes into it, and how a run is put back to one."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from sojourn.config.quantities import Duration
from sojourn.config.schema import RunConfig, SaveConfig
from sojourn.errors import RunFailed, UserError
from sojourn.model.weights import all_finite
from sojourn.run.folder import RunFolder
from sojourn.train.checkpoint.checkpoint import Checkpoint, Retention, load, load_path, save, tidy
from sojourn.train.checkpoint.mirroring import Mirroring, open_run_mirror
from sojourn.train.checkpoint.rng_state import get_rng_state, set_rng_state
from sojourn.train.checkpoint.snapshot import Snapshots
from sojourn.train.distributed.engine import Engine
from sojourn.train.faults.oom_fallback import is_oom

Say = Callable[[str], None]

_OLD_FIELDS = {  # of state.json, as older versions wrote them
    "worse": "evaluations_without_improvement",
    "assessed": "evaluated_step",
    "recent": "recent_losses",
    "bad": "bad_steps",
    "skip": "skipped_steps",
}


@dataclass
class Progress:
    """How far the run is; the numbers that a checkpoint carries.

    `money`: spent. `worse`: evaluations since the best one; `assessed`: the step of the last one. `recent`: losses, to
    tell a spike by; `bad`: steps that were skipped, `skip`: those to be skipped when they come again.
    """

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    money: float = 0.0
    best_loss: float | None = None
    best_step: int = 0
    evaluations_without_improvement: int = 0
    evaluated_step: int = 0
    recent_losses: list[float] = field(default_factory=list)
    bad_steps: int = 0
    skipped_steps: list[int] = field(default_factory=list)

    def is_best(self, loss: float) -> bool:
        return math.isfinite(loss) and (self.best_loss is None or loss < self.best_loss)

    def note(self, loss: float, kept: bool = True) -> None:
        """Takes note of this step's held-out loss. If its model could not be `kept`, the one before stays the best:
        `best_step` is what `best/` holds."""
        self.evaluated_step = self.step
        if not self.is_best(loss):
            self.evaluations_without_improvement += 1
            return
        self.evaluations_without_improvement = 0
        if kept:
            self.best_loss, self.best_step = loss, self.step


@dataclass(frozen=True)
class Saved:
    """`stalled`: the seconds of it that training waited for."""

    step: int
    place: Path
    keep: Retention
    stalled: float
    seconds: float


@dataclass(frozen=True)
class TrainingState:
    """The things in memory that a checkpoint holds a copy of."""

    engine: Engine

    def checkpoint(self, progress: Progress) -> Checkpoint:
        engine = self.engine
        state = {**asdict(progress), "seconds": round(progress.seconds, 3), "scaler": engine.scaler.state_dict()}
        return Checkpoint(engine.full_weights(), engine.full_optimizer_states(), get_rng_state(), state)

    def is_finite(self) -> bool:
        """Whether all that would be saved are numbers, in all processes; moments kept on the host would take too long
        to read."""
        here = next(iter(self.engine.network.model.parameters())).device
        return not self.engine.ranks.any(not all_finite(t for t in self.engine.local_states() if t.device == here))

    def restore(self, found: Checkpoint, begun_elsewhere: bool = False) -> Progress:
        """`begun_elsewhere`: by another run, which paid for itself, perhaps with another optimizer, whose state then
        means nothing here."""
        engine = self.engine
        engine.load_full_weights(found.model)
        if begun_elsewhere and not engine.optimizer.matches(found.optimizer):
            print("note: another optimizer than before, so its state begins anew", flush=True)
        else:
            engine.load_optimizer_states(found.optimizer)
        if found.state["scaler"]:
            engine.scaler.load_state_dict(found.state["scaler"])
        set_rng_state(found.random)
        known = {field.name for field in fields(Progress)} - ({"seconds", "money"} if begun_elsewhere else set())
        state = {_OLD_FIELDS.get(key, key): value for key, value in found.state.items()}
        return Progress(**{key: value for key, value in state.items() if key in known})


def resume(how: SaveConfig, run: RunFolder, live: TrainingState) -> Progress:
    """Puts everything back to the checkpoint to continue from; a fresh run starts at 0."""

    def warn(line: str) -> None:
        print(f"warning: {line}", flush=True)
        run.event("damaged", message=line)

    newest = load(run.checkpoints, warn)
    if how.resume != "auto":
        start, named = _start(Path(how.resume).expanduser(), warn)
        if newest is None:
            print(f"continuing from step {start.step} ({named.name})", flush=True)
            return live.restore(start, begun_elsewhere=True)
        if newest[0].step < start.step:
            newest = start, named
        else:  # the same command typed again: going back would lose work
            print(f"{run.path} is already further than {named.name}; to go back to it, begin another run: name=NEW")
    if newest is None:
        return Progress()
    found, place = newest
    print(f"continuing from step {found.step} ({place.name})", flush=True)
    return live.restore(found)


def _start(path: Path, warn: Say) -> tuple[Checkpoint, Path]:
    """A checkpoint by its folder, or the newest good one of a run by the run's."""
    if (path / "run.yaml").is_file():
        newest = load(path / "checkpoints", warn)
        if newest is None:
            raise UserError(f"{path}: this run has no checkpoint to begin from; leave out --fork or save.resume")
        return newest
    named = _named(path)
    return load_path(named), named


def _named(path: Path) -> Path:
    """`RUN/checkpoint-80`, as other trainers call it, is our `RUN/checkpoints/step-00000080`."""
    found = re.fullmatch(r"checkpoint-(\d{1,8})", path.name)
    if found is None or path.exists():
        return path
    ours = path.parent / "checkpoints" / f"step-{int(found[1]):08d}"
    return ours if ours.exists() else path


class Saver:
    """Saves by steps, by epochs and by time, whichever comes first; in a thread, from a copy, where memory allows."""

    def __init__(
        self,
        config: RunConfig,
        run: RunFolder,
        live: TrainingState,
        progress: Progress,
        total: int,
        epoch_rows: int,
        say: Say,
    ) -> None:
        self._config, self._run, self._live, self._progress = config, run, live, progress
        self._total, self._epoch_rows, self._say = total, epoch_rows, say
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="save")
        self._snapshots: Snapshots | None = Snapshots()
        self._under_way: Future[Saved] | None = None
        mirror = open_run_mirror(config, run)
        self.mirroring = None if mirror is None else Mirroring(mirror, run, say)
        self._last_try = self._last_good = time.monotonic()
        self._last_step = progress.step
        self._trouble: str | None = None
        self._longest = 0.0
        if run.is_main_process and run.checkpoints.is_dir():
            tidy(run.checkpoints, self._keep(progress.best_step))

    def due(self) -> bool:
        every, step = self._config.save.every_steps, self._progress.step
        if step == self._last_step:
            return False
        if every == "epoch":
            batch = self._config.train.global_batch
            by_step = step * batch // self._epoch_rows > (step - 1) * batch // self._epoch_rows
        else:
            by_step = every is not None and step % every == 0
        return by_step or time.monotonic() - self._last_try >= self._config.save.every

    @property
    def seconds(self) -> float:
        """What a save takes at worst, with the copy into the mirror."""
        return self._longest + (self.mirroring.seconds if self.mirroring is not None else 0.0)

    def save(self, must: bool = False) -> None:
        """A save that fails is told and tried again at the next interval, unless it `must` succeed."""
        engine = self._live.engine
        if not self._run.is_main_process and not engine.syncs_every_micro_batch:
            return
        if must or self._config.save.every_steps is not None:  # the steps that were asked for, all of them
            self._hear(wait=True)
        wanted = self._progress.step != self._last_step and self._under_way is None
        if not (engine.ranks.broadcast(wanted) if engine.syncs_every_micro_batch else wanted):
            return
        self._last_try = time.monotonic()
        checkpoint = self._live.checkpoint(self._progress)  # of cut weights: by all processes
        if not self._run.is_main_process:
            return
        copy = checkpoint if engine.gathers_copies else None
        if copy is None and self._snapshots is not None:
            copy = self._snapshots.take(checkpoint)
        self._under_way = self._thread.submit(self._write, copy or checkpoint, self._last_try)
        if copy is None or must:
            self._hear(wait=True, must=must)

    def _keep(self, best_step: int) -> Retention:
        how, busy = self._config.save, self.mirroring.busy if self.mirroring is not None else None
        return Retention(how.keep, best_step or None, how.milestones, busy)

    def _write(self, checkpoint: Checkpoint, began: float) -> Saved:
        how, keep = self._config.save, self._keep(checkpoint.state["best_step"])
        stalled = time.monotonic() - began
        try:
            place = save(self._run.checkpoints, checkpoint, keep, int(how.min_free))
        except (RuntimeError, MemoryError) as error:
            if not is_oom(error):
                raise
            why = "the host's memory is full"
            raise RunFailed(f"the checkpoint of step {checkpoint.step} could not be written: {why}") from error
        return Saved(checkpoint.step, place, keep, stalled, time.monotonic() - began)

    def poll(self) -> None:
        """Hears of a save that has ended meanwhile, and stops a run of which too much would be lost."""
        self._hear(wait=False)
        risk = time.monotonic() - self._last_good
        if self._trouble is not None and risk >= self._config.save.at_risk:
            raise RunFailed(
                f"nothing could be saved for {Duration(round(risk))} ({self._trouble}), so training stops at step "
                f"{self._progress.step} before more is at risk (save.at_risk); make room, then the same command "
                f"continues from step {self._last_step}"
            )

    def _hear(self, wait: bool, must: bool = False) -> None:
        if self._under_way is None or not (wait or self._under_way.done()):
            return
        ended, self._under_way = self._under_way, None
        try:
            saved = ended.result()
        except RunFailed as error:
            self._trouble = str(error)
            self._run.event("save_failed", step=self._progress.step, message=str(error))
            if must:
                raise
            self._say(f"warning: {error}; training goes on and saving is tried again later")
            return
        self._trouble, self._last_step, self._last_good = None, saved.step, time.monotonic()
        self._longest = max(self._longest, saved.seconds)
        self._run.event("saved", step=saved.step, seconds=round(saved.seconds, 3), stalled=round(saved.stalled, 3),
                        path=saved.place.name)  # fmt: skip
        self._run.set_status("running", saved.step, self._total)
        if self.mirroring is not None:
            self.mirroring.add(saved.place, saved.keep)

    def disable_snapshots(self) -> None:
        """From now on without a copy in the host's memory, which is short."""
        self._hear(wait=True)
        self._snapshots = None

    def finish(self) -> None:
        """Everything is on disk, and in the mirror, when this returns."""
        self._hear(wait=True)
        if self.mirroring is not None:
            self.mirroring.finish()

    def close(self) -> None:
        self._thread.shutdown(wait=True)
        if self.mirroring is not None:
            self.mirroring.close()
