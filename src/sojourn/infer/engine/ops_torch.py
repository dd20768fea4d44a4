"""The operations of a step in plain torch, for any device: the reference for the other backends (`Ops` is what they
implement), and what is used where none of those works. Shapes as in batch.py; I inputs, O outputs of a matrix.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from sojourn.infer.engine.batch import StepBatch
from sojourn.infer.engine.block_pool import BLOCK
from sojourn.infer.engine.decoder import AttentionSpec


class Ops(Protocol):
    def pack(self, weight_OI: Tensor) -> Any:
        """A matrix as `linear` takes it."""

    def linear(self, x_TI: Tensor, packed: Any, bias_O: Tensor | None = None) -> Tensor: ...

    def linear_add_(self, sum_TO: Tensor, x_TI: Tensor, packed: Any, bias_O: Tensor | None = None) -> None:
        """Adds the outputs to `sum_TO`."""

    def rms_norm(self, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor: ...

    def norm_linear(
        self, x_TD: Tensor, weight_D: Tensor, eps: float, packed: Any, bias_O: Tensor | None = None
    ) -> Tensor:
        """`linear` of `rms_norm`."""

    def gated_act(self, gate_up_TF: Tensor, activation: str) -> Tensor:
        """The activation of the first half, times the second."""

    def norm_gated(self, x_TD: Tensor, weight_D: Tensor, eps: float, packed: Any, activation: str) -> Tensor:
        """`gated_act` of `norm_linear`."""

    def new_cache(self, blocks: int, spec: AttentionSpec, dtype: torch.dtype, device: torch.device) -> Any:
        """Keys and values of one layer."""

    def rope_store(self, qkv_TE: Tensor, cache: Any, batch: StepBatch, spec: AttentionSpec) -> Tensor:
        """Norms and rotates queries and keys, stores keys and values, returns queries (T, heads, head_dim)."""

    def attention(self, query_THD: Tensor, cache: Any, batch: StepBatch, spec: AttentionSpec) -> Tensor:
        """All heads' outputs side by side."""


class TorchOps:
    def pack(self, weight_OI: Tensor) -> Any:
        return weight_OI

    def linear(self, x_TI: Tensor, packed: Any, bias_O: Tensor | None = None) -> Tensor:
        return F.linear(x_TI, packed, bias_O)

    def linear_add_(self, sum_TO: Tensor, x_TI: Tensor, packed: Any, bias_O: Tensor | None = None) -> None:
        sum_TO += self.linear(x_TI, packed, bias_O)

    def rms_norm(self, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        normed = x_TD.float() * torch.rsqrt(x_TD.float().square().mean(-1, keepdim=True) + eps)
        return (normed * weight_D.float()).to(x_TD.dtype)

    def norm_linear(
        self, x_TD: Tensor, weight_D: Tensor, eps: float, packed: Any, bias_O: Tensor | None = None
    ) -> Tensor:
        return self.linear(self.rms_norm(x_TD, weight_D, eps), packed, bias_O)

    def gated_act(self, gate_up_TF: Tensor, activation: str) -> Tensor:
        gate, up = gate_up_TF.chunk(2, -1)
        return (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up

    def norm_gated(self, x_TD: Tensor, weight_D: Tensor, eps: float, packed: Any, activation: str) -> Tensor:
        return self.gated_act(self.norm_linear(x_TD, weight_D, eps, packed), activation)

    def new_cache(self, blocks: int, spec: AttentionSpec, dtype: torch.dtype, device: torch.device) -> Any:
        shape = (blocks * BLOCK, spec.kv_heads, spec.head_dim)
        return zeros(shape, dtype, device), zeros(shape, dtype, device)

    def rope_store(self, qkv_TE: Tensor, cache: Any, batch: StepBatch, spec: AttentionSpec) -> Tensor:
        qkv = qkv_TE.unflatten(-1, (-1, spec.head_dim))
        query, key, value = qkv.split((spec.heads, spec.kv_heads, spec.kv_heads), 1)
        if spec.q_norm_D is not None and spec.k_norm_D is not None:
            query, key = self.rms_norm(query, spec.q_norm_D, spec.eps), self.rms_norm(key, spec.k_norm_D, spec.eps)
        if spec.cos_PR is not None and spec.sin_PR is not None:
            cos, sin = spec.cos_PR[batch.positions_T][:, None], spec.sin_PR[batch.positions_T][:, None]
            query, key = _rotate(query, cos, sin), _rotate(key, cos, sin)
        slots = batch.slots_T.long()
        cache[0].index_copy_(0, slots, key)
        cache[1].index_copy_(0, slots, value)
        return query

    def attention(self, query_THD: Tensor, cache: Any, batch: StepBatch, spec: AttentionSpec) -> Tensor:
        outputs, shared = [], spec.heads // spec.kv_heads
        for group in batch.groups:
            mask_SQC = group.mask(spec.window, query_THD.dtype)
            sequences, tokens, _ = mask_SQC.shape
            # heads that share keys and values are like further tokens of one head
            query = query_THD[group.tokens].view(sequences, tokens, spec.kv_heads, shared, spec.head_dim)
            query = query.permute(0, 2, 3, 1, 4).flatten(2, 3)
            key, value = (x[group.slots_SC].transpose(1, 2) for x in cache)
            mask = mask_SQC[:, None].expand(-1, shared, -1, -1).flatten(1, 2)[:, None]
            found = _attend(query, key, value, mask, spec).unflatten(2, (shared, tokens))
            outputs.append(found.permute(0, 3, 1, 2, 4).flatten(2).flatten(0, 1))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, spec: AttentionSpec) -> Tensor:
    """Of (sequences, kv_heads, tokens, head_dim)."""
    if spec.softcap is None and spec.sinks_H is None:
        return F.scaled_dot_product_attention(query, key, value, mask, scale=spec.scale)
    scores = (query @ key.transpose(-1, -2)).float() * spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    scores = scores + mask
    if spec.sinks_H is not None:
        per_head = scores.shape[2] // (spec.heads // spec.kv_heads)
        sinks = spec.sinks_H.float().repeat_interleave(per_head).view(spec.kv_heads, -1, 1)
        scores = torch.cat((scores, sinks.expand(len(scores), -1, -1, -1)), -1)
    return scores.softmax(-1)[..., : key.shape[-2]].to(value.dtype) @ value


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """On a CPU, memory that the system gives when it is written."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)


def _rotate(x_THD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    first, second, rest = x_THD[..., :half].float(), x_THD[..., half : 2 * half].float(), x_THD[..., 2 * half :]
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x_THD.dtype)
    return torch.cat((rotated, rest), -1)
