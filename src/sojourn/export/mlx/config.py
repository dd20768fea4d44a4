"""config.json as mlx-lm reads it. Its models take RoPE's settings from the top level, by their older names, and have
silent defaults; a few leave out what transformers has. What cannot be expressed is refused, or said."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sojourn.config.messages import printable
from sojourn.errors import UserError
from sojourn.export.onnx.architecture import Architecture

GROUP = 64  # values that share a scale and a bias
_LONG = ("rope_type", "type", "short_factor", "long_factor", "original_max_position_embeddings")


@dataclass(frozen=True)
class _Model:
    """What mlx-lm's model has of what others have."""

    scaled_rope: bool = True
    window: bool = False
    head_dim: bool = True  # may differ from width / heads
    biases: bool = False
    soft_caps: bool = False
    activation: str = "silu"
    tied: bool = True


_MODELS = {
    "llama": _Model(biases=True),
    "mistral": _Model(),
    "qwen2": _Model(head_dim=False, biases=True),
    "qwen3": _Model(),
    "gemma2": _Model(scaled_rope=False, soft_caps=True, activation="gelu_tanh"),
    "gemma3_text": _Model(window=True, activation="gelu_tanh"),
    "phi3": _Model(head_dim=False),
    "glm4": _Model(scaled_rope=False, biases=True, tied=False),
    "smollm3": _Model(window=True, biases=True),
}


def mlx_config(plain: dict[str, Any], architecture: Architecture, bits: int) -> tuple[dict[str, Any], list[str]]:
    """The contents of config.json, and what the user should know. `bits`: of quantized weights; 0: none are."""
    kind = architecture.model_type
    if kind not in _MODELS or plain.get("model_type") != kind:
        raise UserError(
            f"--to mlx: not for the family “{printable(plain.get('model_type'))}”; there are: {', '.join(_MODELS)}"
        )
    has = _MODELS[kind]
    lacking = next(_lacking(architecture, has), None)
    if lacking is not None:
        raise UserError(f"--to mlx: {lacking}, which mlx-lm's {kind} has not; other formats: --to hf, --to gguf")
    found = {key: value for key, value in plain.items() if key != "rope_parameters"}
    found |= {
        "head_dim": architecture.head_dim,
        "num_key_value_heads": architecture.kv_heads,
        "tie_word_embeddings": "lm_head.weight" not in architecture.names,
        "attention_bias": "layers.0.self_attn.q_proj.bias" in architecture.names,
    }
    found |= _rope(architecture)
    if kind == "gemma3_text":
        found["sliding_window_pattern"] = _pattern(architecture)
    if kind == "smollm3":
        found["no_rope_layers"] = [int(layer.rope is not None) for layer in architecture.layers]
    if bits:
        found["quantization"] = {"group_size": GROUP, "bits": bits, "mode": "affine"}
        found["quantization_config"] = found["quantization"]
    return found, list(_notes(architecture, has))


def _lacking(architecture: Architecture, has: _Model) -> Iterator[str]:
    config, names = architecture.config, architecture.names
    if architecture.activation != has.activation:
        yield f"the activation is {architecture.activation}"
    if not has.head_dim and architecture.head_dim * architecture.heads != config.hidden_size:
        yield f"heads of {architecture.head_dim} do not divide the width of {config.hidden_size}"
    if not has.biases and any(name.endswith("proj.bias") for name in names):
        yield "it has biases"
    if not has.tied and "lm_head.weight" not in names:
        yield "embedding and LM head are one tensor"
    caps = (getattr(config, "final_logit_softcapping", None), getattr(config, "attn_logit_softcapping", None))
    if has.soft_caps and not all(caps):
        yield "it has no soft caps"
    if not has.soft_caps and caps[0]:
        yield "it has a soft cap"
    rope = _main_rope(architecture)
    if not has.scaled_rope and rope["rope_type"] != "default":
        yield f"RoPE is scaled ({rope['rope_type']})"
    if rope["rope_type"] == "yarn" and ("attention_factor" in rope or rope.get("truncate") is False):
        yield "YaRN has an attention factor or no rounding"
    if rope.get("partial_rotary_factor", 1.0) != 1.0 and architecture.model_type not in ("phi3", "glm4"):
        yield "only a part of each head is rotated"
    if has.window and all(layer.window is not None for layer in architecture.layers):
        yield "every layer has a sliding window"
    if architecture.model_type == "gemma3_text" and not _pattern(architecture):
        yield "layers with a sliding window follow no pattern"


def _notes(architecture: Architecture, has: _Model) -> Iterator[str]:
    windows = {layer.window for layer in architecture.layers if layer.window is not None}
    if windows and not has.window and min(windows) < architecture.context:
        yield f"note: mlx-lm ignores the sliding window of {min(windows):,} tokens; longer texts will differ"
    if _main_rope(architecture)["rope_type"] == "longrope":
        original = int(_main_rope(architecture)["original_max_position_embeddings"])
        yield (
            f"note: mlx-lm has one set of longrope's factors, and gets the one for up to {original:,} tokens; "
            "longer texts will differ"
        )


def _main_rope(architecture: Architecture) -> dict[str, Any]:
    parameters: dict[str, Any] = architecture.config.rope_parameters
    found: dict[str, Any] = parameters.get("full_attention", parameters)
    return found


def _rope(architecture: Architecture) -> dict[str, Any]:
    rope = _main_rope(architecture)
    found: dict[str, Any] = {"rope_theta": rope["rope_theta"], "rope_scaling": None}
    found["partial_rotary_factor"] = rope.get("partial_rotary_factor", 1.0)
    local = architecture.config.rope_parameters.get("sliding_attention")
    if local is not None:
        found["rope_local_base_freq"] = local["rope_theta"]
    if rope["rope_type"] == "default":
        return found
    scaling = {key: value for key, value in rope.items() if key not in ("rope_theta", "partial_rotary_factor")}
    scaling["type"] = scaling["rope_type"]
    if rope["rope_type"] == "longrope":
        scaling = {key: scaling[key] for key in _LONG}
        scaling["long_factor"] = scaling["short_factor"]
        found["original_max_position_embeddings"] = scaling["original_max_position_embeddings"]
    return {**found, "rope_scaling": scaling}


def _pattern(architecture: Architecture) -> int:
    """Every how many layers one has no window; 0 where there is no such number."""
    full = [number for number, layer in enumerate(architecture.layers, 1) if layer.window is None]
    regular = list(range(full[0], len(architecture.layers) + 1, full[0])) if full else []
    return full[0] if full and full == regular else 0
