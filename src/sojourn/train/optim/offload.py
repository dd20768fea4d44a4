"""AdamW whose moments live in the host's memory and visit the GPU one parameter at a time.

The arithmetic stays on the GPU, so the result is AdamW's to the last bit and a box with few CPU cores loses little. The
next parameter's moments travel while the present one is updated.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.adamw import adamw

_NAMES = ("exp_avg", "exp_avg_sq")


class OffloadedAdamW(torch.optim.Optimizer):
    def __init__(self, groups: list[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self._cuda = any(p.is_cuda for group in self.param_groups for p in group["params"])
        self._bus = torch.cuda.Stream() if self._cuda else None

    def make_state(self, parameter: Any) -> None:
        """In pinned memory, which the bus reads and writes at full speed."""
        if not self.state[parameter]:
            here = {"device": "cpu", "pin_memory": self._cuda, "dtype": torch.float32}
            self.state[parameter].update({name: torch.zeros(parameter.shape, **here) for name in _NAMES})
            self.state[parameter]["step"] = torch.zeros((), dtype=torch.float32)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        work = [(p, group) for group in self.param_groups for p in group["params"] if p.grad is not None]
        for parameter, _ in work:
            self.make_state(parameter)
        coming = self._fetch(work[0][0]) if work else None
        for i, (parameter, group) in enumerate(work):
            here, arrived = coming or self._fetch(parameter)
            coming = self._fetch(work[i + 1][0]) if i + 1 < len(work) else None
            if arrived is not None:
                arrived.wait()
            self._update(parameter, here, group)
            self._send_back(parameter, here)
        if self._bus is not None:
            self._bus.synchronize()

    def _fetch(self, parameter: Any) -> tuple[list[Any], Any]:
        kept = [self.state[parameter][name] for name in _NAMES]
        if self._bus is None:
            return kept, None
        with torch.cuda.stream(self._bus):
            here = [tensor.to(parameter.device, non_blocking=True) for tensor in kept]
            return here, self._bus.record_event()

    def _send_back(self, parameter: Any, here: list[Any]) -> None:
        if self._bus is None:
            return
        self._bus.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._bus):
            for name, tensor in zip(_NAMES, here, strict=True):
                self.state[parameter][name].copy_(tensor, non_blocking=True)

    def _update(self, parameter: Any, moments: list[Any], group: dict[str, Any]) -> None:
        step = self.state[parameter]["step"]
        there = step.to(parameter.device, non_blocking=True)
        adamw(
            [parameter], [parameter.grad], [moments[0]], [moments[1]], [], [there],
            fused=parameter.device.type in ("cpu", "cuda"), amsgrad=False, maximize=False,
            beta1=group["betas"][0], beta2=group["betas"][1], lr=group["lr"],
            weight_decay=group["weight_decay"], eps=group["eps"],
        )  # fmt: skip
        if there is not step:
            step += 1
