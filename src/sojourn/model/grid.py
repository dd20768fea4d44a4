"""Documents side by side, one to a row of a grid, for attention on a CPU: few scores are made that would not count.

All else needs no rows, so the real tokens of a batch lie end to end and its padding is gone. Shapes: R real tokens, G
documents, L tokens of the longest, H heads, D numbers a head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True)
class Grid:
    """`tokens`: which one stands in each place; beyond a document's end any does, for nothing looks at it there.

    `places_R`: where in the grid each token stands.
    """

    tokens: Any
    places_R: Any
    longest: int

    def spread(self, x_1RHD: Any) -> Any:
        # What is beyond a document's end has a gradient of nothing, so it does not matter whose it is added to.
        return x_1RHD[0].flatten(1).index_select(0, self.tokens).view(-1, self.longest, *x_1RHD.shape[2:])

    def collect(self, x_GLHD: Any) -> Any:
        return x_GLHD.flatten(0, 1).flatten(1).index_select(0, self.places_R).view(1, -1, *x_GLHD.shape[2:])


def make_grid(documents_R: np.ndarray, rows: int, width: int) -> Grid | None:
    """Of documents end to end, numbered from 0; None where rows of `width` under a mask have less to do."""
    lengths = np.bincount(documents_R)
    count, longest = len(lengths), int(lengths.max())
    if count * longest**2 > rows * width**2 or lengths.min() == width:
        return None
    starts = np.cumsum(lengths) - lengths
    tokens_GL = np.minimum(starts[:, None] + np.arange(longest), len(documents_R) - 1)
    places_R = np.arange(len(documents_R)) + (np.arange(count) * longest - starts)[documents_R]
    return Grid(torch.from_numpy(tokens_GL.reshape(-1)), torch.from_numpy(places_R), longest)
