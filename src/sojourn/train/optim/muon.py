"""Muon for the matrices inside the model, AdamW for everything else, as one optimizer.

Muon (Jordan and others, 2024) makes the momentum of a matrix nearly orthogonal before stepping along it. Its steps are
scaled to the size of AdamW's (0.2·√max(rows, columns), as Moonshot found), so that one learning rate serves both.
torch has one too, but from 2.9 on only, and in bf16 only, which most CPUs compute very slowly.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from sojourn.estimate.kernel_launch import TOGETHER

_MOMENTUM = 0.95
_ROUNDS = 5
_A, _B, _C = 3.4445, -4.7750, 2.0315  # of the quintic that drives singular values towards 1


class Muon(torch.optim.Optimizer):
    """The matrices of a group with `matrices` true go by Muon."""

    def __init__(self, groups: list[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0, "matrices": False})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameters in _alike([parameter for parameter in group["params"] if parameter.grad is not None]):
                torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
                if group["matrices"] and parameters[0].ndim == 2:
                    self._along_momentum(parameters, group["lr"])
                else:
                    self._along_adam(parameters, group)

    def _along_momentum(self, parameters: list[Any], rate: float) -> None:
        gradients, states = [parameter.grad for parameter in parameters], self._states(parameters, "momentum")
        momenta = [state["momentum"] for state in states]
        torch._foreach_lerp_(momenta, gradients, 1 - _MOMENTUM)
        step = orthogonalize(_stacked(torch._foreach_lerp(gradients, momenta, _MOMENTUM)))
        scale = 0.2 * math.sqrt(max(parameters[0].shape))
        torch._foreach_add_(parameters, step.to(parameters[0].dtype).unbind(), alpha=-rate * scale)

    def _along_adam(self, parameters: list[Any], group: dict[str, Any]) -> None:
        gradients, states = [parameter.grad for parameter in parameters], self._states(parameters, "mean", "square")
        first, second = group["betas"]
        for state in states:
            state["step"] = int(state.get("step", 0)) + 1
        means, squares = [state["mean"] for state in states], [state["square"] for state in states]
        torch._foreach_lerp_(means, gradients, 1 - first)
        torch._foreach_mul_(squares, second)
        torch._foreach_addcmul_(squares, gradients, gradients, value=1 - second)
        # One tensor beside the parameter's own: an embedding is large.
        sizes = torch._foreach_sqrt(squares)
        torch._foreach_div_(sizes, [math.sqrt(1 - second ** state["step"]) for state in states])
        torch._foreach_add_(sizes, group["eps"])
        rates = [-group["lr"] / (1 - first ** state["step"]) for state in states]
        torch._foreach_addcdiv_(parameters, means, sizes, rates)

    def _states(self, parameters: list[Any], *names: str) -> list[dict[str, Any]]:
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter].update({name: torch.zeros_like(parameter) for name in names})
        return [self.state[parameter] for parameter in parameters]


def _alike(parameters: list[Any]) -> Iterator[list[Any]]:
    """In lists of one shape."""
    shapes: dict[Any, list[Any]] = {}
    for parameter in parameters:
        shapes.setdefault(parameter.shape, []).append(parameter)
    for shape, same in shapes.items():
        most = max(1, TOGETHER // max(1, shape.numel()))
        yield from (same[i : i + most] for i in range(0, len(same), most))


def orthogonalize(x: Any) -> Any:
    """Near UVᵀ of each matrix's UΣVᵀ: singular values end up between about 0.7 and 1.2. What is given is used up."""
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x.div_(torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(_ROUNDS):
        square = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=_B, alpha=_C), x, beta=_A)
    return x.mT if tall else x


def _stacked(matrices: Sequence[Any]) -> Any:
    """In numbers that are multiplied fast."""
    one = matrices[0]
    made = one.new_empty((len(matrices), *one.shape), dtype=torch.bfloat16 if one.is_cuda else torch.float32)
    torch._foreach_copy_(made.unbind(), matrices)
    return made
