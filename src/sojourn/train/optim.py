"""The optimizer, its learning-rate schedule as a pure function of the step, and its state as named tensors."""

from __future__ import annotations

import math
from typing import Any

from sojourn.config.schema import TrainConfig


def learning_rate(step: int, total: int, train: TrainConfig) -> float:
    """For step `step` (from 0) of `total`: warm up, then follow the schedule down to `min_lr` of the peak."""
    peak = float(train.lr)
    warmup = int(train.warmup) if train.warmup >= 1 else math.ceil(train.warmup * total)
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step - warmup) / max(1, total - 1 - warmup)
    if train.schedule == "cosine":
        share = 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    elif train.schedule == "linear":
        share = 1 - min(1.0, done)
    elif train.schedule == "wsd":
        share = min(1.0, 5 * (1 - min(1.0, done)))  # steady, then down over the last fifth
    else:
        share = 1.0
    return peak * (train.min_lr + (1 - train.min_lr) * share)


class Optimizer:
    """AdamW (fused where torch has it), whose state is known by the names of the parameters."""

    def __init__(self, model: Any, train: TrainConfig, device: str) -> None:
        import torch

        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        decayed = [n for n, p in named.items() if p.ndim >= 2 and "embed" not in n and "lm_head" not in n]
        plain = [n for n in named if n not in decayed]
        groups = [
            {"params": [named[n] for n in names], "weight_decay": decay}
            for names, decay in ((decayed, train.weight_decay), (plain, 0.0))
            if names
        ]
        betas = (train.beta1, train.beta2)
        self.torch = torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=1e-8, fused=device in ("cpu", "cuda"))
        self._names = [*decayed, *plain]

    def set_learning_rate(self, rate: float) -> None:
        for group in self.torch.param_groups:
            group["lr"] = rate

    def zero_grad(self) -> None:
        self.torch.zero_grad(set_to_none=True)

    def tensors(self) -> dict[str, Any]:
        """Everything that must survive a restart, by parameter name."""
        state = self.torch.state_dict()["state"]
        return {f"{self._names[i]}/{key}": value for i, kept in state.items() for key, value in kept.items()}

    def load_tensors(self, tensors: dict[str, Any]) -> None:
        numbers = {name: i for i, name in enumerate(self._names)}
        state: dict[int, dict[str, Any]] = {}
        for full, value in tensors.items():
            name, key = full.rsplit("/", 1)
            state.setdefault(numbers[name], {})[key] = value
        self.torch.load_state_dict({**self.torch.state_dict(), "state": state})
