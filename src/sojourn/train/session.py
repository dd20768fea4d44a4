"""Everything that one call of `train` works with: settings, data, model, optimizer, and where the run is."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np

from sojourn.catalog.gpus import peak_flops
from sojourn.config.load import dump, read_config, to_yaml
from sojourn.config.schema import RunConfig
from sojourn.data.artefact import Artefact, Batch
from sojourn.data.order import step_rows
from sojourn.data.prepare import prepare_run
from sojourn.data.report import print_examples
from sojourn.data.tokenize.tokenizer import TRAINED
from sojourn.errors import UserError
from sojourn.estimate.model_states import state_bytes
from sojourn.model.network import Network
from sojourn.resolve.resolve import Resolution
from sojourn.resolve.run_steps import run_steps
from sojourn.run.folder import RunFolder
from sojourn.run.home import prepared_folder
from sojourn.run.identity import Identity, read_identity
from sojourn.storage.files import CannotRead, read_json_object, write_json, write_text
from sojourn.storage.mirror_process import MirrorProcess
from sojourn.train.batcher import Batcher
from sojourn.train.checkpoint.checkpoint import check_free_space, find_newest
from sojourn.train.checkpoint.config_changes import another_run, model_fingerprints, refuse_harmful_changes
from sojourn.train.checkpoint.final_model import refuse_foreign_model
from sojourn.train.checkpoint.recovery import establish_identity, find_newest_anywhere
from sojourn.train.checkpoint.sync import sync_checkpoint
from sojourn.train.checkpoint.training_state import Progress, TrainingState, resume
from sojourn.train.distributed.engine import Engine
from sojourn.train.distributed.open import open_engine
from sojourn.train.faults.oom_fallback import load_fallbacks, merge_fallbacks
from sojourn.train.metrics.environment import describe_environment, device_name
from sojourn.train.metrics.meters import MfuInputs
from sojourn.train.model_spec import local_model_spec
from sojourn.train.named_files import check_named_files
from sojourn.train.objective.base import Objective
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
    total_steps: int
    last_row: int | None  # counted over all epochs; None if the run ends by steps
    mfu_inputs: MfuInputs
    device_name: str
    identity: Identity
    mirror: MirrorProcess | None = None

    @property
    def is_finished(self) -> bool:
        patience, worse = self.config.train.patience, self.progress.evaluations_without_improvement
        return self.progress.step >= self.total_steps or (patience is not None and worse >= patience)

    def rows(self, step: int) -> list[int]:
        """The global batch of a step."""
        return [int(row) for row in self._rows(step)]

    def _rows(self, step: int) -> np.ndarray:
        train = self.config.train
        return step_rows(step, len(self.artefact.train), train.global_batch, train.seed, self.last_row)

    def tokens(self, step: int) -> int:
        """Tokens of a step's global batch, without padding."""
        offsets, rows = self.artefact.train.rows, self._rows(step)
        return int((offsets[rows + 1] - offsets[rows]).sum())

    def batches(self, step: int) -> list[Batch]:
        """This rank's rows of a step, in micro batches."""
        rows, batcher = self._rows(step), self.stepper.batcher
        shard = self.stepper.ranks.shard(rows)
        if len(shard) == 0 and self.stepper.engine.syncs_every_micro_batch:  # in a run's last, smaller global batch
            return [without_targets(batch) for batch in batcher.batches(self.artefact.train, rows[:1], step)]
        return list(batcher.batches(self.artefact.train, shard, step))


def print_line(line: str) -> None:
    print(line, flush=True)


