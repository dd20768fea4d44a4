"""Sums some rows of a matrix for each token, in fp32 and in one pass over memory: what a token's experts return.

Shapes: T tokens, k rows per token, S rows, D features.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


def gather_sum(y_SD: Tensor, rows_Tk: Tensor) -> Tensor:
    """Like `y_SD[rows_Tk].sum(1)`."""
    count, features = len(rows_Tk), y_SD.shape[1]
    out_TD = torch.empty(count, features, dtype=y_SD.dtype, device=y_SD.device)
    grid = (count, triton.cdiv(features, _BLOCK))
    _kernel[grid](y_SD.contiguous(), rows_Tk, out_TD, features, K=rows_Tk.shape[1], BLOCK=_BLOCK)
    return out_TD


@triton.jit
def _kernel(y, rows, out, features, K: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < features
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for one in tl.static_range(K):
        row = tl.load(rows + token * K + one).to(tl.int64)
        total += tl.load(y + row * features + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + token * features + column, total.to(out.dtype.element_ty), mask=mask)
