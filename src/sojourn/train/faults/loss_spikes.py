"""Whether a step's loss is good, not finite, or a spike far above the recent losses."""

from __future__ import annotations

import math
from statistics import median
from typing import Literal

LossVerdict = Literal["good", "not finite", "spike"]

LOSS_WINDOW = 64  # recent losses
_MIN_LOSSES = 32  # before a loss can be called a spike
_SPIKE = 10.0  # robust standard deviations
_MIN_SPREAD = 0.02  # of the median loss, however small the deviations are


def check_loss(loss: float, norm: float, recent: list[float], scaled: bool) -> LossVerdict:
    """`recent`: earlier losses. With fp16 loss scaling an infinite gradient is normal, as the scaler skips the step."""
    if not math.isfinite(loss) or not (scaled or math.isfinite(norm)):
        return "not finite"
    return "spike" if loss > spike_threshold(recent) else "good"


def spike_threshold(recent: list[float]) -> float:
    """The highest loss that is not a spike: median + 10 robust standard deviations (MAD)."""
    if len(recent) < _MIN_LOSSES:
        return math.inf
    middle = median(recent)
    spread = 1.4826 * median(abs(value - middle) for value in recent)
    return middle + _SPIKE * max(spread, _MIN_SPREAD * abs(middle))


def is_reproduced(one: tuple[float, float], other: tuple[float, float], tolerance: float) -> bool:
    """Whether a step computed twice gave the same loss and gradient norm."""
    return all(_close(a, b, tolerance) for a, b in zip(one, other, strict=True))


def _close(a: float, b: float, tolerance: float) -> bool:
    if not (math.isfinite(a) and math.isfinite(b)):
        return math.isfinite(a) == math.isfinite(b)
    return abs(a - b) <= tolerance * max(abs(a), abs(b))
