"""How far a planned step may be off, and why: by what is known of the card, and by which parts the step has.

The shares are in fit.toml. `benchmarks/published.py` counts how many published runs lie in their ranges, and tests hold
it, and the measured runs of the H200, to a minimum.
"""

from __future__ import annotations

from sojourn.catalog.gpus import Gpu
from sojourn.estimate.constants import constants

MEASURED, PUBLISHED, DATA_SHEET = "measured", "published", "data sheet"
ATTENTION, LAUNCH_OVERHEAD, COMMUNICATION = "attention", "kernel launch overhead", "communication"


def spread(seconds: dict[str, float], gpu: Gpu) -> float:
    """The share of a step that it may take more or less; `seconds` by the names of its parts."""
    shares, total = constants()["spread"], sum(seconds.values())
    if total <= 0:
        return 0.0
    usual = float(shares[gpu.rates])
    special = {
        ATTENTION: usual * float(shares["attention"]),
        LAUNCH_OVERHEAD: float(shares["launch"]) if gpu.launch_us is None else usual,
        COMMUNICATION: float(shares["communication"]) if gpu.allreduce_gbs is None else usual,
    }
    off = sum(took * max(usual, special.get(name, usual)) for name, took in seconds.items()) / total
    return off if gpu.rates == DATA_SHEET else min(off, float(shares["widest"]))


def range_reason(gpu: Gpu, count: int) -> str:
    """Why a range is as wide as it is, in a few words."""
    several = count > 1 and gpu.allreduce_gbs is None
    if gpu.rates == MEASURED:
        return "several of them were never measured" if several else "this card was measured"
    if gpu.rates == PUBLISHED:
        return "its speed is as others published it"
    return "this card was never measured"