def open_session(config: RunConfig, run: RunFolder, ranks: Ranks, mirror: MirrorProcess | None = None) -> Session:
    """Resolves `auto` settings, prepares the data, builds the model, and loads the newest good checkpoint."""
    ranks.barrier()  # rank 0 may just have written the run's files
    sync_checkpoint(run, ranks, print_line)
    device = device_name(ranks.device)
    is_known = previous_config(run) is not None
    config, reasons = _resolve_on_main(config, run, ranks, device)
    check_named_files(config)
    artefact = _prepare(config, ranks)
    if ranks.is_main:
        _warn_without_held_out_rows(config, artefact)
    _refuse_other_data(config, run, artefact)
    objective = make_objective(config, artefact)  # refused before the run has an identity
    identity = _identity(config, run, ranks, artefact, is_known)
    status = run.status()
    run.set_status("starting", status.step if status else 0, status.total_steps if status else 0)
    if ranks.is_main:
        write_text(run.config, to_yaml(config))
        facts = {"auto": reasons, "data": str(artefact.path.resolve()), **model_fingerprints(config)}
        write_json(run.environment, {**describe_environment(ranks.device), **facts})
    engine = open_engine(config, artefact, ranks)
    if ranks.is_main:
        _note_own_attention(config, run, engine.network)
        _check_disk(config, run, engine)
    stepper = _make_stepper(config, artefact, objective, engine)
    training_state = TrainingState(engine)
    progress = _resume(config, run, training_state, ranks, mirror)
    if ranks.is_main:
        identity = read_identity(run.identity) or identity  # it may come from the mirror's checkpoint
    total_steps, last_row = _run_length(config, artefact)
    mfu_inputs = _mfu_inputs(config, artefact, ranks)
    return Session(
        config, run, artefact, stepper, training_state, progress, total_steps, last_row, mfu_inputs, device, identity,
        mirror,
    )  # fmt: skip


def previous_config(run: RunFolder, say: Callable[[str], None] = lambda line: None) -> RunConfig | None:
    """The configuration that the run was started with. None for a new run, and where its run.yaml is damaged while
    identity.json can tell instead whether the settings are the same, which `say` gets a line about."""
    if not run.exists():
        return None
    try:
        return read_config(run.config)
    except CannotRead:
        raise
    except UserError as error:
        if read_identity(run.identity) is None:
            raise
        say(f"warning: {error}; it is written again")
        return None


def _identity(config: RunConfig, run: RunFolder, ranks: Ranks, artefact: Artefact, is_known: bool) -> Identity:
    def establish() -> str:
        identity = establish_identity(config, run, artefact.path.name, is_known)
        refuse_foreign_model(run.final, identity)
        return json.dumps(asdict(identity))

    if ranks.world_size == 1:
        return Identity(**json.loads(establish()))
    return Identity(**json.loads(ranks.run_on_main(establish)))


def _resolve_on_main(config: RunConfig, run: RunFolder, ranks: Ranks, device: str) -> tuple[RunConfig, dict[str, str]]:
    """Every setting and its reason, decided by rank 0 for all."""
    fallbacks = merge_fallbacks(ranks.all_gather(json.dumps(load_fallbacks(run, device))))

    def decide() -> Resolution:
        before = previous_config(run, print_line)
        resolved = resolve_here(config, before, fallbacks, ranks.world_size)
        if before is not None:
            refuse_harmful_changes(before, resolved.config, run)
        return resolved

    if ranks.world_size == 1:
        resolved = decide()
        return resolved.config, resolved.reasons

    def decide_as_json() -> str:
        resolved = decide()
        return json.dumps({"config": dump(resolved.config), "reasons": resolved.reasons})

    decided = json.loads(ranks.run_on_main(decide_as_json))
    return RunConfig.model_validate(decided["config"]), decided["reasons"]


def _prepare(config: RunConfig, ranks: Ranks) -> Artefact:
    """By one rank of each machine; the others wait."""
    if not ranks.is_local_main:
        ranks.barrier()
    show = partial(print_examples, print_line, sys.stdout.isatty())
    artefact = prepare_run(config, prepared_folder(), print_line, show)
    if ranks.is_local_main:
        ranks.barrier()
    if len(set(ranks.all_gather(artefact.path.name))) > 1:
        raise UserError(
            "data.sources: the machines of this run have different data, or different versions of sojourn; copy the "
            "data of the first machine to the others"
        )
    return artefact


def _warn_without_held_out_rows(config: RunConfig, artefact: Artefact) -> None:
    if config.train.eval_every is not None and not len(artefact.eval):
        print_line(
            "warning: train.eval_every asks for evaluations, but no rows are held out: data.eval_fraction is "
            f"{config.data.eval_fraction:g} of {len(artefact.train):,} rows; set data.eval_fraction=0.1, or "
            "data.eval_sources=FILE"
        )


