"""What a checkpoint holds of a run in memory, and how a run is restored from one."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from sojourn.config.schema import SaveConfig
from sojourn.errors import UserError
from sojourn.expand_user import expand_user
from sojourn.model.weights import all_finite
from sojourn.run.checkpoints import checkpoint_path
from sojourn.run.folder import RunFolder
from sojourn.run.identity import is_foreign, read_identity
from sojourn.storage.files import read_json
from sojourn.train.checkpoint.checkpoint import Checkpoint, find_newest, read_verified, refuse_damaged
from sojourn.train.checkpoint.rng_state import get_rng_state, set_rng_state
from sojourn.train.distributed.engine import Engine

_OLD_FIELDS = {  # of state.json, as older versions wrote them
    "worse": "evaluations_without_improvement",
    "assessed": "evaluated_step",
    "recent": "recent_losses",
    "bad": "bad_steps",
    "skip": "skipped_steps",
}


@dataclass
class Progress:
    """How far the run is, as in a checkpoint's state.json.

    `money`: spent so far. `evaluated_step`: the step of the last evaluation. `recent_losses`: to detect spikes.
    `bad_steps`: how many steps had a bad loss; `skipped_steps`: steps to skip when a rollback comes to them again.
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

    def record_evaluation(self, loss: float, model_written: bool = True) -> None:
        """`loss`: held-out loss of this step. Where its model could not be written, the best before it stays the best:
        `best_step` is the step of `best/`."""
        self.evaluated_step = self.step
        if not self.is_best(loss):
            self.evaluations_without_improvement += 1
            return
        self.evaluations_without_improvement = 0
        if model_written:
            self.best_loss, self.best_step = loss, self.step


@dataclass(frozen=True)
class TrainingState:
    """What a checkpoint saves: weights, optimizer states, loss scaler, RNG states."""

    engine: Engine

    def checkpoint(self, progress: Progress) -> Checkpoint:
        engine = self.engine
        state = {**asdict(progress), "seconds": round(progress.seconds, 3), "scaler": engine.scaler.state_dict()}
        return Checkpoint(engine.full_weights(), engine.full_optimizer_states(), get_rng_state(), state)

    def is_finite(self) -> bool:
        """Whether all weights and optimizer states are finite, on all ranks. States offloaded to the host are not
        checked: that would take too long."""
        device = next(iter(self.engine.network.model.parameters())).device
        return not self.engine.ranks.any(not all_finite(t for t in self.engine.local_states() if t.device == device))

    def restore(self, checkpoint: Checkpoint, from_other_run: bool = False) -> Progress:
        """`from_other_run`: its time and money do not count here, and its optimizer may be another one, whose states
        are then ignored."""
        engine = self.engine
        engine.load_full_weights(checkpoint.model)
        if from_other_run and not engine.optimizer.matches(checkpoint.optimizer):
            print(
                "note: the optimizer is another one than in the checkpoint, so its states start from zero", flush=True
            )
        else:
            engine.load_optimizer_states(checkpoint.optimizer)
        if checkpoint.state["scaler"]:
            engine.scaler.load_state_dict(checkpoint.state["scaler"])
        set_rng_state(checkpoint.random)
        known = {field.name for field in fields(Progress)} - ({"seconds", "money"} if from_other_run else set())
        state = {_OLD_FIELDS.get(key, key): value for key, value in checkpoint.state.items()}
        return Progress(**{key: value for key, value in state.items() if key in known})


def resume(save: SaveConfig, run: RunFolder, training_state: TrainingState, newest: Path | None) -> Progress:
    """Restores the checkpoint to resume from; a new run starts at step 0. `newest`: the run's newest, which is good."""
    if save.resume != "auto":
        start = _find_start(expand_user(save.resume))
        if newest is None:
            return _restore(training_state, start, from_other_run=True)
        state = read_json(start / "state.json")
        if read_json(newest / "state.json")["step"] < state["step"]:
            return _restore(training_state, start, is_foreign(state, read_identity(run.identity)))
        # The same command typed again: going back would lose work.
        print(f"{run.path} is already further than {start.name}; to go back to it, start another run: name=NEW")
    return Progress() if newest is None else _restore(training_state, newest)


def _restore(training_state: TrainingState, path: Path, from_other_run: bool = False) -> Progress:
    checkpoint = read_verified(path)
    print(f"resuming from step {checkpoint.step} ({path.name})", flush=True)
    return training_state.restore(checkpoint, from_other_run)


def _find_start(path: Path) -> Path:
    """`path`: the folder of a checkpoint, or of a run, of which the newest undamaged checkpoint is taken."""
    if (path / "run.yaml").is_file():
        newest = find_newest(path / "checkpoints", lambda line: print(f"warning: {line}", flush=True))
        if newest is None:
            raise UserError(f"{path}: this run has no checkpoint to start from; leave out --fork or save.resume")
        return newest
    path = checkpoint_path(path)
    refuse_damaged(path)
    return path
