"""Cross-entropy over the vocabulary without ever holding the logits of all tokens at once.

Shapes: N target tokens, C of them in a chunk, D model width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from sojourn.model.kernels import fp8
from sojourn.model.kernels.triton_support import supports_triton

# Of logits, were they in 32 bits. On a CPU they should stay near its cache; our kernel needs them in 16 bits only.
_CHUNK_BYTES = {"cuda": 2**28, "kernel": 2**30, "cpu": 2**24}
_LEAST_ROWS = 256  # fewer leave the multiplication starved


def loss_sum(head: Any, hidden_ND: Any, labels_N: Any, whole: bool = False) -> Any:
    """Summed over the tokens. `head` makes logits of hidden states."""
    if whole:
        return F.cross_entropy(head(hidden_ND).float(), labels_N, reduction="sum")
    if type(head) is torch.nn.Linear:
        rows = _chunk_rows(head, hidden_ND, kernel=_has_kernel(hidden_ND))
        narrow = getattr(head, "in_8_bits", False)
        return _LinearCrossEntropy.apply(hidden_ND, head.weight, head.bias, labels_N, rows, narrow)
    rows = _chunk_rows(head, hidden_ND)
    # A head with an adapter, or of its own kind: as it is, its logits made again in the backward.
    parts = zip(hidden_ND.split(rows), labels_N.split(rows), strict=True)
    return sum(checkpoint(loss_sum, head, h, y, True, use_reentrant=False) for h, y in parts)


def score(head: Any, hidden_ND: Any, labels_N: Any) -> tuple[Any, Any]:
    """The summed loss, and of how many tokens it was the likeliest."""
    loss, hits = (torch.zeros((), device=hidden_ND.device) for _ in range(2))
    rows = _chunk_rows(head, hidden_ND)
    for hidden_CD, labels_C in zip(hidden_ND.split(rows), labels_N.split(rows), strict=True):
        logits_CV = head(hidden_CD).float()
        loss += F.cross_entropy(logits_CV, labels_C, reduction="sum")
        hits += (logits_CV.argmax(-1) == labels_C).sum()
    return loss, hits


def _chunk_rows(head: Any, hidden_ND: Any, kernel: bool = False) -> int:
    vocabulary, device = int(head.weight.shape[0]), hidden_ND.device.type
    chunk = _CHUNK_BYTES["kernel" if kernel else device if device == "cpu" else "cuda"]
    return max(_LEAST_ROWS, chunk // (4 * vocabulary))


def _has_kernel(tensor: Any) -> bool:
    return tensor.device.type == "cuda" and supports_triton()


class _LinearCrossEntropy(torch.autograd.Function):
    """Head and loss in one: each chunk's logits become its loss and its gradients at once, and are forgotten."""

    @staticmethod
    def forward(ctx: Any, hidden_ND: Any, weight_VD: Any, bias_V: Any, labels_N: Any, rows: int, narrow: bool) -> Any:
        device = hidden_ND.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden_ND.dtype
        with torch.autocast(device, enabled=False):
            weight = weight_VD.to(dtype)
            head = fp8.Head(weight) if narrow else None
            return _all_chunks(ctx, hidden_ND, weight, head, bias_V, labels_N, rows, weight_VD.dtype)

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> Any:
        return (*(None if grad is None else grad.mul_(upstream[0]) for grad in ctx.grads), None, None, None)


def _all_chunks(
    ctx: Any, hidden_ND: Any, weight_VD: Any, head: fp8.Head | None, bias_V: Any, labels_N: Any, rows: int, kept_in: Any
) -> Any:
    wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
    grad_ND = torch.empty_like(hidden_ND) if wants_hidden else None
    grad_VD = None if len(labels_N) or not wants_weight else torch.zeros_like(weight_VD, dtype=kept_in)
    grad_V = torch.zeros_like(bias_V) if bias_V is not None and wants_bias else None
    loss = torch.zeros((), device=hidden_ND.device)
    for start, end in _cuts(len(labels_N), rows, fp8.STEP if head else 1):
        hidden_CD = hidden_ND[start:end].to(weight_VD.dtype)
        narrow = head if head and not (end - start) % fp8.STEP else None
        logits_CV = narrow.logits(hidden_CD) if narrow else hidden_CD @ weight_VD.T
        if bias_V is not None:
            logits_CV = logits_CV + bias_V
        losses_C, grad_CV = _loss_of_chunk(logits_CV, labels_N[start:end], any(ctx.needs_input_grad[:3]))
        loss += losses_C.sum()
        if grad_CV is None:
            continue
        if grad_V is not None:
            grad_V += grad_CV.sum(0, dtype=grad_V.dtype)
        grad_CV = grad_CV.to(weight_VD.dtype)
        if narrow:
            of_hidden_CD, part_VD = narrow.back(grad_CV)
        else:
            of_hidden_CD = grad_CV @ weight_VD if wants_hidden else None
            part_VD = grad_CV.T @ hidden_CD if wants_weight else None
        if grad_ND is not None:
            grad_ND[start:end] = of_hidden_CD
        if part_VD is not None:
            grad_VD = part_VD.to(kept_in) if grad_VD is None else grad_VD.add_(part_VD)
    ctx.grads = (grad_ND, grad_VD, grad_V)
    return loss


def _cuts(count: int, rows: int, step: int) -> Iterator[tuple[int, int]]:
    """Chunks of so many rows, whole steps of them; what is left over comes last."""
    rows, whole = max(step, rows - rows % step), count - count % step
    for start in range(0, whole, rows):
        yield start, min(start + rows, whole)
    if whole < count:
        yield whole, count


def _loss_of_chunk(logits_CV: Any, labels_C: Any, wants_gradient: bool) -> tuple[Any, Any]:
    """Each token's loss, and its gradient by the logits, which are used up. A label below 0 does not count."""
    if wants_gradient and _has_kernel(logits_CV):
        from sojourn.model.kernels.cross_entropy import losses_and_gradients

        return losses_and_gradients(logits_CV, labels_C), logits_CV
    logits_CV, labels_C1, counts_C = logits_CV.float(), labels_C.clamp(min=0)[:, None], labels_C >= 0
    norm_C1 = logits_CV.logsumexp(-1, keepdim=True)
    losses_C = (norm_C1 - logits_CV.gather(1, labels_C1)).squeeze(1).masked_fill_(~counts_C, 0.0)
    if not wants_gradient:
        return losses_C, None
    shares_CV = logits_CV.sub_(norm_C1.masked_fill_(~counts_C[:, None], math.inf)).exp_()
    return losses_C, shares_CV.scatter_add_(1, labels_C1, -counts_C[:, None].to(shares_CV))
