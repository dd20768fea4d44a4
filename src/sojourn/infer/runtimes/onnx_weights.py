"""Reads the weights back from the files of an ONNX export, dequantized, under transformers' names."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

_QUANTIZED = {"_q8": 8, "_q4": 4}
_PLUS_ONE = "+1"  # Gemma's norms are stored so


def read_weights(graph: Path) -> Iterator[tuple[str, Tensor]]:
    """One at a time; those that are not quantized stay in the file until they are used."""
    import onnx
    import torch

    model = onnx.load(str(graph), load_external_data=False)
    tensors = {one.name: one for one in model.graph.initializer}
    products = [node for node in model.graph.node if node.op_type == "MatMulNBits"]
    widths = {node.input[1]: next(one.i for one in node.attribute if one.name == "K") for node in products}
    for name, tensor in tensors.items():
        bits = _QUANTIZED.get(name[-3:])
        if bits is not None:
            base = name[:-3]
            parts = [_array(tensors[one], graph.parent) for one in _parts(base, bits)]
            yield base, torch.from_numpy(_dequantized(parts, bits, widths.get(name, tensor.dims[1])))
        elif name.endswith((".weight", ".bias")):
            yield name, torch.from_numpy(_array(tensor, graph.parent))
        elif name.endswith(_PLUS_ONE):
            yield name.removesuffix(_PLUS_ONE), torch.from_numpy(_array(tensor, graph.parent) - 1)


def _parts(base: str, bits: int) -> list[str]:
    return [f"{base}_q{bits}", f"{base}_scales", *([f"{base}_zeros"] if bits == 4 else [])]


def _array(tensor: Any, folder: Path) -> np.ndarray:
    import numpy as np
    from onnx import helper, numpy_helper

    at = {entry.key: entry.value for entry in tensor.external_data}
    if not at:
        found: np.ndarray = numpy_helper.to_array(tensor).copy()
        return found
    kind = helper.tensor_dtype_to_np_dtype(tensor.data_type)
    path, shape = folder / Path(at["location"]).name, tuple(tensor.dims)
    return np.memmap(path, kind, mode="c", offset=int(at["offset"]), shape=shape)


def _dequantized(parts: list[np.ndarray], bits: int, width: int) -> np.ndarray:
    import numpy as np

    scales = parts[1]
    values = parts[0].reshape(*scales.shape, -1)
    zeros: Any = np.float32(128)
    if bits == 4:
        values = np.stack([values & 15, values >> 4], -1).reshape(*scales.shape, -1)
        pairs = np.stack([parts[2] & 15, parts[2] >> 4], -1).reshape(len(scales), -1)
        zeros = pairs[:, : scales.shape[1], None].astype(np.float32)
    plain = (values.astype(np.float32) - zeros) * scales[..., None]
    found: np.ndarray = plain.reshape(len(scales), -1)[:, :width]
    return found
