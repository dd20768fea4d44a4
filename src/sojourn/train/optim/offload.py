"""AdamW with its optimizer states in pinned host memory (`train.offload=optimizer`).

The states of one parameter at a time are copied to the GPU, updated and copied back; the copy of the next parameter's
overlaps with the update. The arithmetic stays on the GPU, so the result is AdamW's to the last bit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

_STATES = ("exp_avg", "exp_avg_sq")


class OffloadedAdamW(torch.optim.Optimizer):
    def __init__(self, groups: list[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self._cuda = any(p.is_cuda for group in self.param_groups for p in group["params"])
        self._copy_stream = torch.cuda.Stream() if self._cuda else None

    def make_state(self, parameter: Tensor) -> None:
        """In pinned memory, which is copied at full bandwidth."""
        if not self.state[parameter]:
            host = {"device": "cpu", "pin_memory": self._cuda, "dtype": torch.float32}
            self.state[parameter].update({name: torch.zeros(parameter.shape, **host) for name in _STATES})
            self.state[parameter]["step"] = torch.zeros((), dtype=torch.float32)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        work = [(p, group) for group in self.param_groups for p in group["params"] if p.grad is not None]
        for parameter, _ in work:
            self.make_state(parameter)
        next_states = self._fetch(work[0][0]) if work else None
        for i, (parameter, group) in enumerate(work):
            states, copied = next_states or self._fetch(parameter)
            next_states = self._fetch(work[i + 1][0]) if i + 1 < len(work) else None
            if copied is not None:
                copied.wait()
            self._update(parameter, states, group)
            self._send_back(parameter, states)
        if self._copy_stream is not None:
            self._copy_stream.synchronize()

    def _fetch(self, parameter: Tensor) -> tuple[list[Tensor], Any]:
        on_host = [self.state[parameter][name] for name in _STATES]
        if self._copy_stream is None:
            return on_host, None
        with torch.cuda.stream(self._copy_stream):
            on_device = [tensor.to(parameter.device, non_blocking=True) for tensor in on_host]
            return on_device, self._copy_stream.record_event()

    def _send_back(self, parameter: Tensor, states: list[Tensor]) -> None:
        if self._copy_stream is None:
            return
        self._copy_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._copy_stream):
            for name, tensor in zip(_STATES, states, strict=True):
                self.state[parameter][name].copy_(tensor, non_blocking=True)

    def _update(self, parameter: Tensor, states: list[Tensor], group: dict[str, Any]) -> None:
        step = self.state[parameter]["step"]
        count = step.to(parameter.device, non_blocking=True)
        adamw(
            [parameter], [parameter.grad], [states[0]], [states[1]], [], [count],
            fused=parameter.device.type in ("cpu", "cuda"), amsgrad=False, maximize=False,
            beta1=group["betas"][0], beta2=group["betas"][1], lr=group["lr"],
            weight_decay=group["weight_decay"], eps=group["eps"],
        )  # fmt: skip
        if count is not step:
            step += 1
