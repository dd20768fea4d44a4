"""Dequantizes NF4 weights in one Triton kernel, with their double-quantized scales.

bitsandbytes uses three kernels behind much Python, which dominates small models.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCKS = 32  # blocks of weights with one scale each, per program


def dequantize_nf4(
    dtype: torch.dtype, packed: Tensor, absmax: Tensor, code: Tensor, block_size: int, offset: Tensor | None,
    absmax2: Tensor | None, code2: Tensor | None, block_size2: int, out_features: int, in_features: int,
) -> Tensor:  # fmt: skip
    """Arguments as in nf4.py; `offset`, `absmax2` and `code2` are None where `absmax` is fp32."""
    weight = torch.empty(out_features, in_features, dtype=dtype, device=packed.device)
    blocks = triton.cdiv(weight.numel(), block_size)
    _kernel[(triton.cdiv(blocks, _BLOCKS),)](
        packed.view(torch.uint8), absmax, code, offset, absmax2, code2, weight, weight.numel(), blocks, block_size2,
        BLOCKS=_BLOCKS, BYTES=block_size // 2,
    )  # fmt: skip
    return weight


@triton.jit
def _kernel(  # type: ignore[no-untyped-def]
    packed, absmax, code, offset, absmax2, code2, weight, size, blocks, block_size2,
    BLOCKS: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)  # the weights of all experts may be > 2**31
    exists = block < blocks
    scale = tl.load(absmax + block, mask=exists, other=0)
    if absmax2 is not None:
        scale2 = tl.load(absmax2 + block // block_size2, mask=exists, other=0.0)
        scale = tl.load(code2 + scale.to(tl.int32)) * scale2 + tl.load(offset)
    byte = block[:, None] * BYTES + tl.arange(0, BYTES)[None, :]
    pair = tl.load(packed + byte, mask=2 * byte < size, other=0).to(tl.int32)
    high, low = tl.load(code + (pair >> 4)) * scale[:, None], tl.load(code + (pair & 15)) * scale[:, None]
    index = block[:, None] * (2 * BYTES) + tl.arange(0, 2 * BYTES)[None, :]
    tl.store(weight + index, tl.interleave(high, low).to(weight.dtype.element_ty), mask=index < size)
