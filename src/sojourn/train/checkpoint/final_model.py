"""Writes `final/` and `best/`: a model that plain transformers opens, or an adapter that plain peft opens.

The folder is complete or absent. A new chat model carries its ChatML template with generation marks and stops at
`<|im_end|>`; `adapter_config.json` names the base and its revision. `auto_map` stays only where transformers writes the
Python files that it names: those of a model whose code the run allows.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from sojourn.config.schema import RunConfig
from sojourn.data.artefact import Artefact
from sojourn.errors import RunFailed, UserError
from sojourn.infer.runtimes.transformers_tokenizer import without_own_code
from sojourn.model.adapter import write_adapter
from sojourn.model.weights import add_stop_tokens, torch_dtype
from sojourn.run.identity import MODEL_MARK, Identity, is_foreign
from sojourn.storage.disk import sync_file
from sojourn.storage.files import read_json, read_json_object, write_json
from sojourn.storage.stage import staged

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module


def refuse_foreign_model(folder: Path, identity: Identity) -> None:
    """Writing `final/` would replace another run's model."""
    if is_foreign(read_json(folder / MODEL_MARK), identity):
        raise UserError(f"{folder}: the model of another run; move it away, or give this run another name: name=NEW")


def write_final_model(
    model: Module,
    weights: dict[str, Tensor],
    artefact: Artefact,
    folder: Path,
    config: RunConfig,
    mark: dict[str, Any] | None = None,
) -> None:
    """`weights`: all trained weights, unsharded. They are written in `train.precision`, with tokenizer, template and
    stop tokens. `mark`: the run's identity and the step."""
    try:
        _write(model, weights, artefact, folder, config, mark)
    except SafetensorError as error:  # safetensors' error for a full disk
        raise RunFailed(
            f"{folder}: could not be written: {error}; free some space, then run the same command to resume"
        ) from error


def _write(
    model: Module,
    weights: dict[str, Tensor],
    artefact: Artefact,
    folder: Path,
    config: RunConfig,
    mark: dict[str, Any] | None,
) -> None:
    with staged(folder) as stage:
        if config.method.kind in ("lora", "qlora"):
            write_adapter(model, weights, stage, str(config.model.base), config.model.revision)
            write_json(stage / "generation_config.json", {"eos_token_id": artefact.stop_ids})
        else:
            _write_model(model, weights, artefact, stage, str(config.train.precision))
        for file in artefact.tokenizer.iterdir():
            shutil.copy(file, stage / file.name)
        settings = read_json_object(stage / "tokenizer_config.json")
        if "auto_map" in settings:
            write_json(stage / "tokenizer_config.json", without_own_code(settings))
        shutil.copy(artefact.path / "probes.json", stage / "probes.json")
        if mark is not None:
            write_json(stage / MODEL_MARK, mark)
        for file in stage.iterdir():
            sync_file(file)


def _write_model(model: Any, weights: dict[str, Tensor], artefact: Artefact, stage: Path, precision: str) -> None:
    dtype = torch_dtype(precision)
    state = {name: value.detach().to("cpu", dtype) for name, value in weights.items()}
    settings = add_stop_tokens(model, artefact.stop_ids)
    if any(getattr(settings, name, None) is not None for name in ("temperature", "top_p", "top_k")):
        settings.do_sample = True  # some bases set these with do_sample=False, which transformers refuses to save
    model.config.use_cache = True
    model.save_pretrained(stage, state_dict=state)
    model.config.use_cache = False
    written = json.loads((stage / "config.json").read_text(encoding="utf-8"))
    if model._auto_class is None:  # of transformers' own class
        written.pop("auto_map", None)
    text = json.dumps({**written, "dtype": str(dtype).removeprefix("torch.")}, indent=2) + "\n"
    (stage / "config.json").write_text(text, encoding="utf-8")
