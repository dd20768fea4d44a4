"""A decoder-only transformer as the engine computes it; infer/read_decoder.py makes one of a transformers model.

Families differ in few things, all of them data here: biases, norms of queries and keys, norms after attention and MLP,
RoPE's tables and how much of a head it rotates, sliding windows, the activation, scales. q, k and v are one matrix, and
so are gate and up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class AttentionSpec:
    """`window`: tokens that a token sees, itself included; None: all before it. `rotary_dim`: of each head's beginning,
    0 for none. `cos_PR`, `sin_PR`: by position, for half of `rotary_dim`. `q_norm_D`, `k_norm_D`: of each head.
    `softcap`, `sinks_H`: only the torch backend has them, for models that are no `Decoder`."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int | None
    rotary_dim: int
    cos_PR: Tensor | None
    sin_PR: Tensor | None
    q_norm_D: Tensor | None
    k_norm_D: Tensor | None
    eps: float
    softcap: float | None = None
    sinks_H: Tensor | None = None


@dataclass
class Layer:
    """Matrices are packed by the backend: see ops_torch.py. `post_*`: norms of what is added to the residual stream.
    `qkv_order`: which rows of the base model's q, k and v these are; None: as they come."""

    attention: AttentionSpec
    input_norm_D: Tensor
    qkv: Any
    qkv_bias: Tensor | None
    o: Any
    o_bias: Tensor | None
    post_attention_norm_D: Tensor | None
    mlp_norm_D: Tensor
    gate_up: Any
    down: Any
    post_mlp_norm_D: Tensor | None
    qkv_order: Tensor | None


@dataclass
class Decoder:
    embedding_VD: Tensor
    embedding_scale: float
    layers: list[Layer]
    norm_D: Tensor
    lm_head: Any
    eps: float
    activation: str
    mlp_size: int
    vocab_size: int
    dtype: torch.dtype
    device: torch.device

    @property
    def kv_bytes_per_token(self) -> int:
        specs = [layer.attention for layer in self.layers]
        return sum(2 * spec.kv_heads * spec.head_dim for spec in specs) * int(self.dtype.itemsize)
