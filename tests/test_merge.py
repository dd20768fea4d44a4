"""Merged weights give the adapter's own logits, as plain peft computes them; several adapters combine as the papers say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from sojourn.export.adapter_weights import open_adapter
from sojourn.export.combine import Combine
from sojourn.export.merge import MergedWeights
from sojourn.infer.streamed import streamed_logits
from sojourn.infer.weight_source import FolderWeights

IDS = [[5, 17, 3, 99, 42, 42, 8], [1, 2, 3]]
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
SIZES = {
    "vocab_size": 120, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0,
}  # fmt: skip


def make_model(folder: Path, family: str = "llama", dtype: torch.dtype = torch.float32, **changed: Any) -> Path:
    torch.manual_seed(1)
    config = AutoConfig.for_model(family, **{**SIZES, **changed})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for weight in model.parameters():  # norms of 1 and biases of 0 would hide what is swapped or left out
            weight += torch.randn_like(weight) * 0.1
    model.to(dtype).save_pretrained(folder)
    return folder


def add_adapter(base: Path, folder: Path, seed: int = 2, **settings: Any) -> list[torch.Tensor]:
    """Writes an adapter with random weights; returns the logits of base and adapter, unmerged, in plain peft."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    torch.manual_seed(seed)
    given = {"r": 4, "lora_alpha": 16, "target_modules": ATTENTION, "task_type": "CAUSAL_LM", **settings}
    model = get_peft_model(model, LoraConfig(**given)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight += torch.randn_like(weight) * 0.05
        logits = [model(torch.tensor([ids])).logits[0] for ids in IDS]
    model.save_pretrained(str(folder))
    return logits


def merged(base: Path, *adapters: Path, weights: tuple[float, ...] = (), combine: Combine | None = None) -> Any:
    opened = [open_adapter(folder, *weights[i : i + 1]) for i, folder in enumerate(adapters)]
    return MergedWeights(FolderWeights(base), opened, combine)


def worst(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    """The largest difference, as a share of the largest logit."""
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(ours, theirs, strict=True))


KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "lora": ({}, {}),
    "rslora": ({}, {"use_rslora": True}),
    "dora": ({}, {"use_dora": True}),
    "patterns": ({}, {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {r"layers\.1\.self_attn\.v_proj": 3}}),
    "all layers": ({}, {"target_modules": [*ATTENTION, "gate_proj", "up_proj", "down_proj"], "use_rslora": True}),
    "saved head": ({}, {"modules_to_save": ["lm_head"]}),
    "saved embedding and norm": ({}, {"modules_to_save": ["embed_tokens", "norm"], "use_dora": True}),
    "saved embedding, tied": ({"tie_word_embeddings": True}, {"modules_to_save": ["embed_tokens"]}),
    "saved head, tied": ({"tie_word_embeddings": True}, {"modules_to_save": ["lm_head"]}),
    "lora on a tied embedding": ({"tie_word_embeddings": True}, {"target_modules": ["q_proj", "embed_tokens"]}),
    "dora on an embedding": ({}, {"target_modules": ["q_proj", "embed_tokens"], "use_dora": True}),
    "kept tied": (
        {"tie_word_embeddings": True},
        {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    ),
    "biases": ({"family": "qwen2"}, {"bias": "all", "target_modules": ["q_proj", "v_proj"]}),
    "bias of lora_B": ({"family": "qwen2"}, {"lora_bias": True, "target_modules": ["q_proj", "v_proj"]}),
    "transposed weights": (
        {"family": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4},
        {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True},
    ),
    "transposed dora": (
        {"family": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4},
        {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True, "use_dora": True},
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_merged_weights_give_the_adapters_logits(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sojourn.infer.weight_source._PIECE", 200)  # several pieces of each matrix
    changed, settings = KINDS[kind]
    base = make_model(tmp_path / "base", **changed)
    plain = streamed_logits(FolderWeights(base), IDS)
    theirs = add_adapter(base, tmp_path / "adapter", **settings)
    source = merged(base, tmp_path / "adapter")
    assert worst(streamed_logits(source, IDS), theirs) < 1e-5
    assert worst(plain, theirs) > 1e-2, "the adapter changes nothing, so this test shows nothing"
    for name in source.names():
        assert source.load(name).shape == source.shape(name) and source.load(name).dtype == source.dtype(name)
