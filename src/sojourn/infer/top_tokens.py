"""What top-k and top-p keep, found on a GPU: by bisection, without sorting, and without waiting for the device."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_ONE = tl.constexpr(0x3F800000)  # the bits of 1.0; those of probabilities are ordered like them


@triton.jit
def _above(row, threshold, size, COUNTS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """How much probability, or how many tokens, are above a threshold."""
    found = tl.zeros([BLOCK], tl.float32)
    for start in range(0, size, BLOCK):
        at = start + tl.arange(0, BLOCK)
        probs = tl.load(row + at, mask=at < size, other=-1.0)
        found += tl.where(probs > threshold, 1.0 if COUNTS else probs, 0.0)
    return tl.sum(found, 0)


@triton.jit
def _lowest(row, limit, size, COUNTS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The bits of the lowest threshold above which there is less than `limit`."""
    low = limit.to(tl.int32) * 0
    high = low + _ONE
    for _ in range(31):
        middle = (low + high) // 2
        is_less = _above(row, middle.to(tl.float32, bitcast=True), size, COUNTS, BLOCK) < limit
        low = tl.where(is_less, low, tl.minimum(middle + 1, high))
        high = tl.where(is_less, middle, high)
    return high


@triton.jit
def _threshold_kernel(  # type: ignore[no-untyped-def]
    probs, top_k, top_p, out, size, HAS_K: tl.constexpr, HAS_P: tl.constexpr, BLOCK: tl.constexpr
):
    token_row = tl.program_id(0)
    row = probs + token_row.to(tl.int64) * size
    lowest, total = token_row * 0, 1.0
    if HAS_K:
        count = tl.load(top_k + token_row).to(tl.float32)
        lowest = _lowest(row, count, size, True, BLOCK)
        if HAS_P:  # of what top-k keeps
            below = tl.maximum(lowest - 1, 0).to(tl.float32, bitcast=True)
            total = tl.where(count < size, _above(row, below, size, False, BLOCK), 1.0)
    if HAS_P:
        lowest = tl.maximum(lowest, _lowest(row, tl.load(top_p + token_row) * total, size, False, BLOCK))
    tl.store(out + token_row, lowest.to(tl.float32, bitcast=True))


def keep_top(probs_BV: Tensor, top_k_B1: Tensor | None, top_p_B1: Tensor | None) -> Tensor:
    """Probabilities in fp32, with 0 for tokens that are not kept. Kept are those with fewer than `top_k` more likely
    ones, of which those whose more likely ones have less than `top_p` of the probability together."""
    rows, size = probs_BV.shape
    threshold_B1 = torch.empty(rows, 1, device=probs_BV.device)
    block = min(32_768, triton.next_power_of_2(size))
    _threshold_kernel[(rows,)](
        probs_BV.contiguous(), top_k_B1, top_p_B1, threshold_B1, size, HAS_K=top_k_B1 is not None,
        HAS_P=top_p_B1 is not None, BLOCK=block, num_warps=max(1, min(32, block // 1024)),
    )  # fmt: skip
    return probs_BV.masked_fill(probs_BV < threshold_B1, 0.0)
