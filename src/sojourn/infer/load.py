"""Opens a model to talk to: a run by its name, any folder that plain transformers or peft opens, or a GGUF file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sojourn.config.load import read_config
from sojourn.errors import RunFailed, UserError
from sojourn.machine.precision import choose_device, cpu_bf16_feature
from sojourn.model.adapter import ADAPTER_FILE, open_adapter
from sojourn.model.base import Base, open_base
from sojourn.model.quiet import quiet_transformers
from sojourn.run.folder import RunFolder
from sojourn.run.home import find_run
from sojourn.storage.files import read_json


@dataclass(frozen=True)
class Model:
    """A model with its tokenizer, ready on its device."""

    folder: Path
    network: Any
    tokenizer: Any
    device: str

    @property
    def context(self) -> int:
        """How many tokens it can hold."""
        return int(getattr(self.network.config.get_text_config(), "max_position_embeddings", None) or 2**20)

    @property
    def is_chat(self) -> bool:
        return bool(self.tokenizer.chat_template)


def find_model(word: str) -> Path:
    """The place of a model: `word` itself, or the `final/` of the run of that name."""
    place = Path(word).expanduser()
    if place.suffix == ".gguf" and place.is_file():
        return place
    if any((place / name).is_file() for name in ("config.json", ADAPTER_FILE)):
        return place
    run = find_run(word)
    if run.has_final():
        return run.final
    status = run.status()
    where = f" (step {status.step} of {status.total_steps})" if status else ""
    raise UserError(f"{run.path}: not finished yet{where}; continue it with: sojourn train {run.config}")


def open_model(word: str, device: str = "auto") -> Model:
    """An adapter is opened on the model that it was made for."""
    place = find_model(word)
    where = choose_device(device)
    quiet_transformers()
    from transformers import AutoTokenizer

    adapter = read_json(place / ADAPTER_FILE) if place.is_dir() and (place / ADAPTER_FILE).is_file() else None
    trusted = _is_trusted(place)
    base = Base(str(place), trust_remote_code=trusted)
    if adapter is not None:
        base = Base(str(adapter.get("base_model_name_or_path")), adapter.get("revision"), trusted)
    try:
        tokenizer = AutoTokenizer.from_pretrained(**(base if place.suffix == ".gguf" else Base(str(place))).place)
        network = open_base(base, _numbers(base, where), where)
    except (UserError, OSError, ValueError) as error:
        why = str(error).strip().splitlines()[0].removeprefix("model.base: ")
        needs = "config.json, tokenizer.json and model.safetensors"
        raise RunFailed(f"{place}: cannot be opened as a model (it needs {needs}): {why}") from None
    if adapter is not None:
        network = open_adapter(network, place, trainable=False).merge_and_unload()
    return Model(place, network.eval(), tokenizer, where)


def _is_trusted(place: Path) -> bool:
    """Whether the run that this came from was told to run the model's own code."""
    kept = RunFolder(place.parent).config
    return kept.is_file() and read_config(kept).model.trust_remote_code


def _numbers(base: Base, device: str) -> Any:
    """The model's own, but not 16 bits on a CPU that must emulate them, and not what a GGUF file unpacks to."""
    import torch

    slow = device == "cpu" and cpu_bf16_feature() is None
    return torch.float32 if slow or base.word.endswith(".gguf") else "auto"
