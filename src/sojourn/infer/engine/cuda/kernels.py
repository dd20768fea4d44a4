"""Triton kernels of a step: matrix-vector products, RoPE into the KV cache, attention over block tables.

Shapes as in batch.py and ops_torch.py; M tokens of a small batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sojourn.infer.engine.batch import StepBatch
from sojourn.infer.engine.block_pool import BLOCK
from sojourn.infer.engine.decoder import AttentionSpec
from sojourn.model.kernels.early_launch import early_launch, wait_for_inputs

_CHUNK = tl.constexpr(64)  # tokens of the KV cache that attention reads at a time
_BLOCK_I = 512  # inputs that a matrix-vector kernel reads at a time: the fastest of those tried on an H200
_MIN_PROGRAMS = 264  # two a multiprocessor of the largest GPUs


@triton.jit
def activate(gate, up, IS_SILU: tl.constexpr):  # type: ignore[no-untyped-def]
    if IS_SILU:
        return gate / (1.0 + tl.exp(-gate)) * up
    inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
    return gate / (1.0 + tl.exp(-2.0 * inner)) * up


@triton.jit
def _matvec_kernel(  # type: ignore[no-untyped-def]
    x, weight, bias, out, inputs, outputs, HAS_BIAS: tl.constexpr, ADDS: tl.constexpr, GATED: tl.constexpr,
    IS_SILU: tl.constexpr, EVEN: tl.constexpr, BLOCK_I: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One output of one token."""
    row = tl.program_id(0)
    line = weight + row.to(tl.int64) * inputs
    up_line = line + outputs.to(tl.int64) * inputs
    sums, up_sums = tl.zeros([BLOCK_I], tl.float32), tl.zeros([BLOCK_I], tl.float32)
    wait_for_inputs(EARLY)
    for start in tl.range(0, inputs, BLOCK_I, loop_unroll_factor=2):
        column = start + tl.arange(0, BLOCK_I)
        mask = None if EVEN else column < inputs
        other = None if EVEN else 0.0
        values = tl.load(x + column, mask=mask, other=other).to(tl.float32)
        sums += tl.load(line + column, mask=mask, other=other, eviction_policy="evict_first").to(tl.float32) * values
        if GATED:
            part = tl.load(up_line + column, mask=mask, other=other, eviction_policy="evict_first")
            up_sums += part.to(tl.float32) * values
    result = tl.sum(sums, 0)
    if HAS_BIAS:
        result += tl.load(bias + row).to(tl.float32)
    if GATED:
        result = activate(result, tl.sum(up_sums, 0), IS_SILU)
    if ADDS:
        result += tl.load(out + row).to(tl.float32)
    tl.store(out + row, result.to(out.dtype.element_ty))


