"""What a decoder is made of, read from config.json: what the ONNX graph is built from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sojourn.config.messages import printable
from sojourn.errors import UserError

if TYPE_CHECKING:
    from sojourn.infer.weight_source import WeightSource

_EMBEDDING, _HEAD = "embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class Family:
    """What config.json does not say. `prefix`: of transformers' class names. `norms`: a layer's, before and after
    attention, before and after the MLP; None where there is none."""

    prefix: str
    norms: tuple[str, str | None, str, str | None] = ("input_layernorm", None, "post_attention_layernorm", None)
    interleaved_rope: bool = False  # pairs are neighbours, instead of halves of a head
    is_gemma: bool = False  # norms scale by 1 + weight, embeddings by the root of their width
    window_on_all_layers: bool = False  # where `sliding_window` is set


_GEMMA_NORMS = (
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm",
)  # fmt: skip
_GLM4_NORMS = ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")

FAMILIES = {
    "llama": Family("Llama"),
    "qwen2": Family("Qwen2"),
    "qwen3": Family("Qwen3"),
    "mistral": Family("Mistral", window_on_all_layers=True),
    "gemma2": Family("Gemma2", norms=_GEMMA_NORMS, is_gemma=True),
    "gemma3_text": Family("Gemma3", norms=_GEMMA_NORMS, is_gemma=True),
    "phi3": Family("Phi3", window_on_all_layers=True),
    "glm": Family("Glm", interleaved_rope=True),
    "glm4": Family("Glm4", norms=_GLM4_NORMS, interleaved_rope=True),
    "smollm3": Family("SmolLM3"),
}
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}


@dataclass(frozen=True)
class Layer:
    """`window`: tokens that a query sees, itself included; None: all. `rope`: a key of the architecture's; None: no
    position embedding."""

    window: int | None
    rope: str | None


@dataclass(frozen=True)
class Architecture:
    """`config`: of transformers, with its defaults filled in. `names`: transformers' name of each weight, by its name
    without what comes before `layers.`."""

    model_type: str
    family: Family
    config: Any
    layers: tuple[Layer, ...]
    names: dict[str, str]
    head_dim: int
    scale: float
    activation: str  # silu, gelu_tanh or gelu
    skipped: tuple[str, ...]  # weights that are no part of the decoder: a vision tower

    @property
    def heads(self) -> int:
        return int(self.config.num_attention_heads)

    @property
    def kv_heads(self) -> int:
        return int(getattr(self.config, "num_key_value_heads", None) or self.heads)

    @property
    def context(self) -> int:
        return int(self.config.max_position_embeddings)


def read_architecture(weights: WeightSource, format: str = "onnx") -> Architecture:
    """Refuses, in a line, what is not described here. `format`: the one that is asked for, to name it."""
    config = read_config(weights.config, format)
    family = FAMILIES[config.model_type]
    if getattr(config, "use_bidirectional_attention", False):
        raise UserError(f"--to {format}: the model attends to later tokens, so it cannot have a KV cache")
    head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    names, skipped = _decoder_names(weights.names())
    scalar = config.query_pre_attn_scalar if family.is_gemma else head_dim
    return Architecture(
        config.model_type, family, config, _layers(config, family), names, head_dim, float(scalar) ** -0.5,
        _activation(config), skipped,
    )  # fmt: skip


def read_config(plain: dict[str, Any], format: str = "onnx") -> Any:
    """transformers' config of the decoder, with its defaults."""
    text = plain.get("text_config")
    if plain.get("model_type") == "gemma3" and isinstance(text, dict):
        plain = {"model_type": "gemma3_text", **text}
    kind = str(plain.get("model_type"))
    if kind not in FAMILIES:
        raise UserError(
            f"--to {format}: not for the family “{printable(kind)}”; there are: {', '.join(FAMILIES)}. "
            "Other formats: --to hf, --to gguf"
        )
    from transformers import CONFIG_MAPPING

    try:
        return CONFIG_MAPPING[kind].from_dict(dict(plain))
    except Exception as error:  # transformers validates with several libraries
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise UserError(f"config.json: transformers refuses it: {reason}") from None


def _layers(config: Any, family: Family) -> tuple[Layer, ...]:
    window = getattr(config, "sliding_window", None)
    count = int(config.num_hidden_layers)
    kinds = list(getattr(config, "layer_types", None) or ["full_attention"] * count)
    if family.window_on_all_layers:
        kinds = ["sliding_attention" if window is not None else "full_attention"] * count
    unknown = next((kind for kind in kinds if kind not in ("full_attention", "sliding_attention")), None)
    if unknown is not None or len(kinds) != count:
        raise UserError(f"config.json: layer_types has {printable(unknown or len(kinds))}, which no graph here has")
    per_kind = any(isinstance(value, dict) for value in (config.rope_parameters or {}).values())
    has_rope = getattr(config, "no_rope_layers", None) or [1] * count  # its entries are 1 where there is RoPE
    return tuple(
        Layer(
            int(window) if kind == "sliding_attention" and window is not None else None,
            (kind if per_kind else "all") if rope else None,
        )
        for kind, rope in zip(kinds, has_rope, strict=True)
    )


def _activation(config: Any) -> str:
    name = str(getattr(config, "hidden_activation", None) or config.hidden_act)
    if name != "gelu" and name not in _ACTIVATIONS:
        raise UserError(f"config.json: the activation “{printable(name)}” is in no graph here")
    return _ACTIVATIONS.get(name, name)


def _decoder_names(names: list[str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """The decoder's, and the others."""
    embedding = next((name for name in names if name.endswith(_EMBEDDING)), None)
    if embedding is None:
        raise UserError(f"no {_EMBEDDING} among the weights")
    prefix = embedding.removesuffix(_EMBEDDING)
    found = {name.removeprefix(prefix): name for name in names if name.startswith(prefix)}
    head = next((name for name in names if name.endswith(_HEAD)), None)
    if head is not None:
        found[_HEAD] = head
    used = set(found.values())
    return found, tuple(name for name in names if name not in used)
