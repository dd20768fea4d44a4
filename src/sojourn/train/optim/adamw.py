"""AdamW for GPUs: torch's fused one, with large tensors left to a kernel of our own.

Where gradients are shortened on the way, torch's writes them back, which nobody reads; and its tensors come in small
pieces. Ours passes over memory once, as fast as memory is.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

LARGE = 2**20  # numbers; below that torch's way, many tensors at once, is the faster one
_BLOCK = 2048


class AdamW(torch.optim.AdamW):
    """State, settings and results are torch's. Where a parameter has no state yet, torch makes the step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        done = []
        for group in self.param_groups:
            mine = [parameter for parameter in group["params"] if self._is_mine(parameter)]
            if mine:
                self._update(group, mine)
            done += [(parameter, parameter.grad) for parameter in mine]
        for parameter, _ in done:
            parameter.grad = None  # so that torch leaves it out
        super().step()
        for parameter, grad in done:
            parameter.grad = grad

    def _is_mine(self, parameter: Any) -> bool:
        grad, state = parameter.grad, self.state.get(parameter)
        if grad is None or not state or parameter.numel() < LARGE:
            return False
        tensors = (parameter, grad, state["exp_avg"], state["exp_avg_sq"])
        return all(one.is_cuda and one.dtype == torch.float32 and one.is_contiguous() for one in tensors)

    def _update(self, group: Any, parameters: list[Any]) -> None:
        """`grad_scale` and `found_inf` as torch's own knows them."""
        scale, bad = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        states = [self.state[parameter] for parameter in parameters]
        steps = [state["step"] for state in states]
        if bad is None:
            torch._foreach_add_(steps, 1)
        else:  # each its own, as a tensor for all of them would be read here, which waits for the whole step
            torch._foreach_add_(steps, [1 - bad] * len(steps))
        made = torch.stack(steps).double()
        corrections = torch.stack([1 - beta**made for beta in group["betas"]], 1).float()
        for number, (parameter, state) in enumerate(zip(parameters, states, strict=True)):
            size = parameter.numel()
            _kernel[(triton.cdiv(size, _BLOCK),)](
                parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"], corrections[number], scale, bad,
                size, group["lr"], 1 - group["lr"] * group["weight_decay"], *group["betas"], group["eps"],
                BLOCK=_BLOCK,
            )  # fmt: skip


@triton.jit
def _kernel(  # type: ignore[no-untyped-def]
    weights, grads, means, squares, corrections, scale, bad, size, lr, decay,
    BETA1: tl.constexpr, BETA2: tl.constexpr, EPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if bad is not None:  # noqa: SIM102  the one is known when this is compiled, the other is not
        if tl.load(bad) != 0.0:
            return
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < size
    grad = tl.load(grads + places, mask=inside)
    if scale is not None:
        grad = grad / tl.load(scale)
    mean = tl.load(means + places, mask=inside) * BETA1 + grad * (1 - BETA1)
    square = tl.load(squares + places, mask=inside) * BETA2 + grad * grad * (1 - BETA2)
    tl.store(means + places, mean, mask=inside)
    tl.store(squares + places, square, mask=inside)
    below = tl.sqrt(square) / tl.sqrt(tl.load(corrections + 1)) + EPS
    weight = tl.load(weights + places, mask=inside) * decay
    tl.store(weights + places, weight - lr / tl.load(corrections) * (mean / below), mask=inside)
