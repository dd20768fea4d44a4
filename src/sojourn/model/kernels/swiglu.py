"""SwiGLU, silu(gate) · up, of a gate and an up projection that one matmul made: one pass over memory each way. For
experts, times each row's routing weight.

Shapes: M tokens, F MLP width; `gate_up` (M, 2F) has the gate's half first, then up's.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sojourn.model.kernels.custom_op import custom_op, register_autograd

_BLOCK = 1024
_TILE_ROWS, _TILE_COLUMNS = 32, 128  # of a tile that is transposed


def _empty_out(gate_up: Tensor) -> Tensor:
    return gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)


def _empty_grad(grad: Tensor, gate_up: Tensor) -> Tensor:
    return torch.empty_like(gate_up)


def _empty_amax(gate_up: Tensor) -> Tensor:
    """One amax per block: of the result, and of `gate_up`."""
    width = gate_up.shape[-1] // 2
    return gate_up.new_empty(2, gate_up.numel() // width // 2, triton.cdiv(width, _BLOCK), dtype=torch.float32)


def _empty_fp8(grad: Tensor, gate_up: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    shape, dtype = gate_up.flatten(0, -2).shape, torch.float8_e5m2
    return gate_up.new_empty(shape, dtype=dtype), gate_up.new_empty(*reversed(shape), dtype=dtype)


@custom_op("swiglu(Tensor gate_up) -> Tensor", _empty_out)
def swiglu(gate_up: Tensor) -> Tensor:
    return _forward(gate_up, None)


@custom_op(
    "swiglu_amax(Tensor gate_up) -> (Tensor, Tensor)", lambda gate_up: (_empty_out(gate_up), _empty_amax(gate_up))
)
def swiglu_amax(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """The same, and the amax of every block: of the result, and of `gate_up`."""
    amax = _empty_amax(gate_up)
    return _forward(gate_up, amax), amax


@custom_op("swiglu_backward(Tensor grad, Tensor gate_up) -> Tensor", _empty_grad)
def swiglu_backward(grad: Tensor, gate_up: Tensor) -> Tensor:
    """The gradient of `gate_up`."""
    return _backward(grad, gate_up, torch.empty_like(gate_up))


def swiglu_backward_(grad: Tensor, gate_up: Tensor) -> Tensor:
    """The same; it overwrites `gate_up`."""
    return _backward(grad, gate_up, gate_up)


def _backward(grad: Tensor, gate_up: Tensor, grad_gate_up: Tensor) -> Tensor:
    grad, width = grad.contiguous(), grad.shape[-1]
    grid = (grad.numel() // width, triton.cdiv(width, _BLOCK))
    _backward_kernel[grid](grad, gate_up, grad_gate_up, width, BLOCK=_BLOCK)
    return grad_gate_up


@custom_op("swiglu_backward_fp8(Tensor grad, Tensor gate_up, Tensor scale) -> (Tensor, Tensor)", _empty_fp8)
def swiglu_backward_fp8(grad: Tensor, gate_up: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of `gate_up` / scale in E5M2: row-major and transposed."""
    row_major, transposed = _empty_fp8(grad, gate_up, scale)
    grad = grad.flatten(0, -2).contiguous()
    rows, width = grad.shape
    _backward_fp8_kernel[(triton.cdiv(rows, _TILE_ROWS), triton.cdiv(width, _TILE_COLUMNS))](
        grad, gate_up, scale, row_major.view(torch.uint8), transposed.view(torch.uint8), rows, width,
        ROWS=_TILE_ROWS, COLUMNS=_TILE_COLUMNS,
    )  # fmt: skip
    return row_major, transposed


@custom_op("weighted_swiglu(Tensor gate_up, Tensor weights) -> Tensor", lambda gate_up, _: _empty_out(gate_up))
def weighted_swiglu(gate_up: Tensor, weights_M: Tensor) -> Tensor:
    """Each row times its weight."""
    return _forward(gate_up, None, weights_M.contiguous())


