"""The operations of a step in plain torch, for any device: the reference for the other backends (`Ops` is what they
implement), and what is used where none of those works. Shapes as in batch.py; I inputs, O outputs of a matrix.
"""

from __future__ import annotations

from typing import Any, Protocol

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
        return torch.zeros(2, blocks * BLOCK, spec.kv_heads, spec.head_dim, dtype=dtype, device=device)

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
        out = torch.empty_like(query_THD)
        starts, lengths = batch.starts_S1.tolist(), batch.context_S.tolist()
        for at, length in enumerate(lengths):
            rows = slice(starts[at], starts[at + 1])
            key, value = gather_kv(cache, batch.block_table_SB[at], length)
            query = query_THD[rows].transpose(0, 1)
            mask = _mask(batch.positions_T[rows], length, spec.window)
            key, value = (x.transpose(0, 1).repeat_interleave(spec.heads // spec.kv_heads, 0) for x in (key, value))
            found = F.scaled_dot_product_attention(query[None], key[None], value[None], mask, scale=spec.scale)
            out[rows] = found[0].transpose(0, 1)
        return out.flatten(1)


def gather_kv(cache: Tensor, table_B: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Keys and values of one sequence (length, kv_heads, head_dim)."""
    blocks = cache.unflatten(1, (-1, BLOCK))[:, table_B[: -(-length // BLOCK)].long()]
    key, value = blocks.flatten(1, 2)[:, :length]
    return key, value


def _mask(positions_T: Tensor, length: int, window: int | None) -> Tensor:
    distance = positions_T[:, None] - torch.arange(length, device=positions_T.device)
    return (distance >= 0) if window is None else (distance >= 0) & (distance < window)


def _rotate(x_THD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    first, second, rest = x_THD[..., :half].float(), x_THD[..., half : 2 * half].float(), x_THD[..., 2 * half :]
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x_THD.dtype)
    return torch.cat((rotated, rest), -1)
