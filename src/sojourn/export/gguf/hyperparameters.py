"""A model's dimensions and RoPE as GGUF metadata, and the tensors that hold RoPE's factors."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from sojourn.errors import UserError
from sojourn.export.gguf.model_config import ModelConfig, sliding_window_period

if TYPE_CHECKING:
    from gguf import GGUFWriter
    from torch import Tensor

_DEFAULT_SWA_PERIOD = 6


def add_hyperparameters(writer: GGUFWriter, config: ModelConfig, vocabulary: int) -> None:
    values, architecture = config.values, config.family.architecture
    heads = int(values["num_attention_heads"])
    writer.add_block_count(config.layers)
    writer.add_context_length(int(values["max_position_embeddings"]))
    writer.add_embedding_length(int(values["hidden_size"]))
    writer.add_feed_forward_length(int(values["intermediate_size"]))
    writer.add_head_count(heads)
    writer.add_head_count_kv(int(values.get("num_key_value_heads") or heads))
    writer.add_layer_norm_rms_eps(float(values["rms_norm_eps"]))
    writer.add_rope_freq_base(float(config.rope["rope_theta"]))
    if values.get("head_dim") and architecture not in ("phi3", "chatglm"):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if architecture in ("llama", "smollm3"):
        writer.add_vocab_size(vocabulary)
    if architecture in ("llama", "smollm3", "phi3", "glm4", "chatglm"):
        writer.add_rope_dimension_count(rotated_dimensions(config))
    if architecture == "gemma3":
        _add_gemma(writer, config)
    if architecture == "phi3":
        writer.add_rope_scaling_orig_ctx_len(original_context(config))
        writer.add_sliding_window(int(values.get("sliding_window") or 0))
    _add_rope_scaling(writer, config)


def rotated_dimensions(config: ModelConfig) -> int:
    return int(config.head_dim * float(config.rope.get("partial_rotary_factor") or 1.0))


def original_context(config: ModelConfig) -> int:
    """The context before RoPE was scaled."""
    found = config.rope.get("original_max_position_embeddings") or config.values.get("original_max_position_embeddings")
    return int(found or config.values["max_position_embeddings"])


def _add_gemma(writer: GGUFWriter, config: ModelConfig) -> None:
    period = sliding_window_period(config)
    if period:
        writer.add_sliding_window(int(config.values["sliding_window"]))
    if period not in (0, _DEFAULT_SWA_PERIOD):
        writer.add_sliding_window_pattern(period)
    if config.local_rope:
        writer.add_rope_freq_base_swa(float(config.local_rope["rope_theta"]))
    if config.values.get("final_logit_softcapping"):
        writer.add_final_logit_softcapping(float(config.values["final_logit_softcapping"]))


def _add_rope_scaling(writer: GGUFWriter, config: ModelConfig) -> None:
    from gguf import RopeScalingType

    rope, kind = config.rope, _scaling_kind(config)
    if kind == "linear":
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(float(rope["factor"]))
    elif kind == "yarn":
        factor = float(rope["factor"])
        writer.add_rope_scaling_type(RopeScalingType.YARN)
        writer.add_rope_scaling_factor(factor)
        writer.add_rope_scaling_orig_ctx_len(original_context(config))
        own = rope.get("attention_factor")
        if own is not None:  # llama.cpp multiplies its own factor by this one
            writer.add_rope_scaling_attn_factors(float(own) / (0.1 * math.log(factor) + 1.0))
        if rope.get("beta_fast") is not None:
            writer.add_rope_scaling_yarn_beta_fast(float(rope["beta_fast"]))
        if rope.get("beta_slow") is not None:
            writer.add_rope_scaling_yarn_beta_slow(float(rope["beta_slow"]))
    elif kind == "longrope":
        writer.add_rope_scaling_attn_factors(_longrope_attention(config))


def _scaling_kind(config: ModelConfig) -> str:
    kind = {"su": "longrope"}.get(str(config.rope.get("rope_type")), str(config.rope.get("rope_type") or "default"))
    name, rope = config.family.model_type, config.rope
    allowed = ["default", "linear", "yarn"]
    if config.family.architecture == "llama":
        allowed.append("llama3")
    if config.family.architecture == "phi3":
        allowed = ["default", "longrope"]
    local = str(config.local_rope.get("rope_type") or "default")
    if kind not in allowed or local != "default":
        which = local if kind in allowed else kind
        raise UserError(
            f"GGUF: llama.cpp has no {name} with RoPE scaling “{which}”, only {', '.join(allowed)}; "
            "export it with --to hf"
        )
    partial = float(rope.get("partial_rotary_factor") or 1.0)
    if partial != 1.0 and config.family.architecture not in ("phi3", "glm4", "chatglm"):
        raise UserError(f"GGUF: llama.cpp has no {name} with partial_rotary_factor={partial}; export it with --to hf")
    unread = [key for key in ("mscale", "mscale_all_dim") if rope.get(key) and kind == "yarn"]
    if unread or (kind == "yarn" and rope.get("truncate") is False):
        key = unread[0] if unread else "truncate=false"
        raise UserError(f"GGUF: llama.cpp has no {name} with YaRN's {key}; export it with --to hf")
    return kind


def rope_tensors(config: ModelConfig) -> dict[str, Tensor]:
    """By llama.cpp's name: what each of RoPE's frequencies is divided by."""
    import torch

    kind = _scaling_kind(config)
    if kind == "llama3":
        return {"rope_freqs.weight": _llama3_factors(config)}
    if kind != "longrope":
        return {}
    factors = {name: config.rope.get(f"{name}_factor") for name in ("long", "short")}
    count = rotated_dimensions(config) // 2
    for name, values in factors.items():
        if not isinstance(values, list) or len(values) != count:
            raise UserError(f"GGUF: config.json: {name}_factor of LongRoPE must be a list of {count} numbers")
    return {f"rope_factors_{name}.weight": torch.tensor(values) for name, values in factors.items()}


def _llama3_factors(config: ModelConfig) -> Tensor:
    """Long wavelengths by `factor`, short ones by 1, those between by something between."""
    import torch

    rope, dimensions = config.rope, config.head_dim
    factor, low, high = float(rope["factor"]), float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    context = original_context(config)
    steps = torch.arange(0, dimensions, 2, dtype=torch.float32) / dimensions
    frequencies = 1.0 / float(rope["rope_theta"]) ** steps
    wavelengths = 2 * math.pi / frequencies
    smooth = (context / wavelengths - low) / (high - low)
    between = 1 / ((1 - smooth) / factor + smooth)
    factors = torch.where(wavelengths > context / low, torch.tensor(factor), between)
    return torch.where(wavelengths < context / high, torch.tensor(1.0), factors).float()


def _longrope_attention(config: ModelConfig) -> float:
    own: Any = config.rope.get("attention_factor")
    if own is not None:
        return float(own)
    context = original_context(config)
    factor = float(config.rope.get("factor") or config.values["max_position_embeddings"] / context)
    return math.sqrt(1 + math.log(factor) / math.log(context)) if factor > 1 else 1.0
