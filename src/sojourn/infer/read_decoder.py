"""A transformers model as the engine's `Decoder`. What a decoder cannot say is refused (`model_unsupported_reason`):
transformers_forward.py computes such models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from sojourn.estimate.serving import FAMILIES
from sojourn.infer.engine.decoder import AttentionSpec, Decoder, Layer
from sojourn.infer.runtimes.quantized_weights import dequantize_4bit
from sojourn.model.layers import decoder_layers

_ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


def model_unsupported_reason(model: Any) -> str | None:
    """None where the engine computes this model."""
    if model.device.type != "cuda" and any(hasattr(one, "quant_state") for one in model.parameters()):
        return "its weights are quantized, which the engine computes on CUDA only"
    return config_unsupported_reason(model.config.get_text_config())


def config_unsupported_reason(config: Any) -> str | None:
    """The same, as far as its settings tell."""
    if config.model_type not in FAMILIES:
        return f"its architecture is {config.model_type}; the engine computes {', '.join(FAMILIES)}"
    if has_length_dependent_rope(config):
        return "its RoPE depends on the length of the text"
    if getattr(config, "attn_logit_softcapping", None) or getattr(config, "final_logit_softcapping", None):
        return "it caps logits"
    if _activation(config) is None:
        return f"its activation is {getattr(config, 'hidden_act', None)}"
    if getattr(config, "mlp_bias", False):
        return "its MLP has biases"
    quantization = getattr(config, "quantization_config", None)
    if quantization is None:
        return None
    settings = quantization if isinstance(quantization, dict) else quantization.to_dict()
    return None if settings.get("load_in_4bit") else "its weights are quantized"  # bitsandbytes' NF4 and FP4


def _activation(config: Any) -> str | None:
    return _ACTIVATIONS.get(getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None) or "")


def has_length_dependent_rope(config: Any) -> bool:
    """Whether the longest text of a call decides the frequencies of all."""
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = (one.get("rope_type") for one in (rope, *rope.values()) if isinstance(one, dict))
    return any(kind in ("dynamic", "longrope") for kind in kinds)


def is_nf4(weight: Tensor) -> bool:
    """Whether bitsandbytes quantized it to NF4 with its usual blocks; quantizing it again then gives the same."""
    state = getattr(weight, "quant_state", None)
    return state is not None and state.quant_type == "nf4" and state.blocksize == 64


def read_decoder(
    model: Any, pack: Callable[[Tensor], Any], context: int, dtype: torch.dtype | None = None,
    pack_rest: Callable[[Tensor], Any] | None = None,
) -> Decoder:  # fmt: skip
    """`pack` makes a matrix what the backend's `linear` takes. Weights leave the transformers model as they are packed,
    so that memory never holds them twice: the model cannot be used afterwards. `context`: positions of RoPE's tables.
    `dtype`: of activations; None: the model's. `pack_rest`: of matrices that are not in NF4; None: `pack`."""
    config = model.config.get_text_config()
    base = model.base_model
    base = getattr(base, "language_model", base)
    embedding = model.get_input_embeddings()
    dtype, device = dtype or embedding.weight.dtype, embedding.weight.device
    tables = _RopeTables(base.rotary_emb, context, device)
    gemma = config.model_type.startswith("gemma")
    read = _LayerReader(config, tables, pack, pack_rest or pack, dtype)
    layers = [read(module) for module in decoder_layers(model)]
    head = model.get_output_embeddings()
    return Decoder(
        embedding_VD=embedding.weight.detach().to(dtype),
        embedding_scale=float(torch.tensor(config.hidden_size**0.5, dtype=dtype)) if gemma else 1.0,
        layers=layers,
        norm_D=read.norm_weight(base.norm),
        lm_head=read.matrix([head])[0],
        eps=_eps(base.norm),
        activation=_activation(config) or "",
        mlp_size=config.intermediate_size,
        vocab_size=head.weight.shape[0],
        dtype=dtype,
        device=device,
    )


