"""Tiny random models of every family that is written as GGUF, with the tokenizer of a base model's folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from sojourn.export.gguf.write import write
from sojourn.export.open_source import open_weights
from sojourn.export.progress import NoProgress
from sojourn.export.stage import ExportStage
from sojourn.infer.gguf.file import GgufFile

LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
LONG_ROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "short_factor": [1.1, 1.2, 1.3, 1.4],
    "long_factor": [2.0, 3.0, 4.0, 5.0], "original_max_position_embeddings": 256,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"rope_parameters": LLAMA3_ROPE, "attention_bias": True, "mlp_bias": True}),
    "llama, wide heads": ("llama", {"head_dim": 32, "tie_word_embeddings": True}),
    "mistral": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {"rope_parameters": YARN, "tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 32, "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    "gemma3": (
        "gemma3_text",
        {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 4, "num_hidden_layers": 6},
    ),
    "phi3": (
        "phi3",
        {"rope_parameters": LONG_ROPE, "original_max_position_embeddings": 256, "max_position_embeddings": 512},
    ),
    "glm4": ("glm4", {}),
    "glm": ("glm", {}),
    "smollm3": ("smollm3", {"num_hidden_layers": 5}),
}


def make_model(tokenizer: Path, folder: Path, kind: str, **changed: Any) -> Path:
    """Weights large enough that every one of them matters."""
    size = len(json.loads((tokenizer / "tokenizer.json").read_text())["model"]["vocab"])
    settings = json.loads((tokenizer / "config.json").read_text())
    given = {
        "vocab_size": -(-size // 64) * 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128,
        "bos_token_id": None, "eos_token_id": settings["eos_token_id"], "pad_token_id": settings["pad_token_id"],
        **changed,
    }  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **given))
    with torch.no_grad():
        for name, value in model.named_parameters():
            value.add_(torch.randn_like(value) * (0.1 if value.ndim == 1 or "norm" in name else 0.08))
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model"):
        if (tokenizer / name).is_file():
            shutil.copy(tokenizer / name, folder / name)
    return folder


class Said(NoProgress):
    """Keeps what a writer says."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        self.lines.append(line)


def write_gguf(folder: Path, target: Path, quantization: str = "f32", said: Said | None = None) -> Path:
    """Without the gate."""
    source = open_weights(str(folder))
    with ExportStage(target, source.fingerprint) as stage:
        write(source, stage, quantization, said or NoProgress())
        stage.finish({"format": "gguf", "quantization": quantization})
    return next(target.glob("*.gguf"))


def change_key(file: Path, key: str, value: Any) -> None:
    """Writes the whole file again with another value."""
    reader, old = gguf.GGUFReader(file), GgufFile(file)
    copy = file.with_suffix(".changed")
    writer = gguf.GGUFWriter(copy, old.architecture)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, value if name == key else old[name], field.types[0], inner)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    copy.replace(file)
    assert GgufFile(file)[key] == value