@custom_op(
    "weighted_swiglu_backward(Tensor grad, Tensor gate_up, Tensor weights) -> (Tensor, Tensor)",
    lambda grad, gate_up, weights: (torch.empty_like(gate_up), torch.empty_like(weights)),
)
def weighted_swiglu_backward(grad: Tensor, gate_up: Tensor, weights_M: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of `gate_up` and of the weights."""
    grad, weights_M, width = grad.contiguous(), weights_M.contiguous(), grad.shape[-1]
    grad_gate_up, grad_weights_M = torch.empty_like(gate_up), torch.empty_like(weights_M)
    _weighted_backward_kernel[(len(weights_M),)](
        grad, gate_up, weights_M, grad_gate_up, grad_weights_M, width, BLOCK=_BLOCK
    )
    return grad_gate_up, grad_weights_M


def _forward(gate_up: Tensor, amax: Tensor | None, weights_M: Tensor | None = None) -> Tensor:
    out = _empty_out(gate_up)
    width = out.shape[-1]
    grid = (out.numel() // width, triton.cdiv(width, _BLOCK))
    _forward_kernel[grid](gate_up, out, width, amax, weights_M, BLOCK=_BLOCK)
    return out


def _setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs)


register_autograd("swiglu", _setup_context, lambda ctx, grad: swiglu_backward(grad, *ctx.saved_tensors))
register_autograd(
    "weighted_swiglu", _setup_context, lambda ctx, grad: weighted_swiglu_backward(grad, *ctx.saved_tensors)
)


@triton.jit
def _forward_kernel(gate_up, out, width, amax, weights, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < width
    gate_up += row * 2 * width
    gate = tl.load(gate_up + offsets, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + width + offsets, mask=mask, other=0.0).to(tl.float32)
    y = gate * tl.sigmoid(gate) * up
    if weights is not None:
        y *= tl.load(weights + row).to(tl.float32)
    tl.store(out + row * width + offsets, y.to(out.dtype.element_ty), mask=mask)
    if amax is not None:
        amax += row * tl.num_programs(1) + tl.program_id(1)
        tl.store(amax, tl.max(tl.abs(y)))
        tl.store(amax + tl.num_programs(0) * tl.num_programs(1), tl.max(tl.maximum(tl.abs(gate), tl.abs(up))))


@triton.jit
def _gradients(grad, gate, up):  # type: ignore[no-untyped-def]
    sigmoid = tl.sigmoid(gate)
    return grad * up * sigmoid * (1 + gate * (1 - sigmoid)), grad * gate * sigmoid


@triton.jit
def _backward_kernel(grad, gate_up, grad_gate_up, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < width
    gate_up += row * 2 * width
    grad_gate_up += row * 2 * width
    upstream = tl.load(grad + row * width + offsets, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_up + offsets, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + width + offsets, mask=mask, other=0.0).to(tl.float32)
    grad_gate, grad_up = _gradients(upstream, gate, up)
    tl.store(grad_gate_up + offsets, grad_gate.to(grad_gate_up.dtype.element_ty), mask=mask)
    tl.store(grad_gate_up + width + offsets, grad_up.to(grad_gate_up.dtype.element_ty), mask=mask)


@triton.jit
def _weighted_backward_kernel(  # type: ignore[no-untyped-def]
    grad, gate_up, weights, grad_gate_up, grad_weights, width, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    weight = tl.load(weights + row).to(tl.float32)
    grad += row * width
    gate_up += row * 2 * width
    grad_gate_up += row * 2 * width
    grad_weight = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, width, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        mask = offsets < width
        upstream = tl.load(grad + offsets, mask=mask, other=0.0).to(tl.float32)
        gate = tl.load(gate_up + offsets, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(gate_up + width + offsets, mask=mask, other=0.0).to(tl.float32)
        grad_gate, grad_up = _gradients(upstream * weight, gate, up)
        tl.store(grad_gate_up + offsets, grad_gate.to(grad_gate_up.dtype.element_ty), mask=mask)
        tl.store(grad_gate_up + width + offsets, grad_up.to(grad_gate_up.dtype.element_ty), mask=mask)
        grad_weight += upstream * gate * tl.sigmoid(gate) * up
    tl.store(grad_weights + row, tl.sum(grad_weight).to(grad_weights.dtype.element_ty))


@triton.jit
def _to_e5m2(x):  # type: ignore[no-untyped-def]
    """Its bits: the upper byte of an fp16, rounded to nearest even. The hardware's conversion was wrong in this kernel
    (Triton 3.6): every fourth transposed value was another one."""
    bits = tl.minimum(tl.maximum(x, -57344.0), 57344.0).to(tl.float16).to(tl.uint16, bitcast=True)
    return ((bits + 127 + ((bits >> 8) & 1)) >> 8).to(tl.uint8)


@triton.jit
def _backward_fp8_kernel(  # type: ignore[no-untyped-def]
    grad, gate_up, scale, row_major, transposed, rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    mask = (row < rows)[:, None] & (column < width)[None, :]
    offsets = row[:, None] * 2 * width + column[None, :]
    upstream = tl.load(grad + row[:, None] * width + column[None, :], mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_up + offsets, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + width + offsets, mask=mask, other=0.0).to(tl.float32)
    grad_gate, grad_up = _gradients(upstream * (1.0 / tl.load(scale)), gate, up)
    grad_gate, grad_up = _to_e5m2(grad_gate), _to_e5m2(grad_up)
    tl.store(row_major + offsets, grad_gate, mask=mask)
    tl.store(row_major + width + offsets, grad_up, mask=mask)
    offsets = column[:, None] * rows + row[None, :]
    mask = (column < width)[:, None] & (row < rows)[None, :]
    tl.store(transposed + offsets, tl.trans(grad_gate), mask=mask)
    tl.store(transposed + width.to(tl.int64) * rows + offsets, tl.trans(grad_up), mask=mask)
