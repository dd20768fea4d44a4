"""The gate of a feed-forward whose two inputs were made in one multiplication: one pass over memory, forward and back.

Shapes: M tokens, F width of the feed-forward; `joined` has the gate's half first, then the other.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from sojourn.model.kernels.custom_op import differentiable, operation

_BLOCK = 1024
_ROWS, _COLUMNS = 32, 128  # of a tile that is turned


def _half(joined: Any) -> Any:
    return joined.new_empty(*joined.shape[:-1], joined.shape[-1] // 2)


def _whole(grad: Any, joined: Any) -> Any:
    return torch.empty_like(joined)


def _pieces(joined: Any) -> Any:
    """Room for the largest numbers of every piece: of what is made, and of what it is made from."""
    size = joined.shape[-1] // 2
    return joined.new_empty(2, joined.numel() // size // 2, triton.cdiv(size, _BLOCK), dtype=torch.float32)


def _both(grad: Any, joined: Any, scale: Any) -> Any:
    shape, kind = joined.flatten(0, -2).shape, torch.float8_e5m2
    return joined.new_empty(shape, dtype=kind), joined.new_empty(*reversed(shape), dtype=kind)


@operation("gated(Tensor joined) -> Tensor", _half)
def gated(joined: Any) -> Any:
    """silu(first half) · second half."""
    return _forward(joined, None)


@operation("gated_measured(Tensor joined) -> (Tensor, Tensor)", lambda joined: (_half(joined), _pieces(joined)))
def gated_measured(joined: Any) -> tuple[Any, Any]:
    """The same, and the largest numbers of every piece: of it, and of `joined`."""
    most = _pieces(joined)
    return _forward(joined, most), most


@operation("gated_back(Tensor grad, Tensor joined) -> Tensor", _whole)
def gated_back(grad: Any, joined: Any) -> Any:
    """The gradient of `joined`."""
    made, grad = torch.empty_like(joined), grad.contiguous()
    size = grad.shape[-1]
    _back_kernel[(grad.numel() // size, triton.cdiv(size, _BLOCK))](grad, joined, made, size, BLOCK=_BLOCK)
    return made


@operation("gated_back_narrowed(Tensor grad, Tensor joined, Tensor scale) -> (Tensor, Tensor)", _both)
def gated_back_narrowed(grad: Any, joined: Any, scale: Any) -> tuple[Any, Any]:
    """The same / scale in e5m2, as it lies and turned."""
    made: tuple[Any, Any] = _both(grad, joined, scale)
    grad = grad.flatten(0, -2).contiguous()
    rows, size = grad.shape
    _narrowed_kernel[(triton.cdiv(rows, _ROWS), triton.cdiv(size, _COLUMNS))](
        grad, joined, scale, *(one.view(torch.uint8) for one in made), rows, size, ROWS=_ROWS, COLUMNS=_COLUMNS
    )
    return made


def _forward(joined: Any, most: Any) -> Any:
    made = _half(joined)
    size = made.shape[-1]
    _forward_kernel[(made.numel() // size, triton.cdiv(size, _BLOCK))](joined, made, size, most, BLOCK=_BLOCK)
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
        most += row * tl.num_programs(1) + tl.program_id(1)
        tl.store(most, tl.max(tl.abs(y)))
        tl.store(most + tl.num_programs(0) * tl.num_programs(1), tl.max(tl.maximum(tl.abs(gate), tl.abs(other))))


@triton.jit
def _gradients(upstream, gate, other):  # type: ignore[no-untyped-def]
    share = tl.sigmoid(gate)
    return upstream * other * share * (1 + gate * (1 - share)), upstream * gate * share


@triton.jit
def _back_kernel(grad, joined, made, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = places < size
    joined += row * 2 * size
    made += row * 2 * size
    upstream = tl.load(grad + row * size + places, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(joined + places, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(joined + size + places, mask=inside, other=0.0).to(tl.float32)
    by_gate, by_other = _gradients(upstream, gate, other)
    tl.store(made + places, by_gate.to(made.dtype.element_ty), mask=inside)
    tl.store(made + size + places, by_other.to(made.dtype.element_ty), mask=inside)


@triton.jit
def _e5m2(x):  # type: ignore[no-untyped-def]
    """Its bits: the upper half of a 16-bit float, rounded to the nearest. The hardware's own conversion came out wrong
    in this kernel (triton 3.6): every fourth of the numbers that were turned was another."""
    bits = tl.minimum(tl.maximum(x, -57344.0), 57344.0).to(tl.float16).to(tl.uint16, bitcast=True)
    return ((bits + 127 + ((bits >> 8) & 1)) >> 8).to(tl.uint8)


@triton.jit
def _narrowed_kernel(  # type: ignore[no-untyped-def]
    grad, joined, scale, lying, turned, rows, size, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    inside = (row < rows)[:, None] & (column < size)[None, :]
    place = row[:, None] * 2 * size + column[None, :]
    upstream = tl.load(grad + row[:, None] * size + column[None, :], mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(joined + place, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(joined + size + place, mask=inside, other=0.0).to(tl.float32)
    by_gate, by_other = _gradients(upstream * (1.0 / tl.load(scale)), gate, other)
    by_gate, by_other = _e5m2(by_gate), _e5m2(by_other)
    tl.store(lying + place, by_gate, mask=inside)
    tl.store(lying + size + place, by_other, mask=inside)
    place = column[:, None] * rows + row[None, :]
    inside = (column < size)[:, None] & (row < rows)[None, :]
    tl.store(turned + place, tl.trans(by_gate), mask=inside)
    tl.store(turned + size.to(tl.int64) * rows + place, tl.trans(by_other), mask=inside)
