"""How a run is cut up for a card: rows at a time and what is recomputed. The same for a plan and for the real run."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

from sojourn.catalog.gpus import Gpu
from sojourn.estimate.memory import Memory, memory
from sojourn.estimate.step_time import has_rate, speed
from sojourn.estimate.workload import Work

FAIR_TOKENS = 4096  # fewer at a time leave a GPU idle
MOST_TOKENS = 65536  # more win nothing
WORTH = 1.05  # times as fast: less is not worth a word


@dataclass(frozen=True)
class Cut:
    work: Work
    memory: Memory


def divisors(batch: int) -> list[int]:
    small = [n for n in range(1, math.isqrt(batch) + 1) if batch % n == 0]
    return sorted({*small, *(batch // n for n in small)})


def cut(
    make: Callable[[int, str], Work], batch: int, length: int, room: float, ways: tuple[str, ...], asked: int | None,
    gpu: Gpu | None,
) -> Cut | None:  # fmt: skip
    """The fastest by its plan on `gpu`; None where not even one row fits. Where the GPU is not known, activations are
    kept if a fair micro batch then fits.

    `make` gives the work of so many rows with so much recomputed; `room` is bytes of the device, context included.
    """
    rows = [asked] if asked else [n for n in divisors(batch) if n * length <= MOST_TOKENS] or [1]
    known = gpu is not None and has_rate(gpu)
    fair = rows[-1] if known else asked or max([n for n in rows if n * length <= FAIR_TOKENS], default=1)
    found = list[Cut]()
    for how in ways:
        tried = (Cut(work, memory(work)) for work in (make(n, how) for n in reversed(rows)))
        found += islice((one for one in tried if one.memory.device <= room), 1)
        if found and found[-1].work.rows >= fair:
            break
    if gpu is None or not known:
        return found[-1] if found else None
    return max(found, key=lambda one: speed(one.work, gpu).tokens_per_second, default=None)


def ways_of(checkpointing: str) -> tuple[str, ...]:
    return ("off", "selective", "full") if checkpointing == "auto" else (checkpointing,)
