"""RoPE in one pass over memory, both ways: of queries and keys, or of queries, keys and values that one matmul made and
that are split on the way.

Shapes: B rows, T tokens per row, H query heads, K key/value heads, D head size, P = (H + 2K)·D.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sojourn.model.kernels.custom_op import custom_op, register_autograd


def _empty_rotated(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, direction: int) -> tuple[Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape)


@custom_op("rope(Tensor query, Tensor key, Tensor cos, Tensor sin, int direction) -> (Tensor, Tensor)", _empty_rotated)
def rope(
    query_BTHD: Tensor, key_BTKD: Tensor, cos_BTD: Tensor, sin_BTD: Tensor, direction: int
) -> tuple[Tensor, Tensor]:
    """Rotated queries and keys; `direction` -1: the inverse rotation."""
    out = _empty_rotated(query_BTHD, key_BTKD, cos_BTD, sin_BTD, direction)
    _launch((*map(_with_rows, (query_BTHD, key_BTKD)), None), (*out, None), cos_BTD, sin_BTD, direction)
    return out


def _with_rows(x: Tensor) -> Tensor:
    """The numbers of a head lie side by side."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _setup_rope(ctx: Any, inputs: Any, output: Any) -> None:
    *_, cos, sin, ctx.direction = inputs
    ctx.save_for_backward(cos, sin)


def _rope_backward(ctx: Any, query: Tensor, key: Tensor) -> Any:
    return *rope(query, key, *ctx.saved_tensors, -ctx.direction), None, None, None


register_autograd("rope", _setup_rope, _rope_backward)


def _empty_split(qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, ...]:
    head_dim = qkv.shape[-1] // (heads + 2 * kv_heads)
    return tuple(qkv.new_empty(*qkv.shape[:2], n, head_dim) for n in (heads, kv_heads, kv_heads))


