"""The gate of a feed-forward whose two inputs were made in one multiplication: one pass over memory, forward and back.

Shapes: M tokens, F width of the feed-forward; `joined` has the gate's half first, then the other.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from sojourn.model.fast.operation import differentiable, operation

_BLOCK = 1024


def _half(joined: Any) -> Any:
    return joined.new_empty(*joined.shape[:-1], joined.shape[-1] // 2)


def _whole(grad: Any, joined: Any) -> Any:
    return torch.empty_like(joined)


def _pieces(like: Any) -> Any:
    """Room for the largest number of every piece."""
    size = like.shape[-1]
    return like.new_empty(like.numel() // size, triton.cdiv(size, _BLOCK), dtype=torch.float32)


@operation("gated(Tensor joined) -> Tensor", _half)
def gated(joined: Any) -> Any:
    """silu(first half) · second half."""
    return _forward(joined, None)


@operation("gated_measured(Tensor joined) -> (Tensor, Tensor)", lambda joined: ((made := _half(joined)), _pieces(made)))
def gated_measured(joined: Any) -> tuple[Any, Any]:
    """The same, and the largest number of every piece of it."""
    most = _pieces(_half(joined))
    return _forward(joined, most), most


@operation("gated_back(Tensor grad, Tensor joined) -> Tensor", _whole)
def gated_back(grad: Any, joined: Any) -> Any:
    """The gradient of `joined`."""
    return _back(grad, joined, None)


@operation(
    "gated_back_measured(Tensor grad, Tensor joined) -> (Tensor, Tensor)",
    lambda grad, joined: (_whole(grad, joined), _pieces(grad)),
)
def gated_back_measured(grad: Any, joined: Any) -> tuple[Any, Any]:
    """The same, and the largest number of every piece of it."""
    most = _pieces(grad)
    return _back(grad, joined, most), most


def _forward(joined: Any, most: Any) -> Any:
    made = _half(joined)
    size = made.shape[-1]
    _forward_kernel[(made.numel() // size, triton.cdiv(size, _BLOCK))](joined, made, size, most, BLOCK=_BLOCK)
    return made


def _back(grad: Any, joined: Any, most: Any) -> Any:
    made, grad = torch.empty_like(joined), grad.contiguous()
    size = grad.shape[-1]
    _back_kernel[(grad.numel() // size, triton.cdiv(size, _BLOCK))](grad, joined, made, size, most, BLOCK=_BLOCK)
    return made


def _remember(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs)


differentiable("gated", _remember, lambda ctx, grad: gated_back(grad, *ctx.saved_tensors))


@triton.jit
def _forward_kernel(joined, made, size, most, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = places < size
    joined += row * 2 * size
    gate = tl.load(joined + places, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(joined + size + places, mask=inside, other=0.0).to(tl.float32)
    y = gate * tl.sigmoid(gate) * other
    tl.store(made + row * size + places, y.to(made.dtype.element_ty), mask=inside)
    if most is not None:
        tl.store(most + row * tl.num_programs(1) + tl.program_id(1), tl.max(tl.abs(y)))


@triton.jit
def _back_kernel(grad, joined, made, size, most, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = places < size
    joined += row * 2 * size
    made += row * 2 * size
    upstream = tl.load(grad + row * size + places, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(joined + places, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(joined + size + places, mask=inside, other=0.0).to(tl.float32)
    share = tl.sigmoid(gate)
    by_gate = upstream * other * share * (1 + gate * (1 - share))
    by_other = upstream * gate * share
    tl.store(made + places, by_gate.to(made.dtype.element_ty), mask=inside)
    tl.store(made + size + places, by_other.to(made.dtype.element_ty), mask=inside)
    if most is not None:
        larger = tl.maximum(tl.abs(by_gate), tl.abs(by_other))
        tl.store(most + row * tl.num_programs(1) + tl.program_id(1), tl.max(larger))
