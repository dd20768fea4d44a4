"""Fused forwards of decoder layers: fewer passes over memory than transformers' own.

The classes of RMSNorm, attention, MLP, decoder layer and linear layers are swapped for subclasses with another
`forward`; modules, parameter names and weights stay transformers'. Classes are swapped, not instances patched, so that
compiled layers are alike and share one graph. Only training, where a `Layout` is given, uses them; generation does not.

Everything is computed in the dtype of the hidden states: fp32 master weights are cast to bf16 per matmul, and autocast
is off. fp16 and DoRA are left to autocast. On a GPU, q, k and v of trained weights come from one matmul and are split
and rotated (RoPE) by one kernel; gate and up come from one matmul followed by one SwiGLU kernel.

To add a model family: add its `model_type` and class prefix to catalog/fused_families.py. That is all where
- its classes are called prefix + RMSNorm, Attention, MLP, DecoderLayer, with Llama's attribute names, or Phi-3's
  `qkv_proj` and `gate_up_proj`;
- its layers are `x + attention(norm(x))`, then `x + mlp(norm(x))`, without multipliers on the residual stream; what
  attention and MLP give may be normalized again (`attention_block`, `mlp_block`), but has no dropout;
- RMSNorm multiplies by `weight`, or by `1 + weight` if the class is in `_ONE_PLUS_WEIGHT`; the MLP is SwiGLU or GeGLU;
- RoPE is over whole heads or their first dimensions, in halves as Llama's, or interleaved if the family is in
  `_INTERLEAVED_ROPE` of qkv_rope.py; layers may have none; `q_norm` and `k_norm`, if any, are per head.
What differs needs code here. Hopper and CPU kernels take layers like Llama's only. Tests compare every family of the
list with transformers (test_methods.py, test_prune_last_layer.py, test_hopper.py), and parity_check.py every opened
model. Plans have tables of families in resolve/config_json.py (biases, norms, sliding windows).

Shapes as in attention.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sojourn.catalog.fused_families import FUSED_FAMILIES, FUSED_MIXTURES
from sojourn.model.attention import AttentionParams, attend, uses_flash_attention_4
from sojourn.model.kernels import fp8, hopper
from sojourn.model.kernels.cpu.blocked_layer import fits_blocked_layer
from sojourn.model.kernels.cpu.decoder import decoder_on_cpu
from sojourn.model.kernels.cpu.decoder_layer import fits_attention_kernel, layer_on_cpu, rms_norm
from sojourn.model.kernels.cpu.library import DecoderInputs, DecoderSettings, cpu_kernels_take
from sojourn.model.kernels.gated_activations import GATED, gated_halves, swiglu
from sojourn.model.kernels.kept_weights import KEEPS_WEIGHT, keep
from sojourn.model.kernels.linear_layers import (
    apply_nf4_linear,
    are_plain_lora,
    can_concatenate,
    concatenate,
    linear,
    linear_with_adapter,
    lora_group,
)  # fmt: skip
from sojourn.model.kernels.lora_linear import lora_swiglu_mlp
from sojourn.model.kernels.qkv_rope import fits_qkv_kernels, head_counts, qkv_layers, qkv_rope
from sojourn.model.kernels.triton_support import fused, supports_triton
from sojourn.model.layers import decoder_layers, swap_forward
from sojourn.model.layout import Layout

MOST_PRUNED = 0.75  # target tokens of all; with more, a layer that is one function is faster for all tokens
_PLAIN_ARGUMENTS = {"position_ids", "use_cache", "layout", "target_indices_N"}
_MIN_FP8_SIZE = 256  # features; smaller layers (adapters) gain nothing
_ONE_PLUS_WEIGHT = ("Gemma3",)  # class prefixes
_ONE_WINDOW = ("mistral", "mixtral", "phi3")  # of config.sliding_window; elsewhere a layer knows its own


def apply_fused_forwards(model: nn.Module) -> None:
    family = model.config.get_text_config().model_type
    prefix = (FUSED_FAMILIES | FUSED_MIXTURES)[family]
    forwards: dict[str, Any] = {
        f"{prefix}RMSNorm": _rms_norm_one_plus_weight if prefix in _ONE_PLUS_WEIGHT else _rms_norm,
        f"{prefix}Attention": _attention,
        f"{prefix}MLP": _mlp,
    }
    if family in FUSED_FAMILIES:
        forwards[f"{prefix}DecoderLayer"] = _decoder_layer
    if family == "llama":
        forwards["LlamaModel"] = _decoder
    switches = {"use_triton": supports_triton(), "cpu_kernels": False, "fits_cpu_layer": None, "skips_output": False}
    switches |= {"cpu_decoder": None}
    for module in model.modules():
        if (forward := forwards.get(type(module).__name__)) is not None:
            swap_forward(module, forward, **switches, **KEEPS_WEIGHT)
    for decoder_layer in decoder_layers(model):
        if family in FUSED_FAMILIES:
            decoder_layer.blocks = (attention_block, mlp_block)
        for layer in decoder_layer.modules():
            if type(layer) is nn.Linear:
                swap_forward(layer, linear, linear_fn=F.linear)
            elif type(layer).__module__.startswith("peft.tuners.lora") and hasattr(layer, "base_layer"):
                swap_forward(layer, linear_with_adapter)
    apply_nf4_linear(model)


def apply_fp8(model: nn.Module, mode: str) -> None:
    """Linear layers of fused decoder layers compute in FP8 from now on. `on`: all, and a trained LM head;
    `except_last_layer`: neither the last decoder layer nor the LM head, which cause half of the loss difference;
    `backward`: the backward of decoder layers only."""
    fp8.smoke_test(next(model.parameters()).device)
    linear_fn = fp8.fp8_backward_linear if mode == "backward" else fp8.fp8_linear
    for decoder_layer in decoder_layers(model)[: -1 if mode == "except_last_layer" else None]:
        for layer in decoder_layer.modules():
            large = getattr(layer, "linear_fn", None) is F.linear and min(layer.weight.shape) >= _MIN_FP8_SIZE
            if large and fp8.supports_layer(layer):
                swap_forward(layer, linear, linear_fn=linear_fn)
    lm_head = model.get_output_embeddings()
    trained = type(lm_head) is nn.Linear and lm_head.weight.requires_grad and lm_head.bias is None
    if mode == "on" and trained and fp8.supports_layer(lm_head):
        lm_head.fp8 = True


def _rms_norm(self: Any, hidden_states: Tensor) -> Tensor:
    weight = self.weight.to(hidden_states.dtype)
    if self.cpu_kernels and cpu_kernels_take(hidden_states, weight):
        return rms_norm(hidden_states, weight, self.variance_epsilon)
    return F.rms_norm(hidden_states, weight.shape, weight, self.variance_epsilon)


def _rms_norm_one_plus_weight(self: Any, x: Tensor) -> Tensor:
    flat = x.flatten(0, -2)  # of tokens or of their heads: compiled once for both
    return fused(_one_plus_weight_norm(self.eps), x)(flat, self.weight).view_as(x)


@cache
def _one_plus_weight_norm(eps: float) -> Callable[[Tensor, Tensor], Tensor]:
    def norm(x: Tensor, weight: Tensor) -> Tensor:
        """In fp32, as transformers: 1 + weight in bf16 would be another number."""
        return F.rms_norm(x.float(), weight.shape, 1.0 + weight.float(), eps).to(x.dtype)

    return norm


def _mlp(self: Any, x: Tensor) -> Tensor:
    gated = GATED.get(_activation(self.config))
    if gated is None:
        return self.original_forward(x)
    layers = (self.gate_up_proj,) if hasattr(self, "gate_up_proj") else (self.gate_proj, self.up_proj)
    on_gpu = self.use_triton and x.device.type == "cuda"
    takes_lora = gated is swiglu and len(layers) == 2 and (on_gpu or not x.is_cuda)
    if takes_lora and are_plain_lora((*layers, self.down_proj), x):
        gate_up, down = keep(self, lambda: [lora_group(group, x.dtype) for group in (layers, (self.down_proj,))])
        return lora_swiglu_mlp(x, gate_up, down, self.skips_output)
    if on_gpu and can_concatenate(layers):
        linear_fn = layers[0].linear_fn
        weight, bias = concatenate(layers, x)
        all_fp8 = gated is swiglu and linear_fn is not F.linear and can_concatenate((*layers, self.down_proj))
        if all_fp8 and bias is None and self.down_proj.bias is None:
            down = self.down_proj.weight.to(x.dtype)
            out = fp8.swiglu_mlp(x, weight, down, forward=linear_fn is fp8.fp8_linear)
            if out is not None:
                return out
        return self.down_proj(gated_halves(gated, linear_fn(x, weight, bias), on_gpu))
    if len(layers) == 1:
        return self.down_proj(gated_halves(gated, layers[0](x), on_gpu))
    gate, up = (layer(x) for layer in layers)
    return self.down_proj(fused(gated, x)(gate, up))


def _activation(config: Any) -> str:
    return str(getattr(config, "hidden_activation", None) or config.hidden_act)


def _attention(self: Any, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], **kwargs: Any) -> Any:
    layout = kwargs.get("layout")
    if layout is None or kwargs.get("past_key_values") is not None or not getattr(self, "is_causal", True):
        return self.original_forward(hidden_states, position_embeddings, **kwargs)
    return self.o_proj(_attend(self, hidden_states, position_embeddings, layout)), None


def _attention_params(self: Any) -> AttentionParams:
    default_window = self.config.sliding_window if self.config.model_type in _ONE_WINDOW else None
    window = getattr(self, "sliding_window", default_window)
    return AttentionParams(self.scaling, window, None, self.attention_dropout if self.training else 0.0)


def _attend(self: Any, x: Tensor, position_embeddings: tuple[Tensor, Tensor], layout: Layout) -> Tensor:
    """The outputs of all heads, side by side, before o_proj."""
    params, layers = _attention_params(self), qkv_layers(self)
    fits = fits_qkv_kernels(self, position_embeddings) and can_concatenate(layers, F.linear)
    if fits and uses_flash_attention_4(x, layout, params):
        qkv = concatenate(layers, x)
        return hopper.qkv_rope_attention(x, *qkv, *position_embeddings, *head_counts(self), self.scaling)[0]
    return attend(*qkv_rope(self, x, position_embeddings), layout, params).flatten(2)


def _decoder_layer(self: Any, hidden_states: Tensor, **kwargs: Any) -> Tensor:
    """With quack's GEMMs (hopper.py) or as one function on a CPU where these can be used, else transformers' own."""
    layout: Any = kwargs.get("layout")
    if uses_cpu_layer(self, hidden_states, kwargs):
        return _decoder_layer_on_cpu(self, hidden_states, kwargs["position_embeddings"], layout)
    attention, mlp = self.self_attn, self.mlp
    layers = (attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj) if _is_like_llama(self) else ()
    usable = (
        hopper.HopperKernels.gemm
        and layers
        and hidden_states.dtype == torch.bfloat16
        and not getattr(self, "selective_checkpointing", False)  # would not recognize these GEMMs
        and layout is not None
        and kwargs.get("past_key_values") is None
        and can_concatenate(layers, F.linear)
        and all(hopper.supports_layer(layer) for layer in layers)
    )
    if not usable:
        return self.original_forward(hidden_states, **kwargs)
    attended = _attend(attention, self.input_layernorm(hidden_states), kwargs["position_embeddings"], layout)
    norm, (o_proj, gate, up, down) = self.post_attention_layernorm, (layer.weight for layer in layers)
    gate_up = torch.stack([gate * norm.weight, up * norm.weight], 1).flatten(0, 1)
    weights = (weight.to(torch.bfloat16) for weight in (o_proj, gate_up, down))
    flat = (hidden_states.flatten(0, 1), attended.flatten(0, 1))
    return hopper.o_proj_mlp(*flat, *weights, norm.variance_epsilon)[0].view_as(hidden_states)


def _decoder(self: Any, input_ids: Tensor | None = None, **kwargs: Any) -> Any:
    """As one function on a CPU where it is narrow and trained for most tokens, else transformers' own."""
    layout, targets = kwargs.get("layout"), kwargs.get("target_indices_N")
    is_plain = self.cpu_kernels and layout is not None and kwargs.keys() <= _PLAIN_ARGUMENTS
    if not is_plain or input_ids is None or targets is None or len(targets) <= MOST_PRUNED * input_ids.numel():
        return self.original_forward(input_ids, **kwargs)
    if self.cpu_decoder is None:
        self.cpu_decoder = CpuDecoder.of(self)
    hidden = self.cpu_decoder and self.cpu_decoder(input_ids, kwargs["position_ids"], targets, layout)
    if not isinstance(hidden, Tensor):
        return self.original_forward(input_ids, **kwargs)
    return SimpleNamespace(last_hidden_state=hidden[None])


