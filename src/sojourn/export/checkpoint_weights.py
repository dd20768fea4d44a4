"""The weights of a checkpoint, as `final/` would hold them if training had ended there."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sojourn.config.schema import RunConfig
from sojourn.data.artefact import Artefact
from sojourn.errors import UserError
from sojourn.expand_user import expand_user
from sojourn.infer.adapter_weights import AdapterWeights
from sojourn.infer.weight_source import check_finite, file_stamp
from sojourn.model.adapter_check import ADAPTER_FILE
from sojourn.model.base import base_of, meta_model
from sojourn.model.safetensors_reader import SafetensorsFile
from sojourn.model.weights import add_stop_tokens, torch_dtype
from sojourn.resolve.training import lora_alpha
from sojourn.storage.files import read_json_object

if TYPE_CHECKING:
    from torch import Tensor, dtype

_FILE = "model.safetensors"


class CheckpointWeights:
    """Of a run that trained all weights. They are in fp32 in the checkpoint, and in `train.precision` here."""

    def __init__(self, folder: Path, config: RunConfig, artefact: Artefact) -> None:
        self._file = SafetensorsFile(folder / _FILE)
        self._dtype = torch_dtype(str(config.train.precision))
        self.tokenizer_folder = artefact.tokenizer
        model = _meta_model(config, artefact)
        add_stop_tokens(model, artefact.stop_ids)
        model.config.architectures = [type(model).__name__]
        model.config.dtype = self._dtype
        self.config: dict[str, Any] = json.loads(model.config.to_json_string())
        self.generation_config: dict[str, Any] = json.loads(model.generation_config.to_json_string())
        missing = next((name for name, _ in model.named_parameters() if name not in self._file.entries), None)
        if missing is not None:
            raise UserError(f"{folder}: a checkpoint of another model ({missing} is not in it)")

    def names(self) -> list[str]:
        return list(self._file.entries)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._file.entries[name].shape

    def dtype(self, name: str) -> dtype:
        stored = self._file.dtype(name)
        return self._dtype if stored.is_floating_point else stored

    def load(self, name: str) -> Tensor:
        return check_finite(self._file.load(name).to(self.dtype(name)), name, self._file.path)

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        return check_finite(self._file.rows(name, start, stop).to(self.dtype(name)), name, self._file.path)

    def stamp(self) -> str:
        return f"{file_stamp(self._file.path)} {self._dtype}"


def checkpoint_adapter(folder: Path, config: RunConfig, base_name: str) -> AdapterWeights:
    """Of a run that trained an adapter."""
    method = config.method
    if method.adapter is not None:  # trained further, with its own settings
        settings = read_json_object(expand_user(method.adapter) / ADAPTER_FILE)
        if not settings:
            raise UserError(f"{folder}: continues the adapter {method.adapter}, whose {ADAPTER_FILE} is not there now")
    else:
        settings = {
            "peft_type": "LORA",
            "r": method.rank,
            "lora_alpha": lora_alpha(method),
            "use_rslora": method.rslora,
            "use_dora": method.dora,
            "modules_to_save": list(method.modules_to_save),
        }
    return AdapterWeights(folder, {**settings, "base_model_name_or_path": base_name}, SafetensorsFile(folder / _FILE))


def _meta_model(config: RunConfig, artefact: Artefact) -> Any:
    """The run's model, without memory for its weights."""
    import torch

    from sojourn.model.scratch import build_model

    if config.model.base is None:
        with torch.device("meta"):
            sizes = (artefact.vocab_size, artefact.max_length, artefact.pad_id, artefact.stop_ids)
            return build_model(config.model, *sizes, config.train.seed)
    model = meta_model(replace(base_of(config), quant_bits=None))
    if artefact.vocab_size > model.get_input_embeddings().weight.shape[0]:
        model.config.get_text_config().vocab_size = artefact.vocab_size
    return model
