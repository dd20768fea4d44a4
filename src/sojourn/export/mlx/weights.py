"""Weights as mlx-lm loads them: transformers' names, and, where quantized, what mlx.core.quantize would give.

A quantized weight is three tensors: `weight` (packed in uint32, the first value in the lowest bits), `scales` and
`biases`, one of each per group of a row; a value is scale · q + bias.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from sojourn.export.mlx.config import GROUP
from sojourn.infer.weight_source import WeightSource

if TYPE_CHECKING:
    from torch import Tensor, dtype

_KINDS = ("weight", "scales", "biases")


class MlxWeights:
    """A `WeightSource` over another. `bits`: 0 leaves the weights as they are."""

    def __init__(self, source: WeightSource, config: dict[str, Any], bits: int) -> None:
        self.config, self.generation_config = config, source.generation_config
        self.tokenizer_folder: Path = source.tokenizer_folder
        self._source, self._bits = source, bits

    def names(self) -> list[str]:
        found: list[str] = []
        for name in self._source.names():
            stem = name.removesuffix("weight")
            found += [stem + kind for kind in _KINDS] if self._is_quantized(name) else [name]
        return found

    def shape(self, name: str) -> tuple[int, ...]:
        kind = self._kind(name)
        if kind is None:
            return self._source.shape(name)
        rows, width = self._source.shape(self._weight(name))
        return rows, width * self._bits // 32 if kind == "weight" else width // GROUP

    def dtype(self, name: str) -> dtype:
        import torch

        kind = self._kind(name)
        if kind == "weight":
            return torch.uint32
        stored = self._source.dtype(name if kind is None else self._weight(name))
        return torch.bfloat16 if self._bits and stored == torch.float32 else stored

    def load(self, name: str) -> Tensor:
        return self.rows(name, 0, self.shape(name)[0])

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        kind = self._kind(name)
        if kind is None:
            return self._source.rows(name, start, stop).to(self.dtype(name))
        found = quantize_groups(self._source.rows(self._weight(name), start, stop), self._bits)[_KINDS.index(kind)]
        return found if kind == "weight" else found.to(self.dtype(name))

    def stamp(self) -> str:
        return self._source.stamp()

    def _is_quantized(self, name: str) -> bool:
        if not self._bits or not name.endswith(".weight"):
            return False
        shape = self._source.shape(name)
        return len(shape) == 2 and shape[1] % GROUP == 0

    def _weight(self, name: str) -> str:
        return f"{name.rpartition('.')[0]}.weight"

    def _kind(self, name: str) -> str | None:
        """Of a part of a quantized weight."""
        kind = name.rpartition(".")[2]
        return kind if kind in _KINDS and self._is_quantized(self._weight(name)) else None


def quantize_groups(rows: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of [rows, width]: packed values, scales and biases. The end of the range that is further from zero is hit
    exactly, and so is zero, where the range has it."""
    import torch

    steps = 2**bits - 1
    groups = rows.float().unflatten(1, (-1, GROUP))
    low, high = groups.amin(-1), groups.amax(-1)
    is_low = low.abs() > high.abs()
    scales = ((high - low) / steps).clamp_(min=1e-7)
    scales = torch.where(is_low, scales, -scales)
    edges = torch.where(is_low, low, high)
    steps_to_zero = (edges / scales).round_()
    scales = torch.where(steps_to_zero != 0, edges / steps_to_zero, scales)
    biases = torch.where(steps_to_zero != 0, edges, torch.zeros_like(edges))
    values = ((groups - biases[..., None]) / scales[..., None]).round_().clamp_(0, steps).to(torch.uint8).flatten(1)
    if bits == 4:
        values = values[:, 0::2] | (values[:, 1::2] << 4)
    return values.contiguous().view(torch.uint32), scales, biases