@dataclass
class CpuDecoder:
    """A decoder like Llama's that is one function on a CPU. `parameters`: of the modules that have weights, as
    decoder_on_cpu has them; `angles`: RoPE's cosines and sines by position."""

    rotary_emb: nn.Module
    parameters: list[dict[str, Any]]
    settings: DecoderSettings
    attention: AttentionParams
    angles: tuple[Tensor, ...] = ()

    @classmethod
    def of(cls, decoder: Any) -> CpuDecoder | Literal[False]:
        embedding, layers, rotary_emb = decoder.embed_tokens, list(decoder.layers), decoder.rotary_emb
        rotation = rotary_emb(embedding.weight, torch.zeros(1, 1, dtype=torch.long))
        is_plain = type(embedding) is nn.Embedding and embedding.max_norm is None and not embedding.scale_grad_by_freq
        is_plain = is_plain and not layers[0].self_attn.attention_dropout
        if not (is_plain and rotary_emb.rope_type == "default" and cpu_kernels_take(embedding.weight)):
            return False
        if not all(_fits_cpu_layer(layer, rotation) and fits_blocked_layer(_layer_weights(layer)) for layer in layers):
            return False
        attention, padding = _attention_params(layers[0].self_attn), embedding.padding_idx
        modules = [embedding, decoder.norm, *(module for layer in layers for module in _modules_with_weights(layer))]
        norms = [norm for layer in layers for norm in (layer.input_layernorm, layer.post_attention_layernorm)]
        eps = tuple(norm.variance_epsilon for norm in (*norms, decoder.norm))
        settings = DecoderSettings(
            attention.scale, layers[0].self_attn.head_dim, eps, -1 if padding is None else padding
        )  # fmt: skip
        return cls(rotary_emb, [module._parameters for module in modules], settings, attention)

    def __call__(self, ids_BT: Tensor, positions_BT: Tensor, targets_N: Tensor, layout: Layout) -> Tensor | None:
        """The target tokens' hidden states (ND); None where attention is not the kernel's."""
        weights = [parameters["weight"] for parameters in self.parameters]
        if not (fits_attention_kernel(layout, self.attention) and cpu_kernels_take(ids_BT, targets_N, weights[0])):
            return None
        width = ids_BT.shape[1]
        if not self.angles or len(self.angles[0]) < width:
            tables = self.rotary_emb(weights[0], torch.arange(width)[None])
            self.angles = tuple(table[0].contiguous() for table in tables)
        cos, sin = (table.index_select(0, positions_BT.view(-1)) for table in self.angles)
        return decoder_on_cpu(DecoderInputs(ids_BT, targets_N, cos, sin, layout), self.settings, weights)


