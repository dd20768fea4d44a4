"""Tensors in 8 bits, as they lie and turned, by one pass over memory. What multiplies 8 bits wants both operands to lie
along what is summed over: the forward one way, the gradient of the weights the other.

Shapes: M rows, K columns.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from sojourn.model.kernels.custom_op import operation

_ROWS, _COLUMNS = 64, 128  # of a tile


def _empty(x: Any, scale: Any, kind: Any) -> Any:
    return x.new_empty(x.shape, dtype=kind), x.new_empty(*reversed(x.shape), dtype=kind)


@operation("narrowed_both(Tensor x, Tensor scale, ScalarType kind) -> (Tensor, Tensor)", _empty)
def narrowed_both(x: Any, scale: Any, kind: Any) -> tuple[Any, Any]:
    """x / scale as it lies, and turned."""
    made: tuple[Any, Any] = _empty(x, scale, kind)
    _launch(x, scale, *made, both=True)
    return made


def _empty_turned(x: Any, scale: Any, kind: Any) -> Any:
    return x.new_empty(*reversed(x.shape), dtype=kind)


@operation("narrowed_turned(Tensor x, Tensor scale, ScalarType kind) -> Tensor", _empty_turned)
def narrowed_turned(x: Any, scale: Any, kind: Any) -> Any:
    """Only turned."""
    made = _empty_turned(x, scale, kind)
    _launch(x, scale, made, made, both=False)
    return made


def _launch(x: Any, scale: Any, lying: Any, turned: Any, both: bool) -> None:
    x = x if x.stride(1) == 1 else x.contiguous()
    rows, columns = x.shape
    _kernel[(triton.cdiv(rows, _ROWS), triton.cdiv(columns, _COLUMNS))](
        x, x.stride(0), scale, lying, turned, rows, columns, MOST=torch.finfo(turned.dtype).max,
        BOTH=both, ROWS=_ROWS, COLUMNS=_COLUMNS,
    )  # fmt: skip


@triton.jit
def _kernel(  # type: ignore[no-untyped-def]
    x, stride, scale, lying, turned, rows, columns,
    MOST: tl.constexpr, BOTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    wide = tl.load(x + row[:, None] * stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    wide = wide * (1.0 / tl.load(scale))
    made = tl.minimum(tl.maximum(wide, -MOST), MOST).to(turned.dtype.element_ty)
    if BOTH:
        tl.store(lying + row[:, None] * columns + column[None, :], made, mask=inside)
    place = column[:, None] * rows + row[None, :]
    tl.store(turned + place, tl.trans(made), mask=(column < columns)[:, None] & (row < rows)[None, :])
