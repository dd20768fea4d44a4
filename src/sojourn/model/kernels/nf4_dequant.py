"""Weights of 4 bits, widened by one kernel: their scales, which may be in 8 bits themselves, are made on the way.

bitsandbytes does it in three kernels behind much Python, for which small models wait.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

_BLOCK = 1024  # bytes at a time, two weights each


def widened(
    dtype: Any, packed: Any, scales: Any, code: Any, block: int, offset: Any, scales2: Any, code2: Any, block2: int,
    outputs: int, inputs: int,
) -> Any:  # fmt: skip
    """As in nf4.py; `offset`, `scales2` and `code2` are None where scales are in 32 bits."""
    made = torch.empty(outputs, inputs, dtype=dtype, device=packed.device)
    _kernel[(triton.cdiv(made.numel(), 2 * _BLOCK),)](
        packed.view(torch.uint8), scales, code, offset, scales2, code2, made, made.numel(), block, block2, BLOCK=_BLOCK
    )
    return made


@triton.jit
def _kernel(  # type: ignore[no-untyped-def]
    packed, scales, code, offset, scales2, code2, made, size, block, block2, BLOCK: tl.constexpr
):  # fmt: skip
    first = tl.program_id(0) * BLOCK
    places = first + tl.arange(0, BLOCK)
    inside = 2 * places < size
    pair = tl.load(packed + places, mask=inside, other=0).to(tl.int32)
    group = 2 * places // block
    scale = tl.load(scales + group, mask=inside, other=0)
    if scales2 is not None:
        inner = tl.load(scales2 + group // block2, mask=inside, other=0.0)
        scale = tl.load(code2 + scale.to(tl.int32)) * inner + tl.load(offset)
    high, low = tl.load(code + (pair >> 4)) * scale, tl.load(code + (pair & 15)) * scale
    targets = 2 * first + tl.arange(0, 2 * BLOCK)
    tl.store(made + targets, tl.interleave(high, low).to(made.dtype.element_ty), mask=targets < size)