class _LayerReader:
    def __init__(
        self, config: Any, tables: _RopeTables, pack: Callable[[Tensor], Any], pack_rest: Callable[[Tensor], Any],
        dtype: torch.dtype,
    ) -> None:  # fmt: skip
        self._config, self._tables, self._pack, self._pack_rest, self._dtype = config, tables, pack, pack_rest, dtype
        self._is_gemma = config.model_type.startswith("gemma")

    def __call__(self, module: Any) -> Layer:
        attention, mlp, kind = module.self_attn, module.mlp, self._config.model_type
        spec = self._attention_spec(attention)
        # RoPE rotates neighbours in GLM-4: q and k rows in another order make them halves
        order = _halves_from_neighbours(spec, attention.o_proj.weight.device) if kind == "glm4" else None
        qkv, bias = self.matrix(_parts(attention, "qkv_proj", ("q_proj", "k_proj", "v_proj")), order)
        o, o_bias = self.matrix([attention.o_proj])
        post_attention = {"gemma3_text": "post_attention_layernorm", "glm4": "post_self_attn_layernorm"}.get(kind)
        post_mlp = {"gemma3_text": "post_feedforward_layernorm", "glm4": "post_mlp_layernorm"}.get(kind)
        mlp_norm = "pre_feedforward_layernorm" if self._is_gemma else "post_attention_layernorm"
        layer = Layer(
            attention=spec,
            input_norm_D=self.norm_weight(module.input_layernorm),
            qkv=qkv,
            qkv_bias=bias,
            o=o,
            o_bias=o_bias,
            post_attention_norm_D=self.norm_weight(getattr(module, post_attention)) if post_attention else None,
            mlp_norm_D=self.norm_weight(getattr(module, mlp_norm)),
            gate_up=self.matrix(_parts(mlp, "gate_up_proj", ("gate_proj", "up_proj")))[0],
            down=self.matrix([mlp.down_proj])[0],
            post_mlp_norm_D=self.norm_weight(getattr(module, post_mlp)) if post_mlp else None,
            qkv_order=order,
        )
        for parameter in (*attention.parameters(), *mlp.parameters()):
            parameter.data = parameter.data.new_empty(0)
        return layer

    def norm_weight(self, norm: Any) -> Tensor:
        """Gemma's norms multiply by 1 + weight."""
        weight = norm.weight.detach()
        return (1.0 + weight.float()) if self._is_gemma else weight.to(self._dtype)

    def matrix(self, layers: list[Any], order: Tensor | None = None) -> tuple[Any, Tensor | None]:
        """What computes all of these layers, and its bias. `order`: of the outputs."""
        pack = self._pack if all(is_nf4(layer.weight) for layer in layers) else self._pack_rest
        weights = [_weight(layer, self._dtype) for layer in layers]
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        biases = [layer.bias.detach().to(self._dtype) for layer in layers if layer.bias is not None]
        bias = torch.cat(biases) if biases else None
        if order is not None:
            weight, bias = weight[order], None if bias is None else bias[order]
        return pack(weight), bias

    def _attention_spec(self, attention: Any) -> AttentionSpec:
        config = self._config
        window = getattr(attention, "sliding_window", None)
        if config.model_type in ("mistral", "phi3"):
            window = getattr(config, "sliding_window", None)
        cos, sin = self._tables.of(getattr(attention, "layer_type", None))
        rotates = bool(getattr(attention, "use_rope", True))
        norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
        q_norm, k_norm = (None if norm is None else self.norm_weight(norm) for norm in norms)
        return AttentionSpec(
            config.num_attention_heads, config.num_key_value_heads, attention.head_dim, float(attention.scaling),
            window, 2 * cos.shape[1] if rotates else 0, cos if rotates else None, sin if rotates else None,
            q_norm, k_norm, eps=0.0 if norms[0] is None else _eps(norms[0]),
        )  # fmt: skip


def _parts(module: Any, name: str, parts: tuple[str, ...]) -> list[Any]:
    return [getattr(module, one) for one in ((name,) if hasattr(module, name) else parts)]


def _weight(layer: Any, dtype: torch.dtype) -> Tensor:
    weight: Tensor = layer.weight
    if not hasattr(weight, "quant_state"):
        return weight.detach()
    found: Tensor = dequantize_4bit(weight)
    return found if is_nf4(weight) else found.to(dtype)


class _RopeTables:
    """cos and sin by position, from transformers' own module: RoPE's scalings are its business."""

    def __init__(self, rotary: nn.Module, context: int, device: torch.device) -> None:
        self._rotary, self._positions = rotary, torch.arange(context, device=device)[None]
        self._tables: dict[str | None, tuple[Tensor, Tensor]] = {}

    def of(self, layer_type: str | None) -> tuple[Tensor, Tensor]:
        key = layer_type if getattr(self._rotary, "layer_types", None) else None
        if key not in self._tables:
            fp32 = torch.empty(0, dtype=torch.float32, device=self._positions.device)
            args = (fp32, self._positions) if key is None else (fp32, self._positions, key)
            cos, sin = self._rotary(*args)
            half = cos.shape[-1] // 2
            self._tables[key] = (cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous())
        return self._tables[key]


def _halves_from_neighbours(spec: AttentionSpec, device: torch.device) -> Tensor:
    """Rows of q, k and v such that the even ones of a head's rotated part come first."""
    part = torch.arange(spec.rotary_dim)
    head = torch.cat([part[0::2], part[1::2], torch.arange(spec.rotary_dim, spec.head_dim)])
    count = spec.heads + spec.kv_heads
    rotated = (torch.arange(count)[:, None] * spec.head_dim + head).flatten()
    rest = torch.arange(count * spec.head_dim, (count + spec.kv_heads) * spec.head_dim)
    return torch.cat([rotated, rest]).to(device)


def _eps(norm: Any) -> float:
    return float(getattr(norm, "variance_epsilon", None) or norm.eps)
