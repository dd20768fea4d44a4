"""What low_memory_adamw.py and its kernel compute one parameter's update from."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

Rounding = Literal["fp32", "bf16", "bf16_kahan"]


@dataclass(frozen=True)
class Update:
    """Numbers of one parameter's update. `codes` and `midpoints`: of both states, in rows of 256."""

    rounding: Rounding
    step: int
    lr: float
    weight_decay: float
    beta1: float
    beta2: float
    eps: float
    seed: int
    grad_scale: Tensor | None
    codes: Tensor
    midpoints: Tensor

    @property
    def decay(self) -> float:
        return 1 - self.lr * self.weight_decay

    @property
    def rate(self) -> float:
        return self.lr / (1 - self.beta1**self.step)

    @property
    def root(self) -> float:
        return 1 / math.sqrt(1 - self.beta2**self.step)
