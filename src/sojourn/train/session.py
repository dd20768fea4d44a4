"""Everything that one call of `train` works with, opened and put back to where the run last was."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from sojourn.catalog.gpus import peak_flops
from sojourn.config.load import dump, read_config, to_yaml
from sojourn.config.schema import RunConfig
from sojourn.data.artefact import Artefact, Batch
from sojourn.data.order import step_rows
from sojourn.data.prepare import prepare_run
from sojourn.data.report import print_examples
from sojourn.errors import UserError
from sojourn.resolve.resolve import Resolution
from sojourn.run.folder import RunFolder
from sojourn.run.home import prepared_folder
from sojourn.storage.files import read_json, write_json, write_text
from sojourn.train.batcher import Batcher
from sojourn.train.checkpoint.checkpoint import check_free_space
from sojourn.train.checkpoint.config_changes import base_fingerprint, refuse_harmful_changes
from sojourn.train.checkpoint.mirroring import fetch_newest_checkpoint, open_run_mirror
from sojourn.train.checkpoint.sync import sync_checkpoint
from sojourn.train.checkpoint.training_state import Progress, TrainingState, resume
from sojourn.train.distributed.open import open_engine
from sojourn.train.faults.oom_fallback import load_fallbacks, merge_fallbacks
from sojourn.train.metrics.environment import describe_environment, device_name
from sojourn.train.metrics.meters import MfuInputs
from sojourn.train.model_spec import local_model_spec
from sojourn.train.objective.registry import make_objective
from sojourn.train.ranks import Ranks
from sojourn.train.resolve import resolve_here
from sojourn.train.step import Stepper, make_cuda_graphs, without_targets


@dataclass(frozen=True)
class Session:
    config: RunConfig
    run: RunFolder
    artefact: Artefact
    stepper: Stepper
    training_state: TrainingState
    progress: Progress
    total: int
    last_row: int | None
    mfu_inputs: MfuInputs
    device_name: str

    @property
    def ended(self) -> bool:
        patience = self.config.train.patience
        return self.progress.step >= self.total or (
            patience is not None and self.progress.evaluations_without_improvement >= patience
        )

    def rows(self, step: int) -> list[int]:
        """Of a global step, for all processes together."""
        train = self.config.train
        chosen = step_rows(step, len(self.artefact.train), train.global_batch, train.seed, self.last_row)
        return [int(row) for row in chosen]

    def tokens(self, step: int) -> int:
        """Of a global step, padding not counted."""
        ends, rows = self.artefact.train.rows, self.rows(step)
        return int(sum(int(ends[row + 1]) - int(ends[row]) for row in rows))

    def batches(self, step: int) -> list[Batch]:
        """This process's rows of a global step, in micro batches."""
        train = self.config.train
        chosen = step_rows(step, len(self.artefact.train), train.global_batch, train.seed, self.last_row)
        batcher, mine = self.stepper.batcher, self.stepper.ranks.shard(chosen)
        if len(mine) == 0 and self.stepper.engine.syncs_every_micro_batch:  # of a run's last, smaller batch
            return [without_targets(batch) for batch in batcher.batches(self.artefact.train, chosen[:1])]
        return list(batcher.batches(self.artefact.train, mine))


def say(line: str) -> None:
    print(line, flush=True)


def open_session(config: RunConfig, run: RunFolder, ranks: Ranks) -> Session:
    """Resolves, prepares, builds, and goes on from the newest good checkpoint."""
    ranks.barrier()  # for what the first one may just have written
    sync_checkpoint(run, ranks, say)
    was, device = run.status(), ranks.device
    named = device_name(device)
    config, reasons = _decided(config, run, ranks, named)
    artefact = _prepared(config, ranks)
    _refuse_other_data(run, artefact)
    objective = make_objective(config, artefact)
    run.set_status("starting", was.step if was else 0, was.total_steps if was else 0)
    if ranks.is_main:
        write_text(run.config, to_yaml(config))
        facts = {
            **describe_environment(device),
            "auto": reasons,
            "data": str(artefact.path.resolve()),
            "base": base_fingerprint(config),
        }
        write_json(run.environment, facts)

    engine = open_engine(config, artefact, ranks)
    network = engine.network
    trained = sum(p.numel() for p in network.model.parameters() if p.requires_grad)
    if ranks.is_main:
        # Weights and two moments of 32 bits: told now rather than at the first save.
        place = run.checkpoints if run.checkpoints.is_dir() else run.path  # perhaps another disk
        check_free_space(place, 12 * trained, int(config.save.min_free))
    batcher = Batcher(
        int(config.train.micro_batch),
        artefact.row_length,
        artefact.pad_id,
        device,
        str(config.train.precision),
        pad_to_longest=artefact.facts["packing"] == "off",
        backend=network.attention_backend,
        windows=network.sliding_windows,
        unpad=network.last_layer_pruned,
        needs_documents=objective.needs_documents,
    )
    cuda_graphs = None
    if config.train.cuda_graphs == "on":
        cuda_graphs = make_cuda_graphs(engine, batcher, objective, config.train.activation_checkpointing != "off")
    stepper = Stepper(engine, batcher, objective, config.train.clip, cuda_graphs)
    training_state = TrainingState(engine)
    progress = _resumed(config, run, training_state, ranks)
    length, work = _length(config, artefact), _work(config, artefact, ranks)
    return Session(config, run, artefact, stepper, training_state, progress, *length, work, named)


