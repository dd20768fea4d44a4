"""A new model of the Llama architecture, of transformers' own class: whatever loads Llama loads it."""

from __future__ import annotations

import math
from typing import Any

from sojourn.config.schema import ModelConfig
from sojourn.model.quiet import quiet_transformers
from sojourn.resolve.new_model import new_model_spec


def build_model(
    model: ModelConfig, vocab_size: int, max_length: int, pad_id: int, stop_ids: list[int], seed: int
) -> Any:
    """Initial weights depend on `seed` only. Their standard deviation is 0.02 · sqrt(768 / d_model); projections into
    the residual stream are scaled by 1 / sqrt(2 · layers), as in GPT-2."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    quiet_transformers()
    shape = new_model_spec(model, vocab_size)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=max_length,
        rope_theta=model.rope_theta,
        tie_word_embeddings=shape.tied,
        initializer_range=0.02 * math.sqrt(768 / shape.hidden),
        bos_token_id=None,
        eos_token_id=stop_ids,
        pad_token_id=pad_id,
        attention_bias=False,
        mlp_bias=False,
        attn_implementation="sdpa",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        built = LlamaForCausalLM(config)
        with torch.no_grad():
            for name, weight in built.named_parameters():
                if name.endswith(("o_proj.weight", "down_proj.weight")):
                    weight.mul_(1 / math.sqrt(2 * shape.layers))
    return built