def matvec(
    x_1I: Tensor,
    weight_OI: Tensor,
    bias_O: Tensor | None = None,
    add_to: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """`linear` of one token. `add_to`: the outputs are added there. `activation`: the first half of the outputs is
    activated and multiplied by the second."""
    outputs, inputs = weight_OI.shape
    outputs = outputs if activation is None else outputs // 2
    out = x_1I.new_empty(1, outputs) if add_to is None else add_to
    _matvec_kernel[(outputs,)](
        x_1I, weight_OI, bias_O, out, inputs, outputs, HAS_BIAS=bias_O is not None, ADDS=add_to is not None,
        GATED=activation is not None, IS_SILU=activation == "silu", EVEN=inputs % _BLOCK_I == 0, BLOCK_I=_BLOCK_I,
        num_warps=1, **early_launch(),
    )  # fmt: skip
    return out


@triton.jit
def _gated_kernel(  # type: ignore[no-untyped-def]
    gate_up, out, size, IS_SILU: tl.constexpr, BLOCK_F: tl.constexpr, EARLY: tl.constexpr
):
    wait_for_inputs(EARLY)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    mask = columns < size
    gate = tl.load(gate_up + token * 2 * size + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + token * 2 * size + size + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + token * size + columns, activate(gate, up, IS_SILU).to(out.dtype.element_ty), mask=mask)


def gated_act(gate_up_TF: Tensor, activation: str) -> Tensor:
    tokens, size = gate_up_TF.shape[0], gate_up_TF.shape[1] // 2
    out = gate_up_TF.new_empty(tokens, size)
    _gated_kernel[(tokens, triton.cdiv(size, 1024))](
        gate_up_TF, out, size, IS_SILU=activation == "silu", BLOCK_F=1024, **early_launch()
    )
    return out


@triton.jit
def _norm_kernel(  # type: ignore[no-untyped-def]
    x, weight, out, size, eps, BLOCK_D: tl.constexpr, EARLY: tl.constexpr
):
    wait_for_inputs(EARLY)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK_D)
    mask = columns < size
    values = tl.load(x + token * size + columns, mask=mask, other=0.0).to(tl.float32)
    factor = tl.rsqrt(tl.sum(values * values, 0) / size + eps)
    scaled = values * factor * tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + token * size + columns, scaled.to(out.dtype.element_ty), mask=mask)


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    out = torch.empty_like(x_TD)
    size = x_TD.shape[-1]
    _norm_kernel[(x_TD.numel() // size,)](
        x_TD, weight_D, out, size, eps, BLOCK_D=triton.next_power_of_2(size), **early_launch()
    )
    return out


@triton.jit
def _rope_store_kernel(  # type: ignore[no-untyped-def]
    qkv, positions, slots, cos, sin, q_norm, k_norm, query, keys, values, heads, kv_heads, eps,
    HEAD: tl.constexpr, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr, HEAD_BLOCK: tl.constexpr, HAS_NORM: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """One head of one token. Heads are those of queries, keys, values."""
    wait_for_inputs(EARLY)
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    source = qkv + (token * (heads + 2 * kv_heads) + head) * HEAD
    slot = tl.load(slots + token).to(tl.int64)
    is_query, is_value = head < heads, head >= heads + kv_heads
    cache_at = slot * kv_heads * HEAD + tl.where(is_value, head - heads - kv_heads, head - heads) * HEAD
    target = query + (token * heads + head) * HEAD if is_query else (values + cache_at if is_value else keys + cache_at)
    whole = tl.arange(0, HEAD_BLOCK)
    inside = whole < HEAD
    all_values = tl.load(source + whole, mask=inside, other=0.0).to(tl.float32)
    factor = 1.0
    if HAS_NORM:
        if not is_value:
            factor = tl.rsqrt(tl.sum(all_values * all_values, 0) / HEAD + eps)
            weights = q_norm if is_query else k_norm
            all_values *= factor * tl.load(weights + whole, mask=inside, other=0.0).to(tl.float32)
    tl.store(target + whole, all_values.to(target.dtype.element_ty), mask=inside)
    if HALF > 0:
        if not is_value:
            at = tl.arange(0, HALF_BLOCK)
            half = at < HALF
            position = tl.load(positions + token).to(tl.int64)
            cosine = tl.load(cos + position * HALF + at, mask=half, other=0.0)
            sine = tl.load(sin + position * HALF + at, mask=half, other=0.0)
            first = tl.load(source + at, mask=half, other=0.0).to(tl.float32)
            second = tl.load(source + HALF + at, mask=half, other=0.0).to(tl.float32)
            if HAS_NORM:
                weights = q_norm if is_query else k_norm
                first *= factor * tl.load(weights + at, mask=half, other=0.0).to(tl.float32)
                second *= factor * tl.load(weights + HALF + at, mask=half, other=0.0).to(tl.float32)
            tl.debug_barrier()  # after the store of the whole head
            tl.store(target + at, (first * cosine - second * sine).to(target.dtype.element_ty), mask=half)
            tl.store(target + HALF + at, (second * cosine + first * sine).to(target.dtype.element_ty), mask=half)


def rope_store(qkv_TE: Tensor, cache: Tensor, batch: StepBatch, spec: AttentionSpec) -> Tensor:
    heads, kv_heads, head = spec.heads, spec.kv_heads, spec.head_dim
    tokens, half = qkv_TE.shape[0], spec.rotary_dim // 2
    query = qkv_TE.new_empty(tokens, heads, head)
    _rope_store_kernel[(tokens, heads + 2 * kv_heads)](
        qkv_TE, batch.positions_T, batch.slots_T, spec.cos_PR, spec.sin_PR, spec.q_norm_D, spec.k_norm_D,
        query, cache[0], cache[1], heads, kv_heads, spec.eps, HEAD=head, HALF=half,
        HALF_BLOCK=triton.next_power_of_2(max(half, 1)), HEAD_BLOCK=triton.next_power_of_2(head),
        HAS_NORM=spec.q_norm_D is not None, num_warps=1, **early_launch(),
    )  # fmt: skip
    return query


@triton.jit(do_not_specialize=["blocks", "window"])
def _decode_attention_kernel(  # type: ignore[no-untyped-def]
    query, keys, values, table, context, partial, sums, scale, kv_heads, blocks, window,
    GROUP: tl.constexpr, GROUP_BLOCK: tl.constexpr, HEAD: tl.constexpr, HEAD_BLOCK: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One token's queries of one key/value head, over one part of its context."""
    wait_for_inputs(EARLY)
    sequence, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(context + sequence)
    begin = tl.maximum(0, length - window)
    chunks = (length - begin + _CHUNK - 1) // _CHUNK
    each = (chunks + SPLITS - 1) // SPLITS
    first = begin + split * each * _CHUNK
    last = tl.minimum(length, first + each * _CHUNK)
    group, width = tl.arange(0, GROUP_BLOCK), tl.arange(0, HEAD_BLOCK)
    in_group, in_head = group < GROUP, width < HEAD
    head = (sequence * kv_heads + kv_head) * GROUP + group
    mask = in_group[:, None] & in_head[None, :]
    q = tl.load(query + head[:, None] * HEAD + width[None, :], mask=mask, other=0.0)
    most = tl.full([GROUP_BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_BLOCK], tl.float32)
    out = tl.zeros([GROUP_BLOCK, HEAD_BLOCK], tl.float32)
    for start in range(first, last, _CHUNK):
        token = start + tl.arange(0, _CHUNK)
        inside = token < last
        block = tl.load(table + sequence * blocks + token // BLOCK, mask=inside, other=0)
        slot = block.to(tl.int64) * BLOCK + token % BLOCK
        at = (slot[:, None] * kv_heads + kv_head) * HEAD + width[None, :]
        kv_mask = inside[:, None] & in_head[None, :]
        k = tl.load(keys + at, mask=kv_mask, other=0.0)
        v = tl.load(values + at, mask=kv_mask, other=0.0)
        scores = tl.dot(q, tl.trans(k)) * (scale * 1.4426950408889634)
        scores = tl.where(inside[None, :], scores, float("-inf"))
        higher = tl.maximum(most, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(most - higher)
        total = total * shrink + tl.sum(weights, 1)
        out = tl.dot(weights.to(v.dtype), v, out * shrink[:, None])
        most = higher
    where = head * SPLITS + split
    tl.store(partial + where[:, None] * HEAD + width[None, :], out / tl.maximum(total, 1e-30)[:, None], mask=mask)
    tl.store(sums + where, tl.where(total > 0, most + tl.log2(tl.maximum(total, 1e-30)), float("-inf")), mask=in_group)


@triton.jit
def _combine_kernel(  # type: ignore[no-untyped-def]
    partial, sums, out, HEAD: tl.constexpr, HEAD_BLOCK: tl.constexpr, SPLITS: tl.constexpr, EARLY: tl.constexpr
):
    wait_for_inputs(EARLY)
    head = tl.program_id(0).to(tl.int64)
    split, width = tl.arange(0, SPLITS), tl.arange(0, HEAD_BLOCK)
    in_head = width < HEAD
    logs = tl.load(sums + head * SPLITS + split)
    weights = tl.exp2(logs - tl.max(logs, 0))
    weights = weights / tl.sum(weights, 0)
    at = (head * SPLITS + split)[:, None] * HEAD + width[None, :]
    parts = tl.load(partial + at, mask=in_head[None, :], other=0.0)
    tl.store(out + head * HEAD + width, tl.sum(parts * weights[:, None], 0).to(out.dtype.element_ty), mask=in_head)


def decode_attention(
    query_SHD: Tensor, cache: Tensor, table_SB: Tensor, context_S: Tensor, spec: AttentionSpec
) -> Tensor:
    """One token of each sequence. The context is split, so that few sequences use the whole GPU."""
    sequences, heads, head = query_SHD.shape
    splits = 1
    while sequences * spec.kv_heads * splits < _MIN_PROGRAMS and splits < 32:
        splits *= 2
    group, kv_heads = heads // spec.kv_heads, spec.kv_heads
    partial = query_SHD.new_empty(sequences, heads, splits, head, dtype=torch.float32)
    sums = query_SHD.new_empty(sequences, heads, splits, dtype=torch.float32)
    head_block = triton.next_power_of_2(head)
    _decode_attention_kernel[(sequences, kv_heads, splits)](
        query_SHD, cache[0], cache[1], table_SB, context_S, partial, sums, spec.scale, kv_heads, table_SB.stride(0),
        spec.window or 2**30, GROUP=group, GROUP_BLOCK=max(16, triton.next_power_of_2(group)), HEAD=head,
        HEAD_BLOCK=head_block, SPLITS=splits, BLOCK=BLOCK, num_warps=4, **early_launch(),
    )  # fmt: skip
    out = torch.empty_like(query_SHD)
    _combine_kernel[(sequences * heads,)](
        partial, sums, out, HEAD=head, HEAD_BLOCK=head_block, SPLITS=splits, num_warps=2, **early_launch()
    )
    return out
