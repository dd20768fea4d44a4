"""`final/` and `best/`: the model as plain transformers (or peft, an adapter) opens it, put in place in one move."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from sojourn.config.schema import RunConfig
from sojourn.data.artefact import Artefact
from sojourn.errors import RunFailed
from sojourn.model.adapter import write_adapter
from sojourn.storage.disk import sync_file
from sojourn.storage.stage import staged


def write_final_model(model: Any, weights: dict[str, Any], artefact: Artefact, folder: Path, config: RunConfig) -> None:
    """`weights`: what was trained, whole. They go into the folder in the precision of the training (16-bit where it
    was), with tokenizer, template and stop tokens."""
    try:
        _write(model, weights, artefact, folder, config)
    except SafetensorError as error:  # what the library makes of a full disk
        raise RunFailed(f"{folder}: could not be written: {error}; make room, then run the same again") from error


def _write(model: Any, weights: dict[str, Any], artefact: Artefact, folder: Path, config: RunConfig) -> None:
    with staged(folder) as stage:
        if config.method.kind in ("lora", "qlora"):
            write_adapter(model, weights, stage, str(config.model.base), config.model.revision)
        else:
            _write_model(model, weights, artefact, stage, str(config.train.precision))
        for file in artefact.tokenizer.iterdir():
            shutil.copy(file, stage / file.name)
        shutil.copy(artefact.path / "probes.json", stage / "probes.json")
        for file in stage.iterdir():
            sync_file(file)


def _write_model(model: Any, weights: dict[str, Any], artefact: Artefact, stage: Path, precision: str) -> None:
    import torch

    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[precision]
    state = {name: value.detach().to("cpu", dtype) for name, value in weights.items()}
    settings = model.generation_config
    known = settings.eos_token_id if isinstance(settings.eos_token_id, list) else [settings.eos_token_id]
    settings.eos_token_id = list(dict.fromkeys([*artefact.stop_ids, *(i for i in known if i is not None)]))
    if any(getattr(settings, name, None) is not None for name in ("temperature", "top_p", "top_k")):
        settings.do_sample = True  # bases exist that say how to sample but not to; transformers will not save such
    model.config.use_cache = True
    model.save_pretrained(stage, state_dict=state)
    model.config.use_cache = False
    written = json.loads((stage / "config.json").read_text(encoding="utf-8"))
    text = json.dumps({**written, "dtype": str(dtype).removeprefix("torch.")}, indent=2) + "\n"
    (stage / "config.json").write_text(text, encoding="utf-8")
