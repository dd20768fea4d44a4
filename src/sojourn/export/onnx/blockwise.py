"""Weight-only quantization in blocks of 32 values of a row, for onnxruntime's MatMulNBits and GatherBlockQuantized.

int8: symmetric, stored plus 128. int4: with a zero point per block; two values a byte, the first in the low bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 32


def block_count(width: int) -> int:
    return -(-width // BLOCK)


def quantize_rows(rows: Tensor, bits: int) -> list[Tensor]:
    """Of [rows, width]: values [rows, blocks, BLOCK * bits / 8], scales [rows, blocks] in fp32, zero points
    [rows, half the blocks], two a byte; none with int8."""
    import torch

    blocks = block_count(rows.shape[1])
    padded = torch.nn.functional.pad(rows.float(), (0, blocks * BLOCK - rows.shape[1])).view(-1, blocks, BLOCK)
    if bits == 8:
        scales = _never_zero(padded.abs().amax(-1) / 127)
        values = (padded / scales[..., None]).round_().add_(128).clamp_(1, 255).to(torch.uint8)
        return [values, scales]
    low, high = padded.amin(-1).clamp_(max=0), padded.amax(-1).clamp_(min=0)
    scales = _never_zero((high - low) / 15)
    zeros = (-low / scales).round_().clamp_(0, 15)
    values = (padded / scales[..., None]).round_().add_(zeros[..., None]).clamp_(0, 15).to(torch.uint8)
    if blocks % 2:
        zeros = torch.nn.functional.pad(zeros, (0, 1))
    return [_pack(values), scales, _pack(zeros.to(torch.uint8))]


def _pack(values: Tensor) -> Tensor:
    return values[..., 0::2] | (values[..., 1::2] << 4)


def _never_zero(scales: Tensor) -> Tensor:
    import torch

    return torch.where(scales == 0, torch.ones_like(scales), scales)
