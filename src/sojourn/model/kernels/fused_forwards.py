"""Fused forwards of decoder layers: fewer passes over memory than transformers' own.

The classes of RMSNorm, attention, MLP, decoder layer and linear layers are swapped for subclasses with another
`forward`; modules, parameter names and weights stay transformers'. Classes are swapped, not instances patched, so that
compiled layers are alike and share one graph. Only training, where a `Layout` is given, uses them; generation does not.

Everything is computed in the dtype of the hidden states: fp32 master weights are cast to bf16 per matmul, and autocast
is off. fp16 and DoRA are left to autocast. On a GPU, q, k and v of trained weights come from one matmul and are split
and rotated (RoPE) by one kernel; gate and up come from one matmul followed by one SwiGLU kernel.

To add a model family: add its `model_type` and class prefix to catalog/fused_families.py. That is all where
- its classes are called prefix + RMSNorm, Attention, MLP, DecoderLayer, with Llama's attribute names;
- its layers are `x + attention(norm(x))`, then `x + mlp(norm(x))`, without multipliers, further norms or dropout on the
  residual stream (prune_last_layer.py and the Hopper kernels compute this themselves);
- RMSNorm multiplies by `weight`, not by `1 + weight`; the MLP is SwiGLU;
- every layer has RoPE over whole heads, in halves as Llama's; `q_norm` and `k_norm`, if any, are per head.
What differs needs code here. Tests compare every family of the list with transformers (test_methods.py,
test_prune_last_layer.py, test_hopper.py), and parity_check.py every opened model. Plans have tables of families in
resolve/model_spec.py (biases, norms, sliding windows).

Shapes as in attention.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sojourn.catalog.fused_families import FUSED_FAMILIES, FUSED_MIXTURES
from sojourn.model.attention import AttentionParams, attend, uses_flash_attention_4
from sojourn.model.kernels import fp8, hopper
from sojourn.model.kernels.cpu.decoder_layer import layer_on_cpu, rms_norm
from sojourn.model.kernels.cpu.library import cpu_kernels_take
from sojourn.model.kernels.nf4 import nf4_linear
from sojourn.model.kernels.triton_support import fused, supports_triton
from sojourn.model.layers import decoder_layers, swap_forward
from sojourn.model.layout import Layout

_MIN_FP8_SIZE = 256  # features; smaller layers (adapters) gain nothing


def apply_fused_forwards(model: nn.Module) -> None:
    family = model.config.get_text_config().model_type
    prefix = (FUSED_FAMILIES | FUSED_MIXTURES)[family]
    forwards: dict[str, Any] = {
        f"{prefix}RMSNorm": _rms_norm,
        f"{prefix}Attention": _attention,
        f"{prefix}MLP": _mlp,
    }
    if family in FUSED_FAMILIES:
        forwards[f"{prefix}DecoderLayer"] = _decoder_layer
    for module in model.modules():
        if (forward := forwards.get(type(module).__name__)) is not None:
            swap_forward(module, forward, use_triton=supports_triton(), cpu_kernels=False, fits_cpu_layer=None)
    for decoder_layer in decoder_layers(model):
        for layer in decoder_layer.modules():
            if type(layer) is nn.Linear:
                swap_forward(layer, _linear, linear_fn=F.linear)
    apply_nf4_linear(model)


def apply_nf4_linear(model: nn.Module) -> None:
    """For any family: torch.compile cannot look into bitsandbytes' own layers, and around what it cannot look into,
    activation checkpointing stores everything."""
    for decoder_layer in decoder_layers(model):
        for layer in decoder_layer.modules():
            if type(layer).__name__ == "Linear4bit" and hasattr(layer, "quant_state"):  # of bitsandbytes
                swap_forward(layer, _linear_nf4)


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
                swap_forward(layer, _linear, linear_fn=linear_fn)
    lm_head = model.get_output_embeddings()
    trained = type(lm_head) is nn.Linear and lm_head.weight.requires_grad and lm_head.bias is None
    if mode == "on" and trained and fp8.supports_layer(lm_head):
        lm_head.fp8 = True


def _linear(self: Any, x: Tensor) -> Tensor:
    return self.linear_fn(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))


def _linear_nf4(self: Any, x: Tensor) -> Tensor:
    state = getattr(self.weight, "quant_state", None) or self.quant_state  # FSDP's parameters lose it
    if x.device.type != "cuda" or state is None or state.quant_type != "nf4":
        return self.original_forward(x)
    compute_dtype = self.compute_dtype or x.dtype
    return nf4_linear(x.to(compute_dtype), self.weight, state, self.bias).to(x.dtype)


def _rms_norm(self: Any, hidden_states: Tensor) -> Tensor:
    weight = self.weight.to(hidden_states.dtype)
    if self.cpu_kernels and cpu_kernels_take(hidden_states, weight):
        return rms_norm(hidden_states, weight, self.variance_epsilon)
    return F.rms_norm(hidden_states, weight.shape, weight, self.variance_epsilon)


def _mlp(self: Any, x: Tensor) -> Tensor:
    if self.config.hidden_act != "silu":
        return self.original_forward(x)
    layers = (self.gate_proj, self.up_proj)
    if self.use_triton and x.device.type == "cuda" and _can_concatenate(layers):
        from sojourn.model.kernels.swiglu import swiglu

        linear_fn = layers[0].linear_fn
        weight, bias = _concatenate(layers, x)
        all_fp8 = linear_fn is not F.linear and _can_concatenate((*layers, self.down_proj))
        if all_fp8 and bias is None and self.down_proj.bias is None:
            down = self.down_proj.weight.to(x.dtype)
            out = fp8.swiglu_mlp(x, weight, down, forward=linear_fn is fp8.fp8_linear)
            if out is not None:
                return out
        return self.down_proj(swiglu(linear_fn(x, weight, bias)))
    gate, up = self.gate_proj(x), self.up_proj(x)
    return self.down_proj(fused(_swiglu, x)(gate, up))


def _attention(self: Any, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], **kwargs: Any) -> Any:
    layout = kwargs.get("layout")
    if layout is None or kwargs.get("past_key_values") is not None:
        return self.original_forward(hidden_states, position_embeddings, **kwargs)
    return self.o_proj(_attend(self, hidden_states, position_embeddings, layout)), None


def _attention_params(self: Any) -> AttentionParams:
    # Qwen's attention layers have the attribute, Mistral and Mixtral have one window for all layers, Llama none.
    default_window = self.config.sliding_window if self.config.model_type in ("mistral", "mixtral") else None
    window = getattr(self, "sliding_window", default_window)
    return AttentionParams(self.scaling, window, None, self.attention_dropout if self.training else 0.0)


def _attend(self: Any, x: Tensor, position_embeddings: tuple[Tensor, Tensor], layout: Layout) -> Tensor:
    """The outputs of all heads, side by side, before o_proj."""
    params = _attention_params(self)
    layers = (self.q_proj, self.k_proj, self.v_proj)
    if uses_flash_attention_4(x, layout, params) and _can_concatenate(layers, F.linear) and not hasattr(self, "q_norm"):
        qkv = _concatenate(layers, x)
        return hopper.qkv_rope_attention(x, *qkv, *position_embeddings, *_head_counts(self), self.scaling)[0]
    return attend(*_qkv_rope(self, x, position_embeddings), layout, params).flatten(2)


def _decoder_layer(self: Any, hidden_states: Tensor, **kwargs: Any) -> Tensor:
    """With quack's GEMMs (hopper.py) or as one function on a CPU where these can be used, else transformers' own."""
    layout: Any = kwargs.get("layout")
    if uses_cpu_layer(self, hidden_states, kwargs):
        return _decoder_layer_on_cpu(self, hidden_states, kwargs["position_embeddings"], layout)
    attention, mlp = self.self_attn, self.mlp
    layers = (attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    usable = (
        hopper.HopperKernels.gemm
        and hidden_states.dtype == torch.bfloat16
        and not getattr(self, "selective_checkpointing", False)  # would not recognize these GEMMs
        and layout is not None
        and kwargs.get("past_key_values") is None
        and mlp.config.hidden_act == "silu"
        and _can_concatenate(layers, F.linear)
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


def uses_cpu_layer(self: Any, hidden_states: Tensor, kwargs: dict[str, Any]) -> bool:
    """Whether the whole layer is one function of kernels/cpu/."""
    if not (getattr(self, "cpu_kernels", False) and cpu_kernels_take(hidden_states)):
        return False
    if self.fits_cpu_layer is None:
        self.fits_cpu_layer = _fits_cpu_layer(self)
    return self.fits_cpu_layer and kwargs.get("layout") is not None and kwargs.get("past_key_values") is None


def _fits_cpu_layer(self: Any) -> bool:
    attention, layers = self.self_attn, _linear_layers(self)
    return (
        not getattr(self, "selective_checkpointing", False)  # stores what the kernels overwrite
        and attention.config.hidden_act == "silu"
        and not hasattr(attention, "q_norm")
        and _can_concatenate(layers, F.linear)
        and all(layer.bias is None and cpu_kernels_take(layer.weight) for layer in layers)
    )


def _linear_layers(self: Any) -> tuple[nn.Module, ...]:
    attention, mlp = self.self_attn, self.mlp
    projections = (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
    return *projections, mlp.gate_proj, mlp.up_proj, mlp.down_proj


def _decoder_layer_on_cpu(self: Any, x: Tensor, position_embeddings: tuple[Tensor, Tensor], layout: Layout) -> Tensor:
    norms, weights = (self.input_layernorm, self.post_attention_layernorm), [w.weight for w in _linear_layers(self)]
    weights = [norms[0].weight, *weights[:4], norms[1].weight, *weights[4:]]
    params, eps = _attention_params(self.self_attn), (norms[0].variance_epsilon, norms[1].variance_epsilon)
    return layer_on_cpu(x, position_embeddings, layout, params, self.self_attn.head_dim, eps, tuple(weights))


def _qkv_rope(self: Any, x: Tensor, position_embeddings: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys with RoPE, and values."""
    layers = (self.q_proj, self.k_proj, self.v_proj)
    if self.use_triton and x.device.type == "cuda" and _can_concatenate(layers) and not hasattr(self, "q_norm"):
        from sojourn.model.kernels.rope import split_qkv_rope

        linear_fn, head_counts = layers[0].linear_fn, _head_counts(self)
        weight, bias = _concatenate(layers, x)
        qkv = None
        if linear_fn is not F.linear and bias is None:
            qkv = fp8.qkv_rope(x, weight, *position_embeddings, head_counts, forward=linear_fn is fp8.fp8_linear)
        if qkv is None:
            qkv = split_qkv_rope(linear_fn(x, weight, bias), *position_embeddings, *head_counts)
        query_BTHD, key_BTKD, value_BTKD = qkv
        return query_BTHD, key_BTKD, value_BTKD
    query_BTHD, key_BTKD, value_BTKD = (layer(x).unflatten(-1, (-1, self.head_dim)) for layer in layers)
    if hasattr(self, "q_norm"):
        query_BTHD, key_BTKD = self.q_norm(query_BTHD), self.k_norm(key_BTKD)
    return *fused(_apply_rope, x)(query_BTHD, key_BTKD, *position_embeddings), value_BTKD


