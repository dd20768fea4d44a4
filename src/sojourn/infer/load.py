"""Loads a model for inference: a run at its end or at a checkpoint, a folder that transformers or peft can load, or a
GGUF file. Whatever opens a model for use opens it here."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sojourn.config.load import read_config
from sojourn.data.artefact import Artefact, artefact_of
from sojourn.data.tokenize.gguf_tokenizer import extract_tokenizer
from sojourn.errors import RunFailed, UserError
from sojourn.infer.find import FoundModel, find_model
from sojourn.infer.runtimes.transformers_tokenizer import open_tokenizer
from sojourn.machine.precision import choose_device, cpu_bf16_feature
from sojourn.model.adapter import load_adapter, with_adapter
from sojourn.model.adapter_check import ADAPTER_FILE, check_adapter
from sojourn.model.base import BaseModelSource, base_of, load_base_model
from sojourn.model.quiet import quiet_transformers
from sojourn.model.scratch import build_model
from sojourn.model.weights import add_stop_tokens, load_trainable_state_dict, stored_stop_tokens, torch_dtype
from sojourn.run.folder import RunFolder
from sojourn.run.moved_paths import path_here
from sojourn.storage.files import CannotRead

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from sojourn.config.schema import RunConfig


@dataclass(frozen=True)
class LoadedModel:
    """A model in eval mode on its device, with its tokenizer and the folder of that. `run`: the one that trained it."""

    path: Path
    model: PreTrainedModel
    tokenizer: Any
    device: str
    run: RunFolder | None = None
    tokenizer_folder: Path | None = None

    @property
    def is_chat(self) -> bool:
        return bool(self.tokenizer.chat_template)


def context_length(model: PreTrainedModel) -> int:
    """The most tokens that the model's position embeddings allow."""
    return int(getattr(model.config.get_text_config(), "max_position_embeddings", None) or 2**20)


def load_model(name: str, device: str = "auto", checkpoint: str | None = None) -> LoadedModel:
    """`name` and `checkpoint`: as in `find_model`. An adapter is merged into its base model."""
    found = find_model(name, checkpoint)
    device = choose_device(device)
    quiet_transformers()
    artefact = artefact_of(found.run) if found.is_checkpoint and found.run is not None else None
    try:
        if artefact is not None and found.run is not None:
            model, folder = _load_checkpoint(found.path, config_here(found.run), artefact, device)
        else:
            model, folder = _load_folder(found, device)
        tokenizer = open_tokenizer(folder)
    except CannotRead:
        raise
    except (UserError, OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].removeprefix("model.base: ")
        if reason.startswith(str(found.path)):
            raise RunFailed(reason) from None
        needs = "" if found.is_checkpoint else " (it needs config.json, tokenizer.json and model.safetensors)"
        raise RunFailed(f"{found.path}: cannot be opened as a model{needs}: {reason}") from None
    return LoadedModel(found.path, model.eval(), tokenizer, device, found.run, folder)


def tokenizer_of(found: FoundModel) -> Any:
    """Without the model."""
    if found.is_checkpoint and found.run is not None:
        folder = artefact_of(found.run).tokenizer
    else:
        folder = extract_tokenizer(found.path) if found.path.suffix == ".gguf" else found.path
    return open_tokenizer(folder)


def _load_folder(found: FoundModel, device: str) -> tuple[Any, Path]:
    """The model, and the folder of its tokenizer."""
    path, trusted = found.path, trusts_remote_code(found.run)
    if path.suffix == ".gguf":
        base = BaseModelSource(str(path))
        return load_base_model(base, _load_dtype(base, device), device), extract_tokenizer(path)
    if not (path / ADAPTER_FILE).is_file():
        base = BaseModelSource(str(path), trust_remote_code=trusted)
        return load_base_model(base, _load_dtype(base, device), device), path
    adapter = check_adapter(path)
    name = path_here(str(adapter.get("base_model_name_or_path")), path)
    base = BaseModelSource(name, adapter.get("revision"), trusted)
    model = load_adapter(load_base_model(base, _load_dtype(base, device), device), path, trainable=False)
    merged = model.merge_and_unload()
    add_stop_tokens(merged, _stop_tokens(found))
    return merged, path


def _stop_tokens(found: FoundModel) -> list[int]:
    """What ends an answer of an adapter: as it says, else as the data of its run."""
    stored = stored_stop_tokens(found.path)
    if stored or found.run is None:
        return stored
    try:
        return artefact_of(found.run).stop_ids
    except UserError:
        return []


def _load_checkpoint(path: Path, config: RunConfig, artefact: Artefact, device: str) -> tuple[Any, Path]:
    """The model that `final/` would hold if training had ended there."""
    from safetensors.torch import load_file

    weights = load_file(path / "model.safetensors")
    if config.method.kind in ("lora", "qlora"):
        base = replace(base_of(config), quant_bits=None)  # as for final/: merged into unquantized weights
        model = load_base_model(base, _load_dtype(base, device), device)
        model = with_adapter(model, config.method, config.train.seed, empty=True)
        load_trainable_state_dict(model, weights)
        merged = model.merge_and_unload()
        add_stop_tokens(merged, artefact.stop_ids)
        return merged, artefact.tokenizer
    model = _empty_model(config, artefact)
    load_trainable_state_dict(model, weights)
    dtype = torch_dtype(str(config.train.precision))
    for parameter in model.parameters():  # not model.to(dtype), which would cast RoPE's buffers too
        written = parameter.data.to(dtype)
        parameter.data = written.float() if _is_slow_in_bf16(device) else written
    add_stop_tokens(model, artefact.stop_ids)
    return model.to(device), artefact.tokenizer


def _empty_model(config: RunConfig, artefact: Artefact) -> Any:
    """The model that a run with all weights trains, before the checkpoint's weights are loaded."""
    if config.model.base is None:
        sizes = (artefact.vocab_size, artefact.max_length, artefact.pad_id, artefact.stop_ids)
        return build_model(config.model, *sizes, config.train.seed)
    model = load_base_model(base_of(config), torch_dtype("fp32"), "cpu")
    if artefact.vocab_size > model.get_input_embeddings().weight.shape[0]:
        model.resize_token_embeddings(artefact.vocab_size, mean_resizing=False)
    return model


def config_here(run: RunFolder) -> RunConfig:
    config = read_config(run.config)
    if config.model.base is None:
        return config
    base = path_here(config.model.base, run.path)
    return config.model_copy(update={"model": config.model.model_copy(update={"base": base})})


def trusts_remote_code(run: RunFolder | None) -> bool:
    """Whether the run that made the model has `model.trust_remote_code`."""
    return run is not None and run.config.is_file() and read_config(run.config).model.trust_remote_code


def _is_slow_in_bf16(device: str) -> bool:
    return device == "cpu" and cpu_bf16_feature() is None


def _load_dtype(base: BaseModelSource, device: str) -> Any:
    """The checkpoint's own dtype; fp32 for GGUF files, and on CPUs without native bf16."""
    import torch

    return torch.float32 if _is_slow_in_bf16(device) or base.name_or_path.endswith(".gguf") else "auto"
