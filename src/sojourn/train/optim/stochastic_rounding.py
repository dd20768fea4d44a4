"""Stochastic rounding of fp32 values to bf16: up or down at random, so that the mean is the value itself.

An update smaller than half of a bf16 weight's last bit would be lost by rounding to nearest, step after step. The
random numbers are a hash of seed and position (the finalizer of MurmurHash3), the same on every device and for every
chunk size, so a resumed run draws them again.
"""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF


def rounding_seed(step: int, number: int) -> int:
    """Of one parameter's update; below 2^31."""
    return zlib.crc32(f"{step}/{number}".encode()) & 0x7FFFFFFF


def stochastic_round(values: Tensor, seed: int, start: int = 0) -> Tensor:
    """`values`: fp32, one dimension; `start`: the position of the first one in its parameter."""
    rounded = (values.view(torch.int32) + _random_16_bits(len(values), seed, start, values.device)) & -0x10000
    return torch.where(values.isnan(), values, rounded.view(torch.float32)).to(torch.bfloat16)


def _random_16_bits(count: int, seed: int, start: int, device: torch.device) -> Tensor:
    """From 0 to 65535: what decides between the two neighbours is the part of a value that bf16 does not hold."""
    x = (torch.arange(start, start + count, device=device) * 0x9E3779B1 + seed) & _MASK
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & _MASK
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & _MASK
    return (x >> 16).to(torch.int32)  # the hash's last step changes its lower half only
