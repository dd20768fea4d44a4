"""transformers' config of a GGUF file, from its metadata alone: what llama.cpp would compute, not what was meant."""

from __future__ import annotations

from typing import Any

from sojourn.errors import UserError
from sojourn.infer.gguf.families import EMBEDDING, FAMILIES, OUTPUT, Family
from sojourn.infer.gguf.file import GgufFile

_SWA_PERIOD = 6  # llama.cpp's default for Gemma 3: every sixth layer attends to everything
_NO_ROPE_PERIOD = 4  # and for SmolLM3: every fourth layer has no RoPE


def family_of(file: GgufFile) -> Family:
    found = next((one for one in FAMILIES.values() if one.architecture == file.architecture), None)
    if found is None:
        raise UserError(f"{file.path}: {file.architecture or 'no architecture'}: not a family that Sojourn reads")
    return found


def config_of(file: GgufFile) -> dict[str, Any]:
    family = family_of(file)
    layers, heads = int(file["{arch}.block_count"]), int(file["{arch}.attention.head_count"])
    hidden = int(file["{arch}.embedding_length"])
    head_dim = int(file["{arch}.attention.key_length"] or hidden // heads)
    config: dict[str, Any] = {
        "model_type": family.model_type,
        "vocab_size": file.tensors[EMBEDDING].shape[0],
        "hidden_size": hidden,
        "intermediate_size": int(file["{arch}.feed_forward_length"]),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": int(file["{arch}.attention.head_count_kv"] or heads),
        "head_dim": head_dim,
        "max_position_embeddings": int(file["{arch}.context_length"]),
        "rms_norm_eps": float(file["{arch}.attention.layer_norm_rms_epsilon"]),
        "tie_word_embeddings": OUTPUT not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        "rope_parameters": _rope(file, head_dim),
        "pad_token_id": None,
    }
    return {**config, **_own(file, layers, head_dim)}


def _own(file: GgufFile, layers: int, head_dim: int) -> dict[str, Any]:
    """What only some families have."""
    if file.architecture == "gemma3":
        window = int(file["{arch}.attention.sliding_window"] or 0)
        period = int(file["{arch}.attention.sliding_window_pattern"] or _SWA_PERIOD) if window else 1
        local = {"rope_type": "default", "rope_theta": float(file["{arch}.rope.freq_base_swa"] or 10_000.0)}
        return {
            "layer_types": [
                "full_attention" if (layer + 1) % period == 0 else "sliding_attention" for layer in range(layers)
            ],
            "sliding_window": window or None,
            "query_pre_attn_scalar": head_dim,
            "final_logit_softcapping": file["{arch}.final_logit_softcapping"],
            "rope_parameters": {"full_attention": _rope(file, head_dim), "sliding_attention": local},
        }
    if file.architecture == "phi3":
        original = int(file["{arch}.rope.scaling.original_context_length"] or file["{arch}.context_length"])
        return {"original_max_position_embeddings": original, "sliding_window": None}
    if file.architecture == "smollm3":
        no_rope = [int((layer + 1) % _NO_ROPE_PERIOD != 0) for layer in range(layers)]
        return {"no_rope_layers": no_rope, "no_rope_layer_interval": _NO_ROPE_PERIOD, "use_sliding_window": False}
    return {"sliding_window": None}


def _rope(file: GgufFile, head_dim: int) -> dict[str, Any]:
    """llama.cpp divides each frequency by a factor where the file has factors, which is what LongRoPE does."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": float(file["{arch}.rope.freq_base"] or 10_000.0)}
    rotated = int(file["{arch}.rope.dimension_count"] or head_dim)
    if rotated != head_dim or file.architecture in ("phi3", "glm4", "chatglm"):
        rope["partial_rotary_factor"] = rotated / head_dim
    kind, factor = file["{arch}.rope.scaling.type"], file["{arch}.rope.scaling.factor"]
    original = file["{arch}.rope.scaling.original_context_length"] or file["{arch}.context_length"]
    attention = float(file["{arch}.rope.scaling.attn_factor"] or 1.0)
    one, two = "rope_factors_short.weight", "rope_factors_long.weight"
    if "rope_freqs.weight" in file.tensors:
        one = two = "rope_freqs.weight"
    if one in file.tensors and two in file.tensors:
        return {
            **rope,
            "rope_type": "longrope",
            "short_factor": file.rows(one).tolist(),
            "long_factor": file.rows(two).tolist(),
            "original_max_position_embeddings": int(original),
            "attention_factor": attention,
        }
    if kind == "linear":
        return {**rope, "rope_type": "linear", "factor": float(factor)}
    if kind == "yarn":
        return {**rope, **_yarn(file, float(factor), int(original), attention)}
    return rope


def _yarn(file: GgufFile, factor: float, original: int, attention: float) -> dict[str, Any]:
    from math import log

    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original,
        "attention_factor": attention * (0.1 * log(factor) + 1.0),
        "beta_fast": float(file["{arch}.rope.scaling.yarn_beta_fast"] or 32.0),
        "beta_slow": float(file["{arch}.rope.scaling.yarn_beta_slow"] or 1.0),
    }
