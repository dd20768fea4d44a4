"""Tiny decoders with random weights, one for each thing that a family's graph has and others have not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_SIZES = {
    "vocab_size": 160, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
_LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75, "original_max_position_embeddings": 16,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5], "long_factor": [2.0, 3.0, 4.0, 5.0, 6.0, 7.0],
}  # fmt: skip
_GEMMA3_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
}
_BOTH_KINDS = ["sliding_attention", "full_attention"]

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama: llama3 RoPE, biases": (
        "llama",
        {"attention_bias": True, "mlp_bias": True, "rope_parameters": _LLAMA3},
    ),
    "llama: tied head, heads wider than the width": ("llama", {"tie_word_embeddings": True, "head_dim": 24}),
    "llama: linear RoPE, a KV head per head": (
        "llama",
        {"num_key_value_heads": 4, "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
    ),
    "qwen2: YaRN": ("qwen2", {"rope_parameters": _YARN}),
    "qwen2: window on later layers": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1, "tie_word_embeddings": True},
    ),
    "qwen3: norms of queries and keys": ("qwen3", {"head_dim": 32}),
    "mistral: window": ("mistral", {"sliding_window": 7}),
    "gemma2: soft caps, window": (
        "gemma2",
        {"head_dim": 32, "query_pre_attn_scalar": 20, "sliding_window": 6, "attn_logit_softcapping": 2.0,
         "final_logit_softcapping": 1.5},
    ),
    "gemma3: two RoPEs, soft cap, window": (
        "gemma3_text",
        {"head_dim": 32, "query_pre_attn_scalar": 20, "sliding_window": 6, "layer_types": _BOTH_KINDS,
         "rope_parameters": _GEMMA3_ROPE, "final_logit_softcapping": 3.0},
    ),
    "phi3: window": ("phi3", {"sliding_window": 9}),
    "phi3: longrope, partial": ("phi3", {"original_max_position_embeddings": 16, "rope_parameters": _LONGROPE}),
    "glm: interleaved": ("glm", {"head_dim": 16, "attention_bias": True}),
    "glm4: interleaved, four norms": ("glm4", {"head_dim": 16, "attention_bias": True}),
    "smollm3: no RoPE on some layers": ("smollm3", {"no_rope_layers": [1, 0]}),
    "smollm3: window where there is no RoPE": (
        "smollm3",
        {"no_rope_layers": [0, 1], "use_sliding_window": True, "sliding_window": 6},
    ),
}  # fmt: skip


def make_decoder(folder: Path, case: str, **changed: Any) -> Any:
    """Writes it as transformers does, and returns transformers' model. Norms and biases are random too: ones and zeros
    would hide what is swapped or left out."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, settings = CASES[case]
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**_SIZES, **settings, **changed})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 1:
                weight.add_(torch.randn_like(weight), alpha=0.2 if "norm" in name else 0.3)
            else:
                weight.mul_(4)
    model.save_pretrained(folder)
    return model
