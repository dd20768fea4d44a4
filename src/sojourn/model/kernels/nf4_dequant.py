"""Dequantizes NF4 weights in one Triton kernel, with their double-quantized scales.

bitsandbytes uses three kernels behind much Python, which dominates small models.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024  # bytes per program, two weights each


def dequantize_nf4(
    dtype: torch.dtype, packed: Tensor, absmax: Tensor, code: Tensor, block_size: int, offset: Tensor | None,
    absmax2: Tensor | None, code2: Tensor | None, block_size2: int, out_features: int, in_features: int,
) -> Tensor:  # fmt: skip
    """Arguments as in nf4.py; `offset`, `absmax2` and `code2` are None where `absmax` is fp32."""
    weight = torch.empty(out_features, in_features, dtype=dtype, device=packed.device)
    _kernel[(triton.cdiv(weight.numel(), 2 * _BLOCK),)](
        packed.view(torch.uint8), absmax, code, offset, absmax2, code2, weight, weight.numel(), block_size,
        block_size2, BLOCK=_BLOCK,
    )  # fmt: skip
    return weight


@triton.jit
def _kernel(  # type: ignore[no-untyped-def]
    packed, absmax, code, offset, absmax2, code2, weight, size, block_size, block_size2, BLOCK: tl.constexpr
):  # fmt: skip
    start = tl.program_id(0) * BLOCK
    byte = start + tl.arange(0, BLOCK)
    mask = 2 * byte < size
    pair = tl.load(packed + byte, mask=mask, other=0).to(tl.int32)
    block = 2 * byte // block_size
    scale = tl.load(absmax + block, mask=mask, other=0)
    if absmax2 is not None:
        scale2 = tl.load(absmax2 + block // block_size2, mask=mask, other=0.0)
        scale = tl.load(code2 + scale.to(tl.int32)) * scale2 + tl.load(offset)
    high, low = tl.load(code + (pair >> 4)) * scale, tl.load(code + (pair & 15)) * scale
    index = 2 * start + tl.arange(0, 2 * BLOCK)
    tl.store(weight + index, tl.interleave(high, low).to(weight.dtype.element_ty), mask=index < size)
