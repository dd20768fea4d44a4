"""Attention on a CPU without padding: documents of similar length share a bucket, a batch of its own.

A CPU step is bound by matmuls, so it must compute fewer of them. The real tokens of a batch lie end to end in one row,
without padding, for everything but attention. For attention, documents are sorted into buckets by powers of two of
their length; each bucket is padded to its longest document only, so few scores are computed in vain.

Shapes: R real tokens, S slots in all buckets, G documents in a bucket, L tokens of its longest, H heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

_SHORTEST = 32  # shorter documents share one bucket


@dataclass(frozen=True)
class LengthBuckets:
    """`token_of_slot_S`: the token in each slot; past a document's end it is any token, since nothing attends to it.

    `slot_of_token_R`: the inverse. `shapes`: (G, L) of each bucket.
    """

    token_of_slot_S: Tensor
    slot_of_token_R: Tensor
    shapes: list[tuple[int, int]]

    @property
    def longest(self) -> int:
        return self.shapes[-1][1]

    def split(self, x_1RHD: Tensor) -> list[Tensor]:
        """One GLHD tensor per bucket."""
        # Slots past a document's end get a zero gradient, so it does not matter to which token it is added.
        slots = x_1RHD[0].flatten(1).index_select(0, self.token_of_slot_S)
        buckets = slots.split([count * length for count, length in self.shapes])
        return [
            bucket.view(count, length, *x_1RHD.shape[2:])
            for bucket, (count, length) in zip(buckets, self.shapes, strict=True)
        ]

    def join(self, buckets: list[Tensor]) -> Tensor:
        """The inverse of `split`."""
        shape_HD = buckets[0].shape[2:]
        slots = torch.cat([bucket.reshape(-1, shape_HD.numel()) for bucket in buckets])
        return slots.index_select(0, self.slot_of_token_R).view(1, -1, *shape_HD)


def make_length_buckets(documents_R: np.ndarray) -> LengthBuckets:
    """Of documents end to end, numbered from 0."""
    lengths = np.bincount(documents_R)
    starts = np.cumsum(lengths) - lengths
    exponents = np.ceil(np.log2(np.maximum(lengths, _SHORTEST)))
    first_slot, tokens = np.zeros(len(lengths), np.int64), list[np.ndarray]()
    shapes, slots = list[tuple[int, int]](), 0
    for exponent in np.unique(exponents):
        members = np.flatnonzero(exponents == exponent)
        longest = int(lengths[members].max())
        first_slot[members] = slots + longest * np.arange(len(members))
        tokens.append(np.minimum(starts[members, None] + np.arange(longest), len(documents_R) - 1).reshape(-1))
        shapes.append((len(members), longest))
        slots += len(members) * longest
    slot_of_token_R = np.arange(len(documents_R)) + (first_slot - starts)[documents_R]
    return LengthBuckets(torch.from_numpy(np.concatenate(tokens)), torch.from_numpy(slot_of_token_R), shapes)
