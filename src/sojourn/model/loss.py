"""Cross-entropy over the vocabulary without materializing the logits of all tokens.

The LM head sees target tokens only, chunk by chunk, in one autograd function: a chunk's logits become its loss and its
gradients at once, and are discarded. LM heads with an adapter, scaling or logit soft-capping are called as they are,
under activation checkpointing, so their logits are recomputed in the backward. `advanced.chunked_loss=off` computes all
logits at once, for comparison.

Shapes: N target tokens, C of them in a chunk, D hidden size, V vocabulary size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sojourn.estimate.memory import logit_chunk_rows
from sojourn.model.kernels import fp8
from sojourn.model.kernels.cpu.library import cpu_kernels_take, linear_cross_entropy
from sojourn.model.kernels.cpu.library import cross_entropy_with_grad as cross_entropy_on_cpu
from sojourn.model.kernels.triton_support import supports_triton

_NARROW = 512


def cross_entropy_sum(lm_head: nn.Module, hidden_ND: Tensor, labels_N: Tensor, chunked: bool = True) -> Tensor:
    """Summed over the tokens. Labels below 0 are ignored."""
    if not chunked:
        return F.cross_entropy(lm_head(hidden_ND).float(), labels_N, reduction="sum")
    if type(lm_head) is nn.Linear:
        chunk = _chunk_size(lm_head, hidden_ND, triton=_uses_triton(hidden_ND))
        switches = (getattr(lm_head, "fp8", False), getattr(lm_head, "cpu_kernels", False))
        return _LinearCrossEntropy.apply(hidden_ND, lm_head.weight, lm_head.bias, labels_N, chunk, *switches)
    chunk = _chunk_size(lm_head, hidden_ND)
    chunks = zip(hidden_ND.split(chunk), labels_N.split(chunk), strict=True)
    return sum(checkpoint(cross_entropy_sum, lm_head, h, y, False, use_reentrant=False) for h, y in chunks)


def loss_and_correct(lm_head: nn.Module, hidden_ND: Tensor, labels_N: Tensor) -> tuple[Tensor, Tensor]:
    """The summed loss, and the number of tokens whose label was the most likely one."""
    loss, correct = (torch.zeros((), device=hidden_ND.device) for _ in range(2))
    chunk = _chunk_size(lm_head, hidden_ND)
    for hidden_CD, labels_C in zip(hidden_ND.split(chunk), labels_N.split(chunk), strict=True):
        logits_CV = lm_head(hidden_CD).float()
        loss += F.cross_entropy(logits_CV, labels_C, reduction="sum")
        correct += (logits_CV.argmax(-1) == labels_C).sum()
    return loss, correct


def token_losses(lm_head: nn.Module, hidden_ND: Tensor, labels_N: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of each token, and whether its label was the most likely one."""
    losses, correct = [], []
    chunk = _chunk_size(lm_head, hidden_ND)
    for hidden_CD, labels_C in zip(hidden_ND.split(chunk), labels_N.split(chunk), strict=True):
        logits_CV = lm_head(hidden_CD).float()
        losses.append(F.cross_entropy(logits_CV, labels_C, reduction="none"))
        correct.append(logits_CV.argmax(-1) == labels_C)
    return torch.cat(losses), torch.cat(correct)


def _chunk_size(lm_head: nn.Module, hidden_ND: Tensor, triton: bool = False) -> int:
    vocab_size, device_type = int(lm_head.weight.shape[0]), hidden_ND.device.type
    kind = "triton" if triton else "cpu" if device_type == "cpu" else "cuda"
    return logit_chunk_rows(vocab_size, kind, getattr(lm_head, "small_chunks", False))


def _uses_triton(tensor: Tensor) -> bool:
    return tensor.device.type == "cuda" and supports_triton()


class _LinearCrossEntropy(torch.autograd.Function):
    """LM head and loss in one: the forward computes the gradients too."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        labels_N: Tensor,
        chunk: int,
        use_fp8: bool,
        cpu_kernels: bool,
    ) -> Tensor:
        if (
            cpu_kernels
            and bias_V is None
            and all(ctx.needs_input_grad[:2])
            and _is_narrow(hidden_ND, weight_VD, labels_N)
        ):
            losses_N, *grads = linear_cross_entropy(hidden_ND, weight_VD, labels_N)
            ctx.grads = (*grads, None)
            return losses_N.sum()
        device_type = hidden_ND.device.type
        autocast = torch.is_autocast_enabled(device_type)
        dtype = torch.get_autocast_dtype(device_type) if autocast else hidden_ND.dtype
        with torch.autocast(device_type, enabled=False):
            weight = weight_VD.to(dtype)
            fp8_head = fp8.Fp8LMHead(weight) if use_fp8 else None
            ctx.cpu_kernels = cpu_kernels
            return _all_chunks(ctx, hidden_ND, weight, fp8_head, bias_V, labels_N, chunk, weight_VD.dtype)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        grads, ctx.grads = ctx.grads, None  # autograd alone holds them now, and makes no copy
        return (*(None if grad is None else grad.mul_(upstream[0]) for grad in grads), None, None, None, None)


def _is_narrow(hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor) -> bool:
    """A small LM head, as of characters: then one call is faster than torch's matmuls."""
    small = max(weight_VD.shape) <= _NARROW and len(labels_N) > 0
    return small and cpu_kernels_take(hidden_ND, weight_VD, labels_N)