def _note_own_attention(config: RunConfig, run: RunFolder, network: Network) -> None:
    """Whether a model can call our attention is known once it is open."""
    if network.attention_backend is not None:
        return
    name, own = type(network.base_model).__name__, network.base_model.config._attn_implementation
    note = f"{name} keeps its own attention (transformers' {own}), since it cannot call ours"
    print_line(f"note: train.attention={config.train.attention} has no effect: {note}")
    environment = read_json_object(run.environment)
    write_json(run.environment, {**environment, "auto": {**environment["auto"], "train.attention": note}})


def _check_disk(config: RunConfig, run: RunFolder, engine: Engine) -> None:
    """Is there room for a checkpoint: weights and optimizer states? Better now than at the first save."""
    states = state_bytes("8bit" in config.train.optimizer, config.train.master_weights == "bf16_kahan")
    trained = [p for p in engine.network.model.parameters() if p.requires_grad]
    folder = run.checkpoints if run.checkpoints.is_dir() else run.path  # checkpoints may be on another disk
    size = sum(p.numel() * (p.element_size() + states) for p in trained)
    check_free_space(folder, int(size), int(config.save.min_free))


def _make_stepper(config: RunConfig, artefact: Artefact, objective: Objective, engine: Engine) -> Stepper:
    network, train = engine.network, config.train
    batcher = Batcher(
        int(train.micro_batch),
        artefact.row_length,
        artefact.pad_id,
        engine.ranks.device,
        str(train.precision),
        pad_to_longest=artefact.facts["packing"] == "off",
        backend=network.attention_backend,
        windows=network.sliding_windows,
        unpad=network.last_layer_pruned,
        needs_documents=objective.needs_documents,
        needs_padding=objective.needs_padding,
        neftune_alpha=train.neftune_noise_alpha,
        seed=train.seed,
    )
    cuda_graphs = None
    if train.cuda_graphs == "on":
        cuda_graphs = make_cuda_graphs(engine, batcher, objective, train.activation_checkpointing != "off")
    return Stepper(engine, batcher, objective, train.clip, cuda_graphs)


def _resume(
    config: RunConfig, run: RunFolder, training_state: TrainingState, ranks: Ranks, mirror: MirrorProcess | None
) -> Progress:
    """From the newest good checkpoint here or in the mirror."""
    newest = find_newest_anywhere(run, mirror, print_line) if ranks.is_main else None
    ranks.barrier()
    if config.save.mirror is not None:
        sync_checkpoint(run, ranks, print_line)  # other nodes may lack what was fetched
    if not ranks.is_main:
        newest = find_newest(run.checkpoints)
    return resume(config.save, run, training_state, newest)


def _refuse_other_data(config: RunConfig, run: RunFolder, artefact: Artefact) -> None:
    """A file of data.sources has changed: the steps so far have read other rows, perhaps with another tokenizer."""
    path = read_json_object(run.environment).get("data")
    before = Path(path).name if isinstance(path, str) else ""
    if before not in ("", artefact.path.name) and any(run.checkpoints.glob("step-*")):
        fits_weights = config.model.base is not None or config.data.tokenizer not in TRAINED  # the same tokenizer
        raise UserError(
            f"{run.path} was started with other data (the files in data.sources have changed since); restore them to "
            f"resume it, or {another_run(config, fits_weights)}"
        )


def _mfu_inputs(config: RunConfig, artefact: Artefact, ranks: Ranks) -> MfuInputs:
    """FLOPs per token, and the peak FLOP/s of all ranks. A token attends to its own document only."""
    import torch

    lengths = np.diff(artefact.train.documents[:100_000].astype(np.float64))
    attended = float((lengths**2).sum() / max(1.0, lengths.sum())) if len(lengths) else float(artefact.max_length)
    frozen = config.method.kind in ("lora", "qlora")
    flops = local_model_spec(config).flops_per_token(attended, frozen)
    cuda = ranks.device == "cuda"
    peak = peak_flops(torch.cuda.get_device_name(), str(config.train.precision)) if cuda else None
    return MfuInputs(flops, None if peak is None else peak * ranks.world_size)


def _run_length(config: RunConfig, artefact: Artefact) -> tuple[int, int | None]:
    """The number of steps, and the row (counted over all epochs) that ends the run, if it ends by epochs."""
    rows = len(artefact.train)
    return run_steps(config.train, rows, float(artefact.train.rows[-1]) / rows)
