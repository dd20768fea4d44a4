"""AdamW for CPUs: norm of all gradients, clipping and update in two calls of a kernel, instead of several for every
tensor."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sojourn.model.kernels.cpu.library import adamw_step, pointers, sum_of_squares


class AdamW(torch.optim.AdamW):
    """State, settings and results are torch's, but for rounding. `grad_scale`: gradients are divided by it."""

    grad_scale: Tensor | None = None
    _updated: Sequence[Tensor] = ()  # parameters that the last step has updated, and
    _states: Any = None  # pointers to their states
    _sizes: array[int]

    def grad_norm(self) -> Tensor:
        """Of all gradients together."""
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        if not all(grad.is_contiguous() for grad in grads):
            return torch.nn.utils.get_total_norm(grads)
        return torch.tensor(math.sqrt(sum_of_squares(grads)))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        factor = 1.0 if self.grad_scale is None else 1.0 / float(self.grad_scale)
        parameters: list[Tensor] = []
        grads: list[Tensor] = []
        settings: list[float] = []
        for group in self.param_groups:
            of_group = (*group["betas"], group["lr"], group["weight_decay"], group["eps"])
            for parameter in group["params"]:
                if (grad := parameter.grad) is not None:
                    parameters.append(parameter)
                    grads.append(grad.contiguous())
                    settings += of_group
        if parameters:
            if self._states is None or list(map(id, parameters)) != list(map(id, self._updated)):
                self._find_states(parameters)
            adamw_step(parameters, grads, self._states, self._sizes, settings, factor)

    def _find_states(self, parameters: list[Tensor]) -> None:
        """Once, since finding them takes as long as updating a narrow model."""
        states = []
        for parameter in parameters:
            state = self.state[parameter]
            if not state:
                state["step"] = torch.tensor(0.0)
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
            states += [state["exp_avg"], state["exp_avg_sq"], state["step"]]
        self._updated, self._sizes = parameters, array("q", [parameter.numel() for parameter in parameters])
        self._states = pointers(states)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._states = None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """torch's takes five times as long for None."""
        if not set_to_none:
            super().zero_grad(False)
            return
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None
