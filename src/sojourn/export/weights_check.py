"""Compares the weights that a runtime reads from an export with those of the source, tensor by tensor.

Quantization to 4 bits changes the logits of a small model as much as a wrong layer does, but changes each tensor by a
few percent only: what belongs elsewhere, is not permuted or was rounded before stands out here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sojourn.infer.gguf.config import family_of
from sojourn.infer.gguf.file import GgufFile
from sojourn.infer.runtimes.base import Runtime
from sojourn.infer.weight_source import WeightSource

if TYPE_CHECKING:
    from torch import Tensor

    Allowed = Callable[[str, Tensor], float]

_ROWS = 64  # of a tensor, that are quantized again for the error that is to be expected
_MARGIN = 1.05  # over the error that the format itself makes
_ROUNDING = 1e-3  # F16 scales, and 16-bit sources


def compare_weights(
    source: WeightSource, runtime: Runtime, most: float, expected: Allowed | None
) -> Iterator[tuple[str, str]]:
    """(tensor, what is wrong with it). `most`: relative error that any tensor may have. `expected`: the one that a
    tensor must have, where it is known."""
    found = dict(runtime.weights() or ())
    for name in source.names():
        if name not in found:
            yield name, "missing"
            continue
        ours, theirs = source.load(name).float(), found.pop(name).float()
        if ours.shape != theirs.shape:
            yield name, f"of shape {tuple(theirs.shape)}, expected {tuple(ours.shape)}"
            continue
        limit = most if expected is None else min(most, expected(name, ours))
        error = relative_error(theirs, ours)
        if not error <= limit:
            yield name, f"relative error {error:.2g}, allowed {limit:.2g}"


def relative_error(found: Tensor, expected: Tensor) -> float:
    norm = float(expected.norm())
    return float((found - expected).norm()) / norm if norm else float(found.norm())


def gguf_errors(file: Path, most: float) -> Allowed:
    """The error that quantizing a tensor to its type in the file makes, with a margin; `most` for types that only
    llama.cpp quantizes to."""
    import gguf
    import numpy as np

    opened = GgufFile(file)
    family = family_of(opened)

    def expected(name: str, tensor: Any) -> float:
        info = opened.tensors.get(family.gguf_name(name) or "")
        if info is None or tensor.ndim < 2:
            return most
        rows = tensor[np.unique(np.linspace(0, len(tensor) - 1, _ROWS).round())].contiguous()
        try:
            written = gguf.quants.dequantize(gguf.quants.quantize(rows.numpy(), info.type), info.type)
        except (NotImplementedError, gguf.QuantError):
            return most
        import torch

        return relative_error(torch.from_numpy(written).reshape(rows.shape), rows) * _MARGIN + _ROUNDING

    return expected
