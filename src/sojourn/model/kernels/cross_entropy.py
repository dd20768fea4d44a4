"""Cross-entropy of logits that are there already, turned into their own gradient in place: one kernel, one row each.

Shapes: C tokens, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

_BLOCK = 8192


def losses_and_gradients(logits_CV: Any, labels_C: Any) -> Any:
    """Each token's loss, in 32 bits. `logits_CV` holds the gradient of their sum afterwards. A label below 0 does not
    count."""
    rows, vocabulary = logits_CV.shape
    losses_C = torch.empty(rows, dtype=torch.float32, device=logits_CV.device)
    if rows:
        _kernel[(rows,)](
            logits_CV, logits_CV.stride(0), labels_C, losses_C, vocabulary,
            BLOCK=min(_BLOCK, triton.next_power_of_2(vocabulary)), num_warps=16,
        )  # fmt: skip
    return losses_C


@triton.jit
def _kernel(logits, stride, labels, losses, vocabulary, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    label = tl.load(labels + row)
    counts = tl.where(label >= 0, 1.0, 0.0)
    wanted = tl.load(logits + tl.maximum(label, 0)).to(tl.float32)
    places = tl.arange(0, BLOCK)
    most, total = -float("inf"), 0.0
    for start in range(0, vocabulary, BLOCK):
        inside = start + places < vocabulary
        x = tl.load(logits + start + places, mask=inside, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(most, tl.max(x))
        total = total * tl.exp(most - higher) + tl.sum(tl.exp(x - higher))
        most = higher
    norm = most + tl.log(total)
    tl.store(losses + row, counts * (norm - wanted))
    for start in range(0, vocabulary, BLOCK):
        inside = start + places < vocabulary
        x = tl.load(logits + start + places, mask=inside, other=-float("inf")).to(tl.float32)
        share = counts * (tl.exp(x - norm) - tl.where(start + places == label, 1.0, 0.0))
        tl.store(logits + start + places, share.to(logits.dtype.element_ty), mask=inside)
