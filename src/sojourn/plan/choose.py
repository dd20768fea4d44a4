"""How a run is cut up for a card: rows at a time and what is recomputed. The same for a plan and for the real run."""

from __future__ import annotations

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
    return [n for n in range(1, batch + 1) if batch % n == 0]


def cut(
    make: Callable[[int, str], Work], batch: int, length: int, room: float, ways: tuple[str, ...], asked: int | None
) -> Cut | None:
    """Activations are kept if a fair micro batch then fits; None where not even one row does.

    `make` gives the work of so many rows with so much recomputed; `room` is bytes of the device, context included.
    """
    rows = [asked] if asked else divisors(batch)
    fair = asked or max([n for n in rows if n * length <= FAIR_TOKENS], default=1)
    best: Cut | None = None
    for how in ways:
        found = [Cut(work, memory(work)) for work in (make(n, how) for n in rows)]
        fitting = [one for one in found if one.memory.device <= room]
        if not fitting:
            continue
        usual = [one for one in fitting if one.work.tokens <= MOST_TOKENS] or fitting[:1]
        best = usual[-1]
        if best.work.rows >= fair:
            return best
    return best


def ways_of(checkpointing: str) -> tuple[str, ...]:
    return ("off", "selective", "full") if checkpointing == "auto" else (checkpointing,)
