"""`final/`: the finished model as plain transformers opens it, put in place in one move."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from sojourn.data.artefact import Artefact
from sojourn.run.files import sync_file, sync_folder


def write_final(model: Any, artefact: Artefact, folder: Path, precision: str) -> None:
    """Weights in the precision of the training (16-bit where it was), tokenizer, template and stop tokens."""
    import torch

    stage = folder.with_name(f".stage-{os.getpid()}-{folder.name}")
    shutil.rmtree(stage, ignore_errors=True)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[precision]
    state = {name: value.detach().to("cpu", dtype) for name, value in model.state_dict().items()}
    model.save_pretrained(stage, state_dict=state)
    written = json.loads((stage / "config.json").read_text(encoding="utf-8"))
    settings = json.dumps({**written, "dtype": str(dtype).removeprefix("torch.")}, indent=2) + "\n"
    (stage / "config.json").write_text(settings, encoding="utf-8")
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
