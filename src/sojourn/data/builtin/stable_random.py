"""Random draws that are the same on every Python version and every machine."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from random import Random
from typing import TypeVar

T = TypeVar("T")


class StableRandom:
    """Uses only `Random.random()`, whose sequence for an integer seed is guaranteed never to change."""

    def __init__(self, seed: int, purpose: str) -> None:
        digest = hashlib.blake2b(f"{purpose}:{seed}".encode(), digest_size=8).digest()
        self._random = Random(int.from_bytes(digest, "little")).random  # noqa: S311

    def below(self, limit: int) -> int:
        """Uniform over 0 to `limit` - 1."""
        return int(self._random() * limit)

    def between(self, low: int, high: int) -> int:
        """Uniform, both ends included."""
        return low + int(self._random() * (high - low + 1))

    def chance(self, probability: float) -> bool:
        return self._random() < probability

    def choice(self, options: Sequence[T]) -> T:
        return options[int(self._random() * len(options))]

    def sample(self, options: Sequence[T], count: int) -> list[T]:
        """`count` options at different indices, in random order."""
        indices: list[int] = []
        while len(indices) < count:
            index = int(self._random() * len(options))
            if index not in indices:
                indices.append(index)
        return [options[index] for index in indices]

    def weighted_index(self, cumulative_weights: Sequence[float]) -> int:
        point = self._random() * cumulative_weights[-1]
        for index, total in enumerate(cumulative_weights):
            if point < total:
                return index
        return len(cumulative_weights) - 1
