"""Which rows a global step reads: a pure function of seed and step, so there is no iterator state to save.

Each epoch is a shuffle of all rows by a 64-bit hash; every row is read once an epoch. A batch may span two epochs. The
order is the same for any number of machines.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np


def splitmix64(numbers: np.ndarray, seed: int) -> np.ndarray:
    """SplitMix64's hash of each number; the same on every machine and with every numpy."""
    with np.errstate(over="ignore"):
        x = numbers.astype(np.uint64) + np.uint64((seed * 0x9E3779B97F4A7C15 + 0x9E3779B97F4A7C15) % 2**64)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        hashed: np.ndarray = x ^ (x >> np.uint64(31))
        return hashed


@lru_cache(maxsize=2)
def epoch_order(rows: int, seed: int, epoch: int) -> np.ndarray:
    """A shuffle of all rows."""
    key = int(
        splitmix64(np.array([epoch], dtype=np.uint64), int(splitmix64(np.array([seed], dtype=np.uint64), 1)[0]))[0]
    )
    return np.argsort(splitmix64(np.arange(rows, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15), key), kind="stable")


def step_rows(step: int, rows: int, global_batch: int, seed: int, last_row: int | None = None) -> np.ndarray:
    """The rows of global step `step` (from 0). `last_row` ends the run within an epoch."""
    first = step * global_batch
    stop = first + global_batch if last_row is None else min(first + global_batch, last_row)
    positions = np.arange(first, stop)
    return np.array([epoch_order(rows, seed, int(p) // rows)[int(p) % rows] for p in positions], dtype=np.int64)
