"""Is a step's loss to be believed? Infinite and undefined ones never; one far above its neighbours is a spike."""

from __future__ import annotations

import math
from statistics import median
from typing import Literal

LossVerdict = Literal["good", "not a number", "spike"]

LOSS_WINDOW = 64
_ENOUGH = 32  # losses, before one can be called unusual
_SPIKE = 10.0  # robust standard deviations
_LEAST = 0.02  # of the usual loss counts as ordinary noise, however calm the run


def check_loss(loss: float, norm: float, recent: list[float], scaled: bool) -> LossVerdict:
    """`recent`: the losses before. In fp16 an infinite gradient is everyday: the scaler passes over such a step."""
    if not math.isfinite(loss) or not (scaled or math.isfinite(norm)):
        return "not a number"
    return "spike" if loss > spike_threshold(recent) else "good"


def spike_threshold(recent: list[float]) -> float:
    """The highest loss that is no spike."""
    if len(recent) < _ENOUGH:
        return math.inf
    middle = median(recent)
    spread = 1.4826 * median(abs(value - middle) for value in recent)
    return middle + _SPIKE * max(spread, _LEAST * abs(middle))


def same(one: tuple[float, float], other: tuple[float, float], within: float) -> bool:
    """Whether a step done twice came out the same: loss and gradient norm."""
    return all(_close(a, b, within) for a, b in zip(one, other, strict=True))


def _close(a: float, b: float, within: float) -> bool:
    if not (math.isfinite(a) and math.isfinite(b)):
        return math.isfinite(a) == math.isfinite(b)
    return abs(a - b) <= within * max(abs(a), abs(b))