def attention_block(layer: Any, x: Tensor, **kwargs: Any) -> Tensor:
    """The first half of a decoder layer: x + attention(norm(x))."""
    attended, _ = layer.self_attn(hidden_states=layer.input_layernorm(x), **kwargs)
    return x + _around_mlp(layer)[0](attended)


def mlp_block(layer: Any, h: Tensor) -> Tensor:
    """The second half, token by token: h + mlp(norm(h))."""
    _, before, after = _around_mlp(layer)
    return h + after(layer.mlp(before(h)))


def normalizes_mlp_output(layer: Any) -> bool:
    return isinstance(getattr(_around_mlp(layer)[2], "weight", None), Tensor)


def _around_mlp(layer: Any) -> tuple[Any, Any, Any]:
    """What follows attention, and what precedes and follows the MLP."""
    if hasattr(layer, "pre_feedforward_layernorm"):  # Gemma 3
        return layer.post_attention_layernorm, layer.pre_feedforward_layernorm, layer.post_feedforward_layernorm
    if hasattr(layer, "post_mlp_layernorm"):  # GLM-4
        return layer.post_self_attn_layernorm, layer.post_attention_layernorm, layer.post_mlp_layernorm
    dropouts = (getattr(layer, f"resid_{part}_dropout", _identity) for part in ("attn", "mlp"))  # Phi-3
    after_attention, after_mlp = dropouts
    return after_attention, layer.post_attention_layernorm, after_mlp


