"""Loads a model for inference: a run by name, a folder that transformers or peft can load, or a GGUF file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sojourn.config.load import read_config
from sojourn.errors import RunFailed, UserError
from sojourn.machine.precision import choose_device, cpu_bf16_feature
from sojourn.model.adapter import ADAPTER_FILE, load_adapter
from sojourn.model.base import BaseModelSource, load_base_model
from sojourn.model.quiet import quiet_transformers
from sojourn.run.folder import RunFolder
from sojourn.run.home import find_run
from sojourn.storage.files import read_json

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class LoadedModel:
    """A model in eval mode on its device, with its tokenizer."""

    path: Path
    model: PreTrainedModel
    tokenizer: Any
    device: str

    @property
    def is_chat(self) -> bool:
        return bool(self.tokenizer.chat_template)


def context_length(model: PreTrainedModel) -> int:
    """The most tokens that the model's position embeddings allow."""
    return int(getattr(model.config.get_text_config(), "max_position_embeddings", None) or 2**20)


def find_model_path(name: str) -> Path:
    """`name` as a path, if there is a model there; else the `final/` of the run of that name."""
    path = Path(name).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        return path
    if any((path / file).is_file() for file in ("config.json", ADAPTER_FILE)):
        return path
    run = find_run(name)
    if run.has_final():
        return run.final
    status = run.status()
    progress = f" (step {status.step} of {status.total_steps})" if status else ""
    raise UserError(f"{run.path}: not finished yet{progress}; resume it with: sojourn train {run.config}")


def load_model(name: str, device: str = "auto") -> LoadedModel:
    """An adapter is loaded onto its base model and merged into it."""
    path = find_model_path(name)
    device = choose_device(device)
    quiet_transformers()
    from transformers import AutoTokenizer

    adapter = read_json(path / ADAPTER_FILE) if path.is_dir() and (path / ADAPTER_FILE).is_file() else None
    trusted = _trusts_remote_code(path)
    base = BaseModelSource(str(path), trust_remote_code=trusted)
    if adapter is not None:
        base = BaseModelSource(str(adapter.get("base_model_name_or_path")), adapter.get("revision"), trusted)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            **(base if path.suffix == ".gguf" else BaseModelSource(str(path))).from_pretrained_args
        )
        model = load_base_model(base, _load_dtype(base, device), device)
    except (UserError, OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0].removeprefix("model.base: ")
        needs = "config.json, tokenizer.json and model.safetensors"
        raise RunFailed(f"{path}: cannot be opened as a model (it needs {needs}): {reason}") from None
    if adapter is not None:
        model = load_adapter(model, path, trainable=False).merge_and_unload()
    return LoadedModel(path, model.eval(), tokenizer, device)


def _trusts_remote_code(path: Path) -> bool:
    """Whether the run that made the model has `model.trust_remote_code`."""
    config = RunFolder(path.parent).config
    return config.is_file() and read_config(config).model.trust_remote_code


def _load_dtype(base: BaseModelSource, device: str) -> Any:
    """The checkpoint's own dtype; fp32 for GGUF files, and on CPUs without native bf16."""
    import torch

    slow = device == "cpu" and cpu_bf16_feature() is None
    return torch.float32 if slow or base.name_or_path.endswith(".gguf") else "auto"
