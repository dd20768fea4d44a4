"""Queries and keys with RoPE, and values, for fused_forwards.py: with one matmul and one kernel where a GPU allows it.

Shapes as in attention.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sojourn.model.kernels import fp8
from sojourn.model.kernels.linear_layers import are_plain_lora, can_concatenate, concatenate, lora_group
from sojourn.model.kernels.lora_linear import lora_linears
from sojourn.model.kernels.triton_support import fused

_INTERLEAVED_ROPE = ("glm4",)


def qkv_rope(self: Any, x: Tensor, position_embeddings: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys with RoPE, and values."""
    layers = qkv_layers(self)
    on_gpu = self.use_triton and x.device.type == "cuda" and fits_qkv_kernels(self, position_embeddings)
    if on_gpu and (len(layers) == 1 or can_concatenate(layers)):
        return _qkv_rope_on_gpu(self, x, position_embeddings)
    if len(layers) == 1:
        projected = layers[0](x).split(_qkv_sizes(self), -1)
    else:
        is_lora = are_plain_lora(layers, x)
        projected = lora_linears(x, lora_group(layers, x.dtype)) if is_lora else [layer(x) for layer in layers]
    query_BTHD, key_BTKD, value_BTKD = (one.unflatten(-1, (-1, self.head_dim)) for one in projected)
    if hasattr(self, "q_norm"):
        query_BTHD, key_BTKD = self.q_norm(query_BTHD), self.k_norm(key_BTKD)
    return *_rope(self, query_BTHD, key_BTKD, position_embeddings), value_BTKD


def _rope(self: Any, query: Tensor, key: Tensor, position_embeddings: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    if not getattr(self, "use_rope", True):
        return query, key
    if (
        self.use_triton
        and query.is_cuda
        and _rotates_whole_heads(self, position_embeddings)
        and not torch.compiler.is_compiling()
    ):
        from sojourn.model.kernels.rope import rope

        rotated: tuple[Tensor, Tensor] = rope(query, key, *position_embeddings, 1)
    else:
        function = _apply_interleaved_rope if self.config.model_type in _INTERLEAVED_ROPE else apply_rope
        rotated = fused(function, query)(query, key, *position_embeddings)
    return rotated


def _qkv_rope_on_gpu(self: Any, x: Tensor, position_embeddings: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    from sojourn.model.kernels.rope import split_qkv_rope

    layers, heads, qkv = qkv_layers(self), head_counts(self), None
    if can_concatenate(layers):
        linear_fn = layers[0].linear_fn
        weight, bias = concatenate(layers, x)
        if linear_fn is not F.linear and bias is None:
            qkv = fp8.qkv_rope(x, weight, *position_embeddings, heads, forward=linear_fn is fp8.fp8_linear)
        projected = linear_fn(x, weight, bias) if qkv is None else None
    else:  # one frozen layer, maybe with an adapter
        projected = layers[0](x)
    query, key, value = qkv or split_qkv_rope(projected, *position_embeddings, *heads)
    return query, key, value


def fits_qkv_kernels(self: Any, position_embeddings: tuple[Tensor, Tensor]) -> bool:
    """Whether RoPE follows the matmuls at once, over whole heads, in halves."""
    rotates = bool(getattr(self, "use_rope", True)) and not hasattr(self, "q_norm")
    return rotates and _rotates_whole_heads(self, position_embeddings)


def _rotates_whole_heads(self: Any, position_embeddings: tuple[Tensor, Tensor]) -> bool:
    """In halves, not in pairs of neighbours."""
    in_halves = self.config.model_type not in _INTERLEAVED_ROPE
    return in_halves and position_embeddings[0].shape[-1] == self.head_dim


def qkv_layers(self: Any) -> tuple[nn.Module, ...]:
    return (self.qkv_proj,) if hasattr(self, "qkv_proj") else (self.q_proj, self.k_proj, self.v_proj)


def head_counts(self: Any) -> list[int]:
    """Of queries, and of keys and values."""
    return [self.config.num_attention_heads, self.config.num_key_value_heads]


def _qkv_sizes(self: Any) -> list[int]:
    heads, kv_heads = head_counts(self)
    return [heads * self.head_dim, kv_heads * self.head_dim, kv_heads * self.head_dim]


def apply_rope(query_BTHD: Tensor, key_BTKD: Tensor, cos_BTR: Tensor, sin_BTR: Tensor) -> tuple[Tensor, Tensor]:
    """Rotates the first R dimensions of each head."""
    cos, sin = cos_BTR[:, :, None], sin_BTR[:, :, None]

    def rotate(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat((-second, first), -1) * sin

    return _on_first(cos_BTR.shape[-1], rotate, query_BTHD), _on_first(cos_BTR.shape[-1], rotate, key_BTKD)


def _apply_interleaved_rope(
    query_BTHD: Tensor, key_BTKD: Tensor, cos_BTR: Tensor, sin_BTR: Tensor
) -> tuple[Tensor, Tensor]:
    """The same with pairs of neighbours instead of halves. The second half of `cos` and `sin` repeats the first."""
    cos, sin = (x.chunk(2, -1)[0].repeat_interleave(2, -1)[:, :, None] for x in (cos_BTR, sin_BTR))

    def rotate(x: Tensor) -> Tensor:
        return x * cos + torch.stack((-x[..., 1::2], x[..., 0::2]), -1).flatten(-2) * sin

    return _on_first(cos_BTR.shape[-1], rotate, query_BTHD), _on_first(cos_BTR.shape[-1], rotate, key_BTKD)


def _on_first(size: int, rotate: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return rotate(x) if size == x.shape[-1] else torch.cat((rotate(x[..., :size]), x[..., size:]), -1)
