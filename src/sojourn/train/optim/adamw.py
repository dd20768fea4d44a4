"""AdamW for GPUs: torch's fused AdamW, with a Triton kernel of our own for large tensors.

Where gradient clipping is fused into the step, torch writes the clipped gradients back, which nobody reads, and
processes tensors in small chunks. Ours makes one pass at memory bandwidth.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

LARGE = 2**20  # elements; below that torch's multi-tensor kernel is faster
_BLOCK = 2048


class AdamW(torch.optim.AdamW):
    """State, settings and results are torch's. A parameter without state gets its first step from torch."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        done = []
        for group in self.param_groups:
            large = [parameter for parameter in group["params"] if self._fits_kernel(parameter)]
            if large:
                self._update(group, large)
            done += [(parameter, parameter.grad) for parameter in large]
        for parameter, _ in done:
            parameter.grad = None  # so that torch skips it
        super().step()
        for parameter, grad in done:
            parameter.grad = grad

    def _fits_kernel(self, parameter: Tensor) -> bool:
        grad, state = parameter.grad, self.state.get(parameter)
        if grad is None or not state or parameter.numel() < LARGE:
            return False
        tensors = (parameter, grad, state["exp_avg"], state["exp_avg_sq"])
        return all(one.is_cuda and one.dtype == torch.float32 and one.is_contiguous() for one in tensors)

    def _update(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        """`grad_scale` and `found_inf` as in torch's fused optimizers."""
        scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        states = [self.state[parameter] for parameter in parameters]
        steps = [state["step"] for state in states]
        if found_inf is None:
            torch._foreach_add_(steps, 1)
        else:  # one tensor each: torch would read a shared one on the host, which waits for the whole step
            torch._foreach_add_(steps, [1 - found_inf] * len(steps))
        counts = torch.stack(steps).double()
        corrections = torch.stack([1 - beta**counts for beta in group["betas"]], 1).float()
        for number, (parameter, state) in enumerate(zip(parameters, states, strict=True)):
            size = parameter.numel()
            _kernel[(triton.cdiv(size, _BLOCK),)](
                parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"], corrections[number], scale, found_inf,
                size, group["lr"], 1 - group["lr"] * group["weight_decay"], *group["betas"], group["eps"],
                BLOCK=_BLOCK,
            )  # fmt: skip


@triton.jit
def _kernel(  # type: ignore[no-untyped-def]
    weights, grads, exp_avgs, exp_avg_sqs, corrections, scale, found_inf, size, lr, decay,
    BETA1: tl.constexpr, BETA2: tl.constexpr, EPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if found_inf is not None:  # noqa: SIM102  the first is known at compile time, the second is not
        if tl.load(found_inf) != 0.0:
            return
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < size
    grad = tl.load(grads + offsets, mask=inside)
    if scale is not None:
        grad = grad / tl.load(scale)
    exp_avg = tl.load(exp_avgs + offsets, mask=inside) * BETA1 + grad * (1 - BETA1)
    exp_avg_sq = tl.load(exp_avg_sqs + offsets, mask=inside) * BETA2 + grad * grad * (1 - BETA2)
    tl.store(exp_avgs + offsets, exp_avg, mask=inside)
    tl.store(exp_avg_sqs + offsets, exp_avg_sq, mask=inside)
    denominator = tl.sqrt(exp_avg_sq) / tl.sqrt(tl.load(corrections + 1)) + EPS
    weight = tl.load(weights + offsets, mask=inside) * decay
    tl.store(weights + offsets, weight - lr / tl.load(corrections) * (exp_avg / denominator), mask=inside)