def _all_chunks(
    ctx: Any,
    hidden_ND: Tensor,
    weight_VD: Tensor,
    fp8_head: fp8.Fp8LMHead | None,
    bias_V: Tensor | None,
    labels_N: Tensor,
    chunk: int,
    grad_dtype: torch.dtype,
) -> Tensor:
    needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
    grad_ND = torch.empty_like(hidden_ND) if needs_hidden else None
    grad_VD = None if len(labels_N) or not needs_weight else torch.zeros_like(weight_VD, dtype=grad_dtype)
    grad_V = torch.zeros_like(bias_V) if bias_V is not None and needs_bias else None
    loss = torch.zeros((), device=hidden_ND.device)
    for start, end in _chunk_ranges(len(labels_N), chunk, fp8.ALIGNMENT if fp8_head else 1):
        hidden_CD = hidden_ND[start:end].to(weight_VD.dtype)
        head = fp8_head if fp8_head and not (end - start) % fp8.ALIGNMENT else None
        logits_CV = head.logits(hidden_CD) if head else hidden_CD @ weight_VD.T
        if bias_V is not None:
            logits_CV = logits_CV + bias_V
        losses_C, grad_CV = _chunk_loss(logits_CV, labels_N[start:end], any(ctx.needs_input_grad[:3]), ctx.cpu_kernels)
        loss += losses_C.sum()
        if grad_CV is None:
            continue
        if grad_V is not None:
            grad_V += grad_CV.sum(0, dtype=grad_V.dtype)
        grad_CV = grad_CV.to(weight_VD.dtype)
        if head:
            grad_CD, chunk_grad_VD = head.backward(grad_CV)
            grad_VD = _add(grad_VD, chunk_grad_VD, grad_dtype)
        else:
            grad_CD = grad_CV @ weight_VD if needs_hidden else None
            if needs_weight and grad_VD is not None and grad_dtype == torch.bfloat16:
                grad_VD.addmm_(grad_CV.T, hidden_CD)  # the matmul adds: the gradient of a chunk never exists
            elif needs_weight:
                grad_VD = _add(grad_VD, grad_CV.T @ hidden_CD, grad_dtype)
        if grad_ND is not None:
            grad_ND[start:end] = grad_CD
    ctx.grads = (grad_ND, grad_VD, grad_V)
    return loss


def _add(total_VD: Tensor | None, chunk_VD: Tensor, dtype: torch.dtype) -> Tensor:
    return chunk_VD.to(dtype) if total_VD is None else total_VD.add_(chunk_VD)


def _chunk_ranges(count: int, chunk: int, alignment: int) -> Iterator[tuple[int, int]]:
    """Chunks of multiples of `alignment` tokens; the remainder comes last."""
    chunk, aligned = max(alignment, chunk - chunk % alignment), count - count % alignment
    for start in range(0, aligned, chunk):
        yield start, min(start + chunk, aligned)
    if aligned < count:
        yield aligned, count


def _chunk_loss(
    logits_CV: Tensor, labels_C: Tensor, needs_grad: bool, cpu_kernels: bool
) -> tuple[Tensor, Tensor | None]:
    """Each token's loss, and its gradient by the logits, which are overwritten. Labels below 0 are ignored."""
    if needs_grad and _uses_triton(logits_CV):
        from sojourn.model.kernels.cross_entropy import cross_entropy_with_grad

        return cross_entropy_with_grad(logits_CV, labels_C), logits_CV
    if needs_grad and cpu_kernels and cpu_kernels_take(logits_CV, labels_C):
        return cross_entropy_on_cpu(logits_CV, labels_C), logits_CV
    logits_CV, labels_C1, valid_C = logits_CV.float(), labels_C.clamp(min=0)[:, None], labels_C >= 0
    logsumexp_C1 = logits_CV.logsumexp(-1, keepdim=True)
    losses_C = (logsumexp_C1 - logits_CV.gather(1, labels_C1)).squeeze(1).masked_fill_(~valid_C, 0.0)
    if not needs_grad:
        return losses_C, None
    softmax_CV = logits_CV.sub_(logsumexp_C1.masked_fill_(~valid_C[:, None], math.inf)).exp_()
    return losses_C, softmax_CV.scatter_add_(1, labels_C1, -valid_C[:, None].to(softmax_CV))
