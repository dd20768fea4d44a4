"""The gate of a feed-forward whose two inputs were made in one multiplication: one pass over memory, forward and back.

Shapes: M tokens, F width of the feed-forward; `joined` has the gate's half first, then the other.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch.library import custom_op

_BLOCK = 1024


def gated(joined: Any) -> Any:
    """silu(first half) · second half."""
    made: Any = _forward(joined)
    return made


@custom_op("sojourn::gated", mutates_args=())
def _forward(joined: torch.Tensor) -> torch.Tensor:
    made = _half(joined)
    size = made.shape[-1]
    _forward_kernel[(made.numel() // size, triton.cdiv(size, _BLOCK))](joined, made, size, None, BLOCK=_BLOCK)
    return made


@_forward.register_fake
def _half(joined: Any) -> Any:
    return joined.new_empty(*joined.shape[:-1], joined.shape[-1] // 2)


@custom_op("sojourn::gated_measured", mutates_args=())
def gated_measured(joined: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same, and the largest number of every piece of it."""
    made, most = _half_measured(joined)
    size = made.shape[-1]
    _forward_kernel[(made.numel() // size, most.shape[-1])](joined, made, size, most, BLOCK=_BLOCK)
    return made, most


@gated_measured.register_fake
def _half_measured(joined: Any) -> Any:
    return (made := _half(joined)), _largest(made)


@custom_op("sojourn::gated_back_measured", mutates_args=())
def gated_back_measured(grad: torch.Tensor, joined: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient of `joined`, and the largest number of every piece of it."""
    made, most = _whole_measured(grad, joined)
    grad = grad.contiguous()
    size = grad.shape[-1]
    _back_kernel[(grad.numel() // size, most.shape[-1])](grad, joined, made, size, most, BLOCK=_BLOCK)
    return made, most


@gated_back_measured.register_fake
def _whole_measured(grad: Any, joined: Any) -> Any:
    return torch.empty_like(joined), _largest(grad)


def _largest(made: Any) -> Any:
    size = made.shape[-1]
    return made.new_empty(made.numel() // size, triton.cdiv(size, _BLOCK), dtype=torch.float32)


@custom_op("sojourn::gated_back", mutates_args=())
def _back(grad: torch.Tensor, joined: torch.Tensor) -> torch.Tensor:
    made, grad = torch.empty_like(joined), grad.contiguous()
    size = grad.shape[-1]
    _back_kernel[(grad.numel() // size, triton.cdiv(size, _BLOCK))](grad, joined, made, size, None, BLOCK=_BLOCK)
    return made


@_back.register_fake
def _whole(grad: Any, joined: Any) -> Any:
    return torch.empty_like(joined)


def _remember(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Any) -> Any:
    return _back(grad, *ctx.saved_tensors)


_forward.register_autograd(_backward, setup_context=_remember)


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
