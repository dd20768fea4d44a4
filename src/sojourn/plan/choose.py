"""How a run is cut up for a card: rows at a time and what is recomputed. The same for a plan and for the real run."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from sojourn.plan.memory import Memory, memory
from sojourn.plan.work import Work

FAIR_TOKENS = 4096  # fewer at a time leave a GPU idle
MOST_TOKENS = 65536  # more win nothing


@dataclass(frozen=True)
class Cut:
    work: Work
    memory: Memory


def divisors(batch: int) -> list[int]:
    small = [n for n in range(1, math.isqrt(batch) + 1) if batch % n == 0]
    return sorted({*small, *(batch // n for n in small)})


def cut(
    make: Callable[[int, str], Work], batch: int, length: int, room: float, ways: tuple[str, ...], asked: int | None
) -> Cut | None:
    """Activations are kept if a fair micro batch then fits; None where not even one row does.

    `make` gives the work of so many rows with so much recomputed; `room` is bytes of the device, context included.
    """
    rows = [asked] if asked else [n for n in divisors(batch) if n * length <= MOST_TOKENS] or [1]
    fair = asked or max([n for n in rows if n * length <= FAIR_TOKENS], default=1)
    best: Cut | None = None
    for how in ways:
        tried = (Cut(work, memory(work)) for work in (make(n, how) for n in reversed(rows)))
        best = next((one for one in tried if one.memory.device <= room), best)
        if best is not None and best.work.rows >= fair:
            return best
    return best


def ways_of(checkpointing: str) -> tuple[str, ...]:
    return ("off", "selective", "full") if checkpointing == "auto" else (checkpointing,)