def _decided(config: RunConfig, run: RunFolder, ranks: Ranks, named: str) -> tuple[RunConfig, dict[str, str]]:
    """Every setting, and why it is so, decided by the first process for all."""
    rung = merge_fallbacks(ranks.all_gather(json.dumps(load_fallbacks(run, named))))

    def decide() -> Resolution:
        begun = read_config(run.config) if run.exists() else None
        resolved = resolve_here(config, begun, rung, ranks.world_size)
        if begun is not None:
            refuse_harmful_changes(begun, resolved.config, run)
        return resolved

    if ranks.world_size == 1:
        alone = decide()
        return alone.config, alone.reasons

    def written() -> str:
        found = decide()
        return json.dumps({"config": dump(found.config), "reasons": found.reasons})

    told = json.loads(ranks.run_on_main(written))
    return RunConfig.model_validate(told["config"]), told["reasons"]


def _prepared(config: RunConfig, ranks: Ranks) -> Artefact:
    """By one process of each machine."""
    if not ranks.is_local_main:
        ranks.barrier()
    show = partial(print_examples, say, sys.stdout.isatty())
    artefact = prepare_run(config, prepared_folder(), say, show)
    if ranks.is_local_main:
        ranks.barrier()
    marks = ranks.all_gather(artefact.path.name)
    if len(set(marks)) > 1:
        raise UserError(
            "data.sources: the machines of this run have different data there (or different versions of sojourn); "
            "copy the first one's to the others"
        )
    return artefact


def _resumed(config: RunConfig, run: RunFolder, training_state: TrainingState, ranks: Ranks) -> Progress:
    """From the newest good checkpoint here or in the mirror."""
    mirror = open_run_mirror(config, run)
    if mirror is not None and ranks.is_main:
        fetch_newest_checkpoint(mirror, run, say)
    ranks.barrier()
    progress = resume(config.save, run, training_state)
    ranks.seed_other_ranks(config.train.seed, progress.step)
    return progress


def _refuse_other_data(run: RunFolder, artefact: Artefact) -> None:
    """The same file with other contents: steps already done would have read other rows, perhaps other tokens."""
    before = Path(str((read_json(run.environment) or {}).get("data", ""))).name
    if before not in ("", artefact.path.name) and any(run.checkpoints.glob("step-*")):
        raise UserError(
            f"{run.path} was begun with other data (the files in data.sources have changed since); put them back to "
            "continue it, or go on with the new ones in another run: --fork NEWNAME"
        )


def _work(config: RunConfig, artefact: Artefact, ranks: Ranks) -> MfuInputs:
    """For the meters: what a token costs, and what the cards could do. A token attends to its own document only."""
    import numpy as np
    import torch

    lengths = np.diff(artefact.train.documents[:100_000].astype(np.float64))
    attended = float((lengths**2).sum() / max(1.0, lengths.sum())) if len(lengths) else float(artefact.max_length)
    frozen = config.method.kind in ("lora", "qlora")
    flops = local_model_spec(config).flops_per_token(attended, frozen)
    cuda = ranks.device == "cuda"
    peak = peak_flops(torch.cuda.get_device_name(), str(config.train.precision)) if cuda else None
    return MfuInputs(flops, None if peak is None else peak * ranks.world_size)


def _length(config: RunConfig, artefact: Artefact) -> tuple[int, int | None]:
    """How many steps, and the row (counted over all epochs) that ends the run."""
    train, rows = config.train, len(artefact.train)
    if train.steps is not None:
        return train.steps, None
    if train.tokens is not None:
        per_step = train.global_batch * max(1.0, float(artefact.train.rows[-1]) / rows)
        return max(1, round(train.tokens / per_step)), None
    last_row = max(1, round((train.epochs or 1.0) * rows))
    return math.ceil(last_row / train.global_batch), last_row