def _identity(x: Tensor) -> Tensor:
    return x


def _is_like_llama(layer: Any) -> bool:
    """As Hopper and CPU kernels have it: two norms, gate and up apart, SwiGLU."""
    after_attention, _, after_mlp = _around_mlp(layer)
    return (
        after_attention is after_mlp is _identity
        and hasattr(layer.mlp, "gate_proj")
        and _activation(layer.mlp.config) == "silu"
    )


def uses_cpu_layer(self: Any, hidden_states: Tensor, kwargs: dict[str, Any]) -> bool:
    """Whether the whole layer is one function of kernels/cpu/."""
    if not (getattr(self, "cpu_kernels", False) and cpu_kernels_take(hidden_states)):
        return False
    if self.fits_cpu_layer is None:
        self.fits_cpu_layer = _fits_cpu_layer(self, kwargs["position_embeddings"])
    return self.fits_cpu_layer and kwargs.get("layout") is not None and kwargs.get("past_key_values") is None


def _fits_cpu_layer(self: Any, position_embeddings: tuple[Tensor, Tensor]) -> bool:
    if not (_is_like_llama(self) and fits_qkv_kernels(self.self_attn, position_embeddings)):
        return False
    layers = _linear_layers(self)
    return (
        not getattr(self, "selective_checkpointing", False)  # stores what the kernels overwrite
        and can_concatenate(layers, F.linear)
        and all(layer.bias is None and cpu_kernels_take(layer.weight) for layer in layers)
    )


def _linear_layers(self: Any) -> tuple[nn.Module, ...]:
    attention, mlp = self.self_attn, self.mlp
    projections = (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
    return *projections, mlp.gate_proj, mlp.up_proj, mlp.down_proj


def _decoder_layer_on_cpu(self: Any, x: Tensor, position_embeddings: tuple[Tensor, Tensor], layout: Layout) -> Tensor:
    norms, params = (self.input_layernorm, self.post_attention_layernorm), _attention_params(self.self_attn)
    eps, weights = (norms[0].variance_epsilon, norms[1].variance_epsilon), _layer_weights(self)
    return layer_on_cpu(x, position_embeddings, layout, params, self.self_attn.head_dim, eps, weights)


def _layer_weights(self: Any) -> tuple[Tensor, ...]:
    """As layer_on_cpu has them."""
    return tuple(module.weight for module in _modules_with_weights(self))


def _modules_with_weights(self: Any) -> list[Any]:
    linear = _linear_layers(self)
    return [self.input_layernorm, *linear[:4], self.post_attention_layernorm, *linear[4:]]
