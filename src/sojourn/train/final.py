"""`final/` and `best/`: the model as plain transformers (or peft, an adapter) opens it, put in place in one move."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from sojourn.config.schema import RunConfig
from sojourn.data.artefact import Artefact
from sojourn.model.adapter import write_adapter
from sojourn.run.files import sync_file, sync_folder


def write_final(model: Any, artefact: Artefact, folder: Path, config: RunConfig) -> None:
    """Weights in the precision of the training (16-bit where it was), tokenizer, template and stop tokens."""
    stage = folder.with_name(f".stage-{os.getpid()}-{folder.name}")
    shutil.rmtree(stage, ignore_errors=True)
    if config.method.kind in ("lora", "qlora"):
        write_adapter(model, stage, str(config.model.base), config.model.revision)
    else:
        _write_model(model, artefact, stage, str(config.train.precision))
    for file in artefact.tokenizer.iterdir():
        shutil.copy(file, stage / file.name)
    shutil.copy(artefact.path / "probes.json", stage / "probes.json")
    for file in stage.iterdir():
        sync_file(file)
    sync_folder(stage)
    old = folder.with_name(f".old-{folder.name}")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    stage.rename(folder)
    sync_folder(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def _write_model(model: Any, artefact: Artefact, stage: Path, precision: str) -> None:
    import torch

    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[precision]
    state = {name: value.detach().to("cpu", dtype) for name, value in model.state_dict().items()}
    stops, kept = artefact.stop_ids, (model.config.use_cache, model.generation_config.eos_token_id)
    model.config.use_cache = True
    known = kept[1] if isinstance(kept[1], list) else [] if kept[1] is None else [kept[1]]
    model.generation_config.eos_token_id = list(dict.fromkeys([*stops, *known]))
    model.save_pretrained(stage, state_dict=state)
    model.config.use_cache = kept[0]
    written = json.loads((stage / "config.json").read_text(encoding="utf-8"))
    settings = json.dumps({**written, "dtype": str(dtype).removeprefix("torch.")}, indent=2) + "\n"
    (stage / "config.json").write_text(settings, encoding="utf-8")
