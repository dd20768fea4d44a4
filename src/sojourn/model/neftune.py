"""NEFTune (arXiv 2310.05914): uniform noise of size alpha / √(L·D) on the embeddings of a training batch.

L is the number of tokens of the document, also where several are packed into a row; padding gets none. The noise is a
hash of seed, step, row, place in the row and dimension, not drawn from a generator. So it is the same for every micro
batch and number of ranks, in a replayed step and after a resume, and a CUDA graph only reads two more tensors.

Shapes: B rows, T tokens per row, D hidden size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sojourn.data.order import splitmix64

_GOLDEN = 0x9E3779B9 - 2**32  # as signed 32-bit numbers, which wrap around
_MULTIPLY_1, _MULTIPLY_2 = 0x7FEB352D, 0x846CA68B - 2**32


@dataclass(frozen=True)
class EmbeddingNoise:
    """`keys_BT`: of `token_keys`. `scales_BT`: alpha / √L; 0 for padding."""

    keys_BT: Tensor
    scales_BT: Tensor

    def add_to(self, embeddings_BTD: Tensor) -> Tensor:
        size = embeddings_BTD.shape[-1]
        noise_BTD = _uniform(self.keys_BT, size).mul_((self.scales_BT / math.sqrt(size))[..., None])
        return embeddings_BTD + noise_BTD.to(embeddings_BTD.dtype)


def token_keys(rows: np.ndarray, width: int, seed: int, step: int) -> np.ndarray:
    """A key for each place of the given rows in a step, shape (B, T)."""
    step_key = int(splitmix64(np.array([step], np.uint64), seed)[0])
    row_keys = splitmix64(rows, step_key)
    keys = splitmix64((row_keys[:, None] + np.arange(width, dtype=np.uint64)), step_key)
    return keys.astype(np.uint32).view(np.int32)


def _uniform(keys_BT: Tensor, size: int) -> Tensor:
    """Numbers in [-1, 1], shape (B, T, D): an integer hash of key and dimension (lowbias32 by C. Wellons)."""
    dimensions_D = torch.arange(size, dtype=torch.int32, device=keys_BT.device) * _GOLDEN
    x = keys_BT[..., None] + dimensions_D
    x = x.bitwise_xor_((x >> 16) & 0xFFFF).mul_(_MULTIPLY_1)
    x = x.bitwise_xor_((x >> 15) & 0x1FFFF).mul_(_MULTIPLY_2)
    x = x.bitwise_xor_((x >> 16) & 0xFFFF)
    return x.float().mul_(2.0**-31)
