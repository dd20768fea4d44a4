"""Writes a randomly initialised model and a LoRA adapter for it, as transformers and peft save them."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def main() -> None:
    """Entry point of the process that writes them: argv[1] is the task as JSON."""
    task = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    sizes = write_base(task)
    if task["adapter"]:
        write_adapter(task, sizes)


def write_base(task: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Returns in_features and out_features of each linear layer by name. A GPU initialises fastest."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from sojourn.model.quiet import quiet_transformers

    quiet_transformers()
    shape = task["shape"]
    config = AutoConfig.for_model(shape["family"], max_position_embeddings=task["length"], **task["settings"])
    torch.manual_seed(0)
    with torch.device(task["device"]):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, shape["dtype"]))
    model.save_pretrained(task["base"])
    linears = (pair for pair in model.named_modules() if pair[0].rpartition(".")[2] in _LINEARS)
    return {name: (layer.in_features, layer.out_features) for name, layer in linears}


def write_adapter(task: dict[str, Any], sizes: dict[str, tuple[int, int]]) -> None:
    """Both A and B are random, as after some training: with B at zero A would get no gradient."""
    import torch
    from peft import LoraConfig
    from safetensors.torch import save_file

    folder, rank = Path(task["adapter"]), task["rank"]
    settings = {"r": rank, "lora_alpha": task["alpha"], "target_modules": list(_LINEARS), "task_type": "CAUSAL_LM"}
    LoraConfig(base_model_name_or_path=task["base"], **settings).save_pretrained(str(folder))
    draw = torch.Generator().manual_seed(1)
    tensors = {}
    for name, (inputs, outputs) in sizes.items():
        spread = 1 / math.sqrt(inputs)
        tensors[f"base_model.model.{name}.lora_A.weight"] = torch.randn(rank, inputs, generator=draw) * spread
        tensors[f"base_model.model.{name}.lora_B.weight"] = torch.randn(outputs, rank, generator=draw) * 0.02
    save_file(tensors, str(folder / "adapter_model.safetensors"), metadata={"format": "pt"})
