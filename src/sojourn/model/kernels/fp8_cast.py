"""Casts a matrix to FP8, row-major and transposed, in one pass over memory.

FP8 GEMMs need both operands contiguous along the dimension that is summed over: the forward sums over input features,
the gradient of the weight over tokens. So every operand is needed both ways.

Shapes: M rows, K columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sojourn.model.kernels.custom_op import custom_op

_TILE_ROWS, _TILE_COLUMNS = 64, 128


def _empty_both(x_MK: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return x_MK.new_empty(x_MK.shape, dtype=dtype), x_MK.new_empty(*reversed(x_MK.shape), dtype=dtype)


@custom_op("cast_and_transpose(Tensor x, Tensor scale, ScalarType dtype) -> (Tensor, Tensor)", _empty_both)
def cast_and_transpose(x_MK: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x / scale in `dtype`: row-major (MK) and transposed (KM)."""
    row_major, transposed = _empty_both(x_MK, scale, dtype)
    _launch(x_MK, scale, row_major, transposed, write_row_major=True)
    return row_major, transposed


def _empty_transposed(x_MK: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return x_MK.new_empty(*reversed(x_MK.shape), dtype=dtype)


@custom_op("cast_transposed(Tensor x, Tensor scale, ScalarType dtype) -> Tensor", _empty_transposed)
def cast_transposed(x_MK: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The transposed one only."""
    transposed = _empty_transposed(x_MK, scale, dtype)
    _launch(x_MK, scale, transposed, transposed, write_row_major=False)
    return transposed


def _launch(x: Tensor, scale: Tensor, row_major: Tensor, transposed: Tensor, write_row_major: bool) -> None:
    x = x if x.stride(1) == 1 else x.contiguous()
    rows, columns = x.shape
    _kernel[(triton.cdiv(rows, _TILE_ROWS), triton.cdiv(columns, _TILE_COLUMNS))](
        x, x.stride(0), scale, row_major, transposed, rows, columns, FP8_MAX=torch.finfo(transposed.dtype).max,
        WRITE_ROW_MAJOR=write_row_major, ROWS=_TILE_ROWS, COLUMNS=_TILE_COLUMNS,
    )  # fmt: skip


@triton.jit
def _kernel(  # type: ignore[no-untyped-def]
    x, stride, scale, row_major, transposed, rows, columns,
    FP8_MAX: tl.constexpr, WRITE_ROW_MAJOR: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    value = tl.load(x + row[:, None] * stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
    value = value * (1.0 / tl.load(scale))
    fp8 = tl.minimum(tl.maximum(value, -FP8_MAX), FP8_MAX).to(transposed.dtype.element_ty)
    if WRITE_ROW_MAJOR:
        tl.store(row_major + row[:, None] * columns + column[None, :], fp8, mask=mask)
    offsets = column[:, None] * rows + row[None, :]
    tl.store(transposed + offsets, tl.trans(fp8), mask=(column < columns)[:, None] & (row < rows)[None, :])