def _empty_joined(query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    rows, width, heads, head_dim = query.shape
    return query.new_empty(rows, width, (heads + 2 * key.shape[2]) * head_dim)


@custom_op(
    "split_qkv_rope(Tensor qkv, Tensor cos, Tensor sin, int heads, int kv_heads) -> (Tensor, Tensor, Tensor)",
    _empty_split,
)
def split_qkv_rope(qkv_BTP: Tensor, cos_BTD: Tensor, sin_BTD: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, ...]:
    """Rotated queries (BTHD), rotated keys (BTKD), and values (BTKD)."""
    out = _empty_split(qkv_BTP, cos_BTD, sin_BTD, heads, kv_heads)
    _launch(split_qkv(qkv_BTP, heads, kv_heads), out, cos_BTD, sin_BTD, 1)
    return out


@custom_op(
    "split_qkv_rope_backward(Tensor query, Tensor key, Tensor value, Tensor cos, Tensor sin) -> Tensor", _empty_joined
)
def split_qkv_rope_backward(query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The gradient of `qkv` from those of queries, keys and values."""
    return _rotate_back(query, key, value, cos, sin, None)


@custom_op(
    "split_qkv_rope_backward_amax(Tensor query, Tensor key, Tensor value, Tensor cos, Tensor sin) -> (Tensor, Tensor)",
    lambda *args: (_empty_joined(*args), _empty_amax(args[0])),
)
def split_qkv_rope_backward_amax(
    query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """The same, and the amax of every token."""
    amax = _empty_amax(query)
    return _rotate_back(query, key, value, cos, sin, amax), amax


def _empty_amax(query: Tensor) -> Tensor:
    return query.new_empty(query.shape[0] * query.shape[1], dtype=torch.float32)


def _rotate_back(query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor, amax: Tensor | None) -> Tensor:
    grad = _empty_joined(query, key, value, cos, sin)
    _launch([*map(_with_rows, (query, key, value))], split_qkv(grad, query.shape[2], key.shape[2]), cos, sin, -1, amax)
    return grad


def _setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(inputs[1], inputs[2])


def _backward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Any:
    return split_qkv_rope_backward(query, key, value, *ctx.saved_tensors), None, None, None, None


register_autograd("split_qkv_rope", _setup_context, _backward)


def split_qkv(qkv: Tensor, heads: int, kv_heads: int) -> list[Tensor]:
    """Views of queries, keys and values."""
    per_head = qkv.unflatten(-1, (heads + 2 * kv_heads, -1))
    return list(per_head.split([heads, kv_heads, kv_heads], 2))


def apply_rope_(
    qkv_BTP: Tensor, cos_BTD: Tensor, sin_BTD: Tensor, heads: int, kv_heads: int, direction: int = 1
) -> None:
    """Rotates queries and keys in place; `direction` -1: the inverse rotation."""
    query, key, _ = split_qkv(qkv_BTP, heads, kv_heads)
    _launch((query, key, None), (query, key, None), cos_BTD, sin_BTD, direction)


def _launch(
    inputs: Sequence[Any],
    outputs: Sequence[Any],
    cos: Tensor,
    sin: Tensor,
    direction: int,
    amax: Tensor | None = None,
) -> None:
    """`inputs` and `outputs`: queries, keys, and values or None."""
    query, key, _ = inputs
    rows, width, heads, head_dim = query.shape
    kv_heads = key.shape[2]
    strides = [0 if x is None else x.stride(i) for x in (*inputs, *outputs) for i in range(3)]
    _kernel[(rows * width,)](
        *inputs, *outputs, cos, sin, width, *strides, cos.stride(0), cos.stride(1), heads, kv_heads, head_dim // 2,
        amax,
        HEADS=triton.next_power_of_2(heads), KV_HEADS=triton.next_power_of_2(kv_heads),
        HALF=triton.next_power_of_2(head_dim // 2), DIRECTION=direction,
    )  # fmt: skip


@triton.jit
def _kernel(  # type: ignore[no-untyped-def]
    q, k, v, q_out, k_out, v_out, cos, sin, width,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, qo_b, qo_t, qo_h, ko_b, ko_t, ko_h, vo_b, vo_t, vo_h, c_b, c_t,
    heads, kv_heads, half, amax,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, DIRECTION: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    b, t = token // width, token % width
    offsets = tl.arange(0, HALF)
    in_half = offsets < half
    c = tl.load(cos + b * c_b + t * c_t + offsets, mask=in_half, other=0.0).to(tl.float32)[None, :]
    s = tl.load(sin + b * c_b + t * c_t + offsets, mask=in_half, other=0.0).to(tl.float32)[None, :] * DIRECTION
    head = tl.arange(0, HEADS)[:, None]
    mask = (head < heads) & in_half[None, :]
    source = head * q_h + offsets[None, :]
    target = head * qo_h + offsets[None, :]
    q_amax = _rotate(q + b * q_b + t * q_t + source, q_out + b * qo_b + t * qo_t + target, half, mask, c, s)
    head = tl.arange(0, KV_HEADS)[:, None]
    mask = (head < kv_heads) & in_half[None, :]
    source = head * k_h + offsets[None, :]
    target = head * ko_h + offsets[None, :]
    k_amax = _rotate(k + b * k_b + t * k_t + source, k_out + b * ko_b + t * ko_t + target, half, mask, c, s)
    if v is not None:
        v_source = v + b * v_b + t * v_t + head * v_h + offsets[None, :]
        v_target = v_out + b * vo_b + t * vo_t + head * vo_h + offsets[None, :]
        first = tl.load(v_source, mask=mask, other=0.0)
        second = tl.load(v_source + half, mask=mask, other=0.0)
        tl.store(v_target, first, mask=mask)
        tl.store(v_target + half, second, mask=mask)
        if amax is not None:
            v_amax = tl.max(tl.maximum(tl.abs(first), tl.abs(second))).to(tl.float32)
            tl.store(amax + token, tl.maximum(tl.maximum(q_amax, k_amax), v_amax))


@triton.jit
def _rotate(source, target, half, mask, c, s):  # type: ignore[no-untyped-def]
    first = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(source + half, mask=mask, other=0.0).to(tl.float32)
    new_first, new_second = first * c - second * s, second * c + first * s
    tl.store(target, new_first.to(target.dtype.element_ty), mask=mask)
    tl.store(target + half, new_second.to(target.dtype.element_ty), mask=mask)
    return tl.max(tl.maximum(tl.abs(new_first), tl.abs(new_second)))
