"""AdamW for CPUs: norm of all gradients, clipping and update in two calls of a kernel, instead of several for every
tensor."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from sojourn.model.kernels.cpu.library import adamw_step, cpu_kernels_take, sum_of_squares


class AdamW(torch.optim.AdamW):
    """State, settings and results are torch's, but for rounding. `grad_scale`: gradients are divided by it."""

    grad_scale: Tensor | None = None

    def grad_norm(self) -> Tensor:
        """Of all gradients together."""
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        if not cpu_kernels_take(*grads):
            return torch.nn.utils.get_total_norm(grads)
        return torch.tensor(math.sqrt(sum_of_squares(grads)))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        factor = 1.0 if self.grad_scale is None else 1.0 / float(self.grad_scale)
        tensors, settings = [], []
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["step"] = torch.tensor(0.0)
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
                state["step"] += 1
                tensors.append((parameter, parameter.grad.contiguous(), state["exp_avg"], state["exp_avg_sq"]))
                settings.append((factor, *_settings(group, state["step"].item())))
        if tensors:
            adamw_step(tensors, settings)


def _settings(group: dict[str, Any], step: float) -> tuple[float, ...]:
    """As `adamw_step` takes them."""
    beta1, beta2 = group["betas"]
    rate = group["lr"] / (1 - beta1**step)
    root = 1 / math.sqrt(1 - beta2**step)
    return beta1, beta2, 1 - group["lr"] * group["weight_decay"], rate, root, group["eps"]
