"""Chance that gives the same numbers on every Python and every machine."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from random import Random
from typing import TypeVar

T = TypeVar("T")


class Dice:
    """Built on `Random.random()` alone, whose sequence for an integer seed is promised not to change."""

    def __init__(self, seed: int, purpose: str) -> None:
        digest = hashlib.blake2b(f"{purpose}:{seed}".encode(), digest_size=8).digest()
        self._random = Random(int.from_bytes(digest, "little")).random  # noqa: S311

    def below(self, limit: int) -> int:
        """0 to `limit` - 1, evenly."""
        return int(self._random() * limit)

    def between(self, low: int, high: int) -> int:
        """Both ends included."""
        return low + int(self._random() * (high - low + 1))

    def chance(self, share: float) -> bool:
        return self._random() < share

    def pick(self, options: Sequence[T]) -> T:
        return options[int(self._random() * len(options))]

    def distinct(self, options: Sequence[T], count: int) -> list[T]:
        """`count` of them at different places of the list, in a chance order."""
        places: list[int] = []
        while len(places) < count:
            place = int(self._random() * len(options))
            if place not in places:
                places.append(place)
        return [options[place] for place in places]

    def shuffled(self, items: Sequence[T]) -> list[T]:
        mixed = list(items)
        for last in range(len(mixed) - 1, 0, -1):
            other = int(self._random() * (last + 1))
            mixed[last], mixed[other] = mixed[other], mixed[last]
        return mixed

    def weighted(self, totals: Sequence[float]) -> int:
        """The place of one entry, given the running totals of the weights."""
        point = self._random() * totals[-1]
        for place, total in enumerate(totals):
            if point < total:
                return place
        return len(totals) - 1
