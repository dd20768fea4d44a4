"""The optimizer, its learning-rate schedule as a pure function of the step, and its state as named tensors."""

from __future__ import annotations

import math
from typing import Any

from sojourn.config.schema import TrainConfig
from sojourn.errors import UserError


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
    """AdamW, or Muon for the hidden matrices with AdamW for the rest; both follow one learning rate."""

    def __init__(self, model: Any, train: TrainConfig, device: str) -> None:
        import torch

        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        hidden = (
            {n: p for n, p in named.items() if p.ndim == 2 and ".layers." in n} if train.optimizer == "muon" else {}
        )
        rest = {n: p for n, p in named.items() if n not in hidden}
        decayed = {n: p for n, p in rest.items() if p.ndim >= 2 and "embed" not in n and "lm_head" not in n}
        plain = {n: p for n, p in rest.items() if n not in decayed}
        groups = [
            {"params": list(decayed.values()), "weight_decay": train.weight_decay},
            {"params": list(plain.values()), "weight_decay": 0.0},
        ]
        self._parts = [
            torch.optim.AdamW(
                [group for group in groups if group["params"]],
                lr=0.0, betas=(train.beta1, train.beta2), eps=1e-8, fused=device in ("cpu", "cuda"),
            )
        ]  # fmt: skip
        self._names = [[*decayed, *plain]]
        if hidden:
            if not hasattr(torch.optim, "Muon"):
                raise UserError(
                    f"train.optimizer: muon needs torch 2.9 or newer, here is {torch.__version__}; use adamw"
                )
            self._parts.append(
                torch.optim.Muon(
                    list(hidden.values()), lr=0.0, weight_decay=train.weight_decay, adjust_lr_fn="match_rms_adamw"
                )
            )
            self._names.append(list(hidden))

    @property
    def parts(self) -> list[Any]:
        """The torch optimizers inside."""
        return self._parts

    def set_learning_rate(self, rate: float) -> None:
        for part in self._parts:
            for group in part.param_groups:
                group["lr"] = rate

    def zero_grad(self) -> None:
        for part in self._parts:
            part.zero_grad(set_to_none=True)

    def tensors(self) -> dict[str, Any]:
        """Everything that must survive a restart, by parameter name."""
        import torch

        found = {}
        for part, names in zip(self._parts, self._names, strict=True):
            for index, state in part.state_dict()["state"].items():
                for key, value in state.items():
                    found[f"{names[index]}/{key}"] = torch.as_tensor(value)
        return found

    def load_tensors(self, tensors: dict[str, Any]) -> None:
        for part, names in zip(self._parts, self._names, strict=True):
            whole = part.state_dict()
            numbers = {name: index for index, name in enumerate(names)}
            state: dict[int, dict[str, Any]] = {}
            for full, value in tensors.items():
                name, key = full.rsplit("/", 1)
                if name in numbers:
                    state.setdefault(numbers[name], {})[key] = value
            part.load_state_dict({**whole, "state": state})
