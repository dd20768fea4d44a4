"""The config of a model whose weights become a GGUF file, with transformers' defaults filled in; refuses what llama.cpp
would compute otherwise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sojourn.config.messages import printable
from sojourn.errors import UserError
from sojourn.infer.gguf.families import FAMILIES, Family

_ELSEWHERE = "export it with --to hf"
_TEXT_OF = {"gemma3": "gemma3_text"}  # with a vision part, which GGUF files leave out
_ACTIVATIONS = {"gemma3_text": ("gelu_pytorch_tanh",)}
_GEMMA_27B_LAYERS, _SMOLLM3_PERIOD = 62, 4


@dataclass(frozen=True)
class ModelConfig:
    """`values`: config.json of the text model. `plain`: as the file has it, without defaults."""

    family: Family
    values: dict[str, Any]
    plain: dict[str, Any]

    @property
    def head_dim(self) -> int:
        return int(self.values.get("head_dim") or self.values["hidden_size"] // self.values["num_attention_heads"])

    @property
    def layers(self) -> int:
        return int(self.values["num_hidden_layers"])

    @property
    def rope(self) -> dict[str, Any]:
        """rope_parameters of the layers that attend to everything."""
        found = self.values.get("rope_parameters") or {}
        return dict(found.get("full_attention") or found)

    @property
    def local_rope(self) -> dict[str, Any]:
        """Of the layers with a sliding window; empty where they have the same."""
        return dict((self.values.get("rope_parameters") or {}).get("sliding_attention") or {})


def read_config(plain: dict[str, Any]) -> ModelConfig:
    from transformers import CONFIG_MAPPING

    kind = str(plain.get("model_type", ""))
    text = plain.get("text_config") if kind in _TEXT_OF else plain
    kind = _TEXT_OF.get(kind, kind)
    if kind not in FAMILIES or not isinstance(text, dict):
        raise UserError(
            f"GGUF: Sojourn does not write models of type “{printable(kind)}”; it writes {', '.join(FAMILIES)}; "
            f"{_ELSEWHERE}, and convert that folder with llama.cpp's own converter"
        )
    if plain.get("quantization_config"):
        raise UserError("GGUF: this model's weights are quantized already; export the 16-bit model it was made from")
    try:
        values = CONFIG_MAPPING[kind].from_dict({**text, "model_type": kind}).to_dict()
    except Exception as error:  # transformers checks values in many ways
        raise UserError(f"GGUF: config.json: {' '.join(str(error).split())[:200]}") from None
    config = ModelConfig(FAMILIES[kind], values, plain)
    _check(config)
    return config


def _check(config: ModelConfig) -> None:
    values, kind = config.values, config.family.model_type
    activation = str(values.get("hidden_act") or values.get("hidden_activation"))
    if activation not in _ACTIVATIONS.get(kind, ("silu", "swish")):
        raise _differs(kind, f"the activation {activation}")
    if not config.family.free_head_dim and config.head_dim * values["num_attention_heads"] != values["hidden_size"]:
        raise _differs(
            kind, f"heads of {config.head_dim} that do not add up to the hidden size {values['hidden_size']}"
        )
    if kind == "gemma3_text":
        _check_gemma(config)
    layers = range(config.layers)
    no_rope = values.get("no_rope_layers")
    if no_rope is not None and [bool(use) for use in no_rope] != [(n + 1) % _SMOLLM3_PERIOD != 0 for n in layers]:
        raise _differs(kind, "RoPE left out of other layers than every fourth")


def _check_gemma(config: ModelConfig) -> None:
    values, kind = config.values, config.family.model_type
    large = config.layers == _GEMMA_27B_LAYERS
    scalar = values["hidden_size"] // values["num_attention_heads"] if large else config.head_dim
    if float(values["query_pre_attn_scalar"]) != float(scalar):
        raise _differs(kind, f"query_pre_attn_scalar={values['query_pre_attn_scalar']}, not {scalar}")
    if values.get("attn_logit_softcapping"):
        raise _differs(kind, "attn_logit_softcapping")
    if values.get("use_bidirectional_attention"):
        raise _differs(kind, "use_bidirectional_attention")
    sliding_window_period(config)


def sliding_window_period(config: ModelConfig) -> int:
    """Every how many layers one attends to everything; 0 where all do."""
    types = list(config.values.get("layer_types") or [])
    if "sliding_attention" not in types:
        return 0
    full = [number + 1 for number, one in enumerate(types) if one == "full_attention"]
    period = full[0] if full else 0
    regular = period or int(config.values.get("_sliding_window_pattern") or len(types) + 1)
    if [(number + 1) % regular != 0 for number in range(len(types))] != [one == "sliding_attention" for one in types]:
        raise _differs(config.family.model_type, "sliding windows in an irregular pattern of layers")
    return regular


def unsupported_window(config: ModelConfig) -> str | None:
    """A line about a sliding window that llama.cpp does not have for this family."""
    values = config.values
    window = values.get("sliding_window")
    used = values.get("use_sliding_window", True) and config.family.model_type != "gemma3_text"
    if not window or not used or int(window) >= int(values["max_position_embeddings"]):
        return None
    return (
        f"note: llama.cpp has no sliding window for {config.family.model_type}: texts of more than {int(window):,} "
        "tokens get other results there"
    )


def _differs(kind: str, what: str) -> UserError:
    return UserError(f"GGUF: llama.cpp has no {kind} with {what}; {_ELSEWHERE}")
