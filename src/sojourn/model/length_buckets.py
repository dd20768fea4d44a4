"""Documents side by side, those of about one length in a grid, for attention on a CPU: few scores are made in vain.

All else needs no rows, so the real tokens of a batch lie end to end and its padding is gone. Shapes: R real tokens, S
places in all grids, G documents in a grid, L tokens of its longest, H heads, D numbers a head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

_SHORTEST = 32  # shorter ones are not worth a grid of their own


@dataclass(frozen=True)
class Grids:
    """`tokens_S`: which one stands in each place; beyond a document's end any does, for nothing looks at it there.

    `places_R`: where each token stands. `shapes`: G and L of each grid.
    """

    tokens_S: Any
    places_R: Any
    shapes: list[tuple[int, int]]

    @property
    def longest(self) -> int:
        return self.shapes[-1][1]

    def spread(self, x_1RHD: Any) -> list[Any]:
        # What is beyond a document's end has a gradient of nothing, so it does not matter whose it is added to.
        spread = x_1RHD[0].flatten(1).index_select(0, self.tokens_S)
        parts = spread.split([count * longest for count, longest in self.shapes])
        return [
            part.view(count, longest, *x_1RHD.shape[2:])
            for part, (count, longest) in zip(parts, self.shapes, strict=True)
        ]

    def collect(self, parts: list[Any]) -> Any:
        heads = parts[0].shape[2:]
        collected = torch.cat([part.reshape(-1, heads.numel()) for part in parts]).index_select(0, self.places_R)
        return collected.view(1, -1, *heads)


def make_grids(documents_R: np.ndarray) -> Grids:
    """Of documents end to end, numbered from 0."""
    lengths = np.bincount(documents_R)
    starts = np.cumsum(lengths) - lengths
    doublings = np.ceil(np.log2(np.maximum(lengths, _SHORTEST)))
    first, tokens, shapes, used = np.zeros(len(lengths), np.int64), list[np.ndarray](), list[tuple[int, int]](), 0
    for doubling in np.unique(doublings):
        chosen = np.flatnonzero(doublings == doubling)
        longest = int(lengths[chosen].max())
        first[chosen] = used + longest * np.arange(len(chosen))
        tokens.append(np.minimum(starts[chosen, None] + np.arange(longest), len(documents_R) - 1).reshape(-1))
        shapes.append((len(chosen), longest))
        used += len(chosen) * longest
    places_R = np.arange(len(documents_R)) + (first - starts)[documents_R]
    return Grids(torch.from_numpy(np.concatenate(tokens)), torch.from_numpy(places_R), shapes)