def _head_counts(self: Any) -> list[int]:
    """Of queries, and of keys and values."""
    return [layer.out_features // self.head_dim for layer in (self.q_proj, self.k_proj)]


def _can_concatenate(layers: Sequence[nn.Module], linear_fn: Any = None) -> bool:
    """Whether one matmul can replace theirs: not where each has an adapter, and not worth it for frozen weights."""
    linear_fn = linear_fn or getattr(layers[0], "linear_fn", None)
    alike = all(getattr(layer, "linear_fn", None) is linear_fn for layer in layers)
    return linear_fn is not None and alike and all(bool(layer.weight.requires_grad) for layer in layers)


def _concatenate(layers: Sequence[nn.Module], x: Tensor) -> tuple[Tensor, Tensor | None]:
    """Weights and biases as of one layer. Concatenating costs less than separate matmuls."""
    weight = torch.cat([layer.weight.to(x.dtype) for layer in layers])
    return weight, None if layers[0].bias is None else torch.cat([layer.bias.to(x.dtype) for layer in layers])


def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def _apply_rope(query_BTHD: Tensor, key_BTKD: Tensor, cos_BTD: Tensor, sin_BTD: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = cos_BTD[:, :, None], sin_BTD[:, :, None]

    def rotate(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat((-second, first), -1) * sin

    return rotate(query_BTHD), rotate(key_BTKD)
