"""Muon for the matrices inside the model, AdamW for everything else, as one optimizer.

Muon (Jordan and others, 2024) makes the momentum of a matrix nearly orthogonal before stepping along it. Its steps are
scaled to the size of AdamW's (0.2·√max(rows, columns), as Moonshot found), so that one learning rate serves both.
torch has one too, but from 2.9 on only, and in bf16 only, which most CPUs compute very slowly.
"""

from __future__ import annotations

import math
from typing import Any

import torch

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
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                if group["matrices"] and parameter.ndim == 2:
                    self._along_momentum(parameter, group["lr"])
                else:
                    self._along_adam(parameter, group)

    def _along_momentum(self, parameter: Any, rate: float) -> None:
        state = self.state[parameter]
        if not state:
            state["momentum"] = torch.zeros_like(parameter)
        momentum = state["momentum"].lerp_(parameter.grad, 1 - _MOMENTUM)
        ahead = parameter.grad.lerp(momentum, _MOMENTUM)
        scale = 0.2 * math.sqrt(max(parameter.shape))
        parameter.sub_(orthogonal(ahead), alpha=rate * scale)

    def _along_adam(self, parameter: Any, group: dict[str, Any]) -> None:
        state, (first, second) = self.state[parameter], group["betas"]
        if not state:
            state.update(step=0, mean=torch.zeros_like(parameter), square=torch.zeros_like(parameter))
        step = state["step"] = int(state["step"]) + 1
        mean = state["mean"].lerp_(parameter.grad, 1 - first)
        square = state["square"].mul_(second).addcmul_(parameter.grad, parameter.grad, value=1 - second)
        # One tensor beside the parameter's own: an embedding is large.
        size = square.sqrt().div_(math.sqrt(1 - second**step)).add_(group["eps"])
        parameter.addcdiv_(mean, size, value=-group["lr"] / (1 - first**step))


def orthogonal(matrix: Any) -> Any:
    """Near UVᵀ of the matrix's UΣVᵀ: its singular values end up between about 0.7 and 1.2."""
    x = matrix.to(torch.bfloat16 if matrix.is_cuda else torch.float32)
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    x = x / (x.norm() + 1e-7)
    for _ in range(_ROUNDS):
        square = x @ x.T
        x = _A * x + (_B * square + _C * square @ square) @ x
    return (x.T if tall else x).to(matrix.dtype)
