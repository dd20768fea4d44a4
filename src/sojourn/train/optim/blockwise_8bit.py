"""Blockwise 8-bit quantization of optimizer states (Dettmers and others, arXiv 2110.02861), as in bitsandbytes.

A block of 256 values has one scale, its largest magnitude; a value is the number of the nearest of 256 code values
between -1 and 1, or 0 and 1. Code values are spaced evenly within each power of ten, with more of them in larger ones.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

BLOCK = 256  # values per scale
MIN_ELEMENTS = 4096  # of a parameter: states of smaller ones stay in fp32
_DECADES = 7


@cache
def code_values(signed: bool) -> Tensor:
    """The 256 code values, ascending: 2^i in the i-th power of ten for each sign, or twice as many, and 0 and 1."""
    values = [0.0, 1.0]
    for decade in range(_DECADES):
        count = 2**decade * (1 if signed else 2)
        means = [0.1 + 0.9 * (number + 0.5) / count for number in range(count)]
        scaled = [10.0 ** (decade - _DECADES + 1) * mean for mean in means]
        values += [*scaled, *(-value for value in scaled)] if signed else scaled
    return torch.tensor(sorted(values), dtype=torch.float32)


def midpoints(code: Tensor) -> Tensor:
    """Between neighbouring code values: a value is nearest to the code value whose number of midpoints is below it."""
    return (code[:-1] + code[1:]) / 2


def quantize(values: Tensor, code: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers of code values (uint8), and the scales of blocks. `values`: fp32, one dimension."""
    blocks = torch.nn.functional.pad(values, (0, -len(values) % BLOCK)).view(-1, BLOCK)
    absmax = blocks.abs().amax(1)
    scaled = blocks / torch.where(absmax > 0, absmax, 1.0)[:, None]
    numbers = torch.bucketize(scaled, midpoints(code), out_int32=True).to(torch.uint8)
    return numbers.view(-1)[: len(values)], absmax


def dequantize(numbers: Tensor, absmax: Tensor, code: Tensor) -> Tensor:
    scales = absmax.repeat_interleave(BLOCK)[: len(numbers)]
    return code[numbers.int()] * scales
