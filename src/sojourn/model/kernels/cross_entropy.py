"""Cross-entropy of given logits, overwritten by their gradient: one Triton kernel, one program per row.

Shapes: C tokens, V vocabulary size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 8192


def cross_entropy_with_grad(logits_CV: Tensor, labels_C: Tensor) -> Tensor:
    """Each token's loss in fp32. Overwrites `logits_CV` with the gradient of the losses' sum. Labels below 0 are
    ignored."""
    rows, vocab_size = logits_CV.shape
    losses_C = torch.empty(rows, dtype=torch.float32, device=logits_CV.device)
    if rows:
        _kernel[(rows,)](
            logits_CV, logits_CV.stride(0), labels_C, losses_C, vocab_size,
            BLOCK=min(_BLOCK, triton.next_power_of_2(vocab_size)), num_warps=16,
        )  # fmt: skip
    return losses_C


@triton.jit
def _kernel(logits, stride, labels, losses, vocab_size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    label = tl.load(labels + row)
    weight = tl.where(label >= 0, 1.0, 0.0)
    label_logit = tl.load(logits + tl.maximum(label, 0)).to(tl.float32)
    offsets = tl.arange(0, BLOCK)
    running_max, running_sum = -float("inf"), 0.0
    for start in range(0, vocab_size, BLOCK):
        mask = start + offsets < vocab_size
        x = tl.load(logits + start + offsets, mask=mask, other=-float("inf")).to(tl.float32)
        new_max = tl.maximum(running_max, tl.max(x))
        running_sum = running_sum * tl.exp(running_max - new_max) + tl.sum(tl.exp(x - new_max))
        running_max = new_max
    logsumexp = running_max + tl.log(running_sum)
    tl.store(losses + row, weight * (logsumexp - label_logit))
    for start in range(0, vocab_size, BLOCK):
        mask = start + offsets < vocab_size
        x = tl.load(logits + start + offsets, mask=mask, other=-float("inf")).to(tl.float32)
        grad = weight * (tl.exp(x - logsumexp) - tl.where(start + offsets == label, 1.0, 0.0))
        tl.store(logits + start + offsets, grad.to(logits.dtype.element_ty), mask=mask)
