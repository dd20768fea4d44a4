"""Rotary positions for queries, keys and values that were made in one multiplication: cut apart and turned in one pass
over memory, forward and back.

Shapes: B rows, T tokens a row, H heads of queries and K of keys and values, D numbers a head, P = (H + 2K)·D.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from sojourn.model.kernels.custom_op import differentiable, operation


def _empty_parts(joined: Any, cos: Any, sin: Any, heads: int, kv_heads: int) -> Any:
    size = joined.shape[-1] // (heads + 2 * kv_heads)
    return tuple(joined.new_empty(*joined.shape[:2], n, size) for n in (heads, kv_heads, kv_heads))


def _empty_whole(query: Any, key: Any, value: Any, cos: Any, sin: Any) -> Any:
    rows, width, heads, size = query.shape
    return query.new_empty(rows, width, (heads + 2 * key.shape[2]) * size)


@operation(
    "turned_apart(Tensor joined, Tensor cos, Tensor sin, int heads, int kv_heads) -> (Tensor, Tensor, Tensor)",
    _empty_parts,
)
def turned_apart(joined_BTP: Any, cos_BTD: Any, sin_BTD: Any, heads: int, kv_heads: int) -> Any:
    """Queries and keys, turned, and values: of shapes BTHD, BTKD and BTKD."""
    made = _empty_parts(joined_BTP, cos_BTD, sin_BTD, heads, kv_heads)
    _launch(parts(joined_BTP, heads, kv_heads), made, cos_BTD, sin_BTD, 1)
    return made


@operation("turned_together(Tensor query, Tensor key, Tensor value, Tensor cos, Tensor sin) -> Tensor", _empty_whole)
def turned_together(query: Any, key: Any, value: Any, cos: Any, sin: Any) -> Any:
    """The gradient of what came in, from those of what went out."""
    return _together(query, key, value, cos, sin, None)


@operation(
    "turned_together_measured(Tensor query, Tensor key, Tensor value, Tensor cos, Tensor sin) -> (Tensor, Tensor)",
    lambda *given: (_empty_whole(*given), _tokens(given[0])),
)
def turned_together_measured(query: Any, key: Any, value: Any, cos: Any, sin: Any) -> tuple[Any, Any]:
    """The same, and the largest number of every token."""
    most = _tokens(query)
    return _together(query, key, value, cos, sin, most), most


def _tokens(query: Any) -> Any:
    return query.new_empty(query.shape[0] * query.shape[1], dtype=torch.float32)


def _together(query: Any, key: Any, value: Any, cos: Any, sin: Any, most: Any) -> Any:
    joined = _empty_whole(query, key, value, cos, sin)
    given = [x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value)]
    _launch(given, parts(joined, query.shape[2], key.shape[2]), cos, sin, -1, most)
    return joined


def _remember(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(inputs[1], inputs[2])


def _backward(ctx: Any, query: Any, key: Any, value: Any) -> Any:
    return turned_together(query, key, value, *ctx.saved_tensors), None, None, None, None


differentiable("turned_apart", _remember, _backward)


def parts(joined: Any, heads: int, kv_heads: int) -> list[Any]:
    """Views of queries, keys and values."""
    whole = joined.unflatten(-1, (heads + 2 * kv_heads, -1))
    return list(whole.split([heads, kv_heads, kv_heads], 2))


def turn_in_place(joined_BTP: Any, cos_BTD: Any, sin_BTD: Any, heads: int, kv_heads: int, way: int = 1) -> None:
    """Queries and keys, where they lie; `way` -1: back."""
    query, key, _ = parts(joined_BTP, heads, kv_heads)
    _launch((query, key, None), (query, key, None), cos_BTD, sin_BTD, way)


def _launch(given: Any, made: Any, cos: Any, sin: Any, way: int, most: Any = None) -> None:
    rows, width, heads, size = given[0].shape
    strides = [0 if x is None else x.stride(i) for x in (*given, *made) for i in range(3)]
    _kernel[(rows * width,)](
        *given, *made, cos, sin, width, *strides, cos.stride(0), cos.stride(1), heads, given[1].shape[2], size // 2,
        most,
        HEADS=triton.next_power_of_2(heads), KV_HEADS=triton.next_power_of_2(given[1].shape[2]),
        HALF=triton.next_power_of_2(size // 2), WAY=way,
    )  # fmt: skip


@triton.jit
def _kernel(  # type: ignore[no-untyped-def]
    q, k, v, q_out, k_out, v_out, cos, sin, width,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, qo_b, qo_t, qo_h, ko_b, ko_t, ko_h, vo_b, vo_t, vo_h, c_b, c_t,
    heads, kv_heads, half, most, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, WAY: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    b, t = token // width, token % width
    places = tl.arange(0, HALF)
    inside = places < half
    c = tl.load(cos + b * c_b + t * c_t + places, mask=inside, other=0.0).to(tl.float32)[None, :]
    s = tl.load(sin + b * c_b + t * c_t + places, mask=inside, other=0.0).to(tl.float32)[None, :] * WAY
    head = tl.arange(0, HEADS)[:, None]
    here = (head < heads) & inside[None, :]
    at = head * q_h + places[None, :]
    to = head * qo_h + places[None, :]
    largest = _turn(q + b * q_b + t * q_t + at, q_out + b * qo_b + t * qo_t + to, half, here, c, s)
    head = tl.arange(0, KV_HEADS)[:, None]
    here = (head < kv_heads) & inside[None, :]
    at = head * k_h + places[None, :]
    to = head * ko_h + places[None, :]
    larger = _turn(k + b * k_b + t * k_t + at, k_out + b * ko_b + t * ko_t + to, half, here, c, s)
    if v is not None:
        source = v + b * v_b + t * v_t + head * v_h + places[None, :]
        target = v_out + b * vo_b + t * vo_t + head * vo_h + places[None, :]
        first = tl.load(source, mask=here, other=0.0)
        second = tl.load(source + half, mask=here, other=0.0)
        tl.store(target, first, mask=here)
        tl.store(target + half, second, mask=here)
        if most is not None:
            same = tl.max(tl.maximum(tl.abs(first), tl.abs(second))).to(tl.float32)
            tl.store(most + token, tl.maximum(tl.maximum(largest, larger), same))


@triton.jit
def _turn(source, target, half, here, c, s):  # type: ignore[no-untyped-def]
    first = tl.load(source, mask=here, other=0.0).to(tl.float32)
    second = tl.load(source + half, mask=here, other=0.0).to(tl.float32)
    one, other = first * c - second * s, second * c + first * s
    tl.store(target, one.to(target.dtype.element_ty), mask=here)
    tl.store(target + half, other.to(target.dtype.element_ty), mask=here)
    return tl.max(tl.maximum(tl.abs(one), tl.abs(other)))
