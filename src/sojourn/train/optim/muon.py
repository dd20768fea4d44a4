"""Muon for the decayed matrices, AdamW for everything else, as one optimizer.

Muon (Jordan and others, 2024) orthogonalizes the momentum of each matrix. Its steps are scaled to the size of
AdamW's (0.2·√max(rows, columns), Moonshot 2025), so that one learning rate serves both. torch has one since 2.9, but in
bf16 only, which most CPUs compute very slowly. Tensors of one shape are updated together, up to a limit: fewer kernel
launches for small models, bounded memory for large ones. Checkpoints hold its state under momentum, mean and square.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from sojourn.estimate.kernel_launch import MUON_GROUP_ELEMENTS

_MOMENTUM = 0.95
_NEWTON_SCHULZ_STEPS = 5
_A, _B, _C = 3.4445, -4.7750, 2.0315  # coefficients of the quintic iteration


class Muon(torch.optim.Optimizer):
    """Groups with `matrices` true are updated by Muon, others by AdamW."""

    def __init__(self, groups: list[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0, "matrices": False})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameters in _by_shape([parameter for parameter in group["params"] if parameter.grad is not None]):
                torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
                if group["matrices"] and parameters[0].ndim == 2:
                    self._muon_step(parameters, group["lr"])
                else:
                    self._adamw_step(parameters, group)

    def _muon_step(self, parameters: list[Tensor], rate: float) -> None:
        gradients, states = [parameter.grad for parameter in parameters], self._states(parameters, "momentum")
        momenta = [state["momentum"] for state in states]
        torch._foreach_lerp_(momenta, gradients, 1 - _MOMENTUM)
        step = orthogonalize(_stack(torch._foreach_lerp(gradients, momenta, _MOMENTUM)))
        scale = 0.2 * math.sqrt(max(parameters[0].shape))
        torch._foreach_add_(parameters, step.to(parameters[0].dtype).unbind(), alpha=-rate * scale)

    def _adamw_step(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        gradients, states = [parameter.grad for parameter in parameters], self._states(parameters, "mean", "square")
        first, second = group["betas"]
        for state in states:
            state["step"] = int(state.get("step", 0)) + 1
        means, squares = [state["mean"] for state in states], [state["square"] for state in states]
        torch._foreach_lerp_(means, gradients, 1 - first)
        torch._foreach_mul_(squares, second)
        torch._foreach_addcmul_(squares, gradients, gradients, value=1 - second)
        # One temporary tensor only: an embedding is large.
        denominators = torch._foreach_sqrt(squares)
        torch._foreach_div_(denominators, [math.sqrt(1 - second ** state["step"]) for state in states])
        torch._foreach_add_(denominators, group["eps"])
        rates = [-group["lr"] / (1 - first ** state["step"]) for state in states]
        torch._foreach_addcdiv_(parameters, means, denominators, rates)

    def _states(self, parameters: list[Tensor], *names: str) -> list[dict[str, Any]]:
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter].update({name: torch.zeros_like(parameter) for name in names})
        return [self.state[parameter] for parameter in parameters]


def _by_shape(parameters: list[Tensor]) -> Iterator[list[Tensor]]:
    """Lists of parameters of one shape, each of at most `TOGETHER` elements."""
    shapes: dict[Any, list[Tensor]] = {}
    for parameter in parameters:
        shapes.setdefault(parameter.shape, []).append(parameter)
    for shape, same in shapes.items():
        most = max(1, MUON_GROUP_ELEMENTS // max(1, shape.numel()))
        yield from (same[i : i + most] for i in range(0, len(same), most))


def orthogonalize(x: Tensor) -> Tensor:
    """About UVᵀ of each matrix's UΣVᵀ (singular values between about 0.7 and 1.2). Overwrites `x`."""
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x.div_(torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(_NEWTON_SCHULZ_STEPS):
        square = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=_B, alpha=_C), x, beta=_A)
    return x.mT if tall else x


def _stack(matrices: Sequence[Tensor]) -> Tensor:
    """In the dtype of the fastest matmuls: bf16 on GPUs, fp32 on CPUs."""
    one = matrices[0]
    stack = one.new_empty((len(matrices), *one.shape), dtype=torch.bfloat16 if one.is_cuda else torch.float32)
    torch._foreach_copy_(stack.unbind(), matrices)
    return stack
