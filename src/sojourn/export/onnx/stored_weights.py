"""How weights are stored beside the graph, and the nodes that apply them: fp32, fp16, or quantized in blocks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from sojourn.errors import RunFailed
from sojourn.export.onnx.blockwise import BLOCK, block_count, quantize_rows
from sojourn.export.onnx.graph import MICROSOFT, Graph
from sojourn.export.ranges import Part
from sojourn.infer.weight_source import WeightSource, row_pieces
from sojourn.model.weights import is_finite

if TYPE_CHECKING:
    import numpy as np

DATA_FILE = "model.onnx.data"
# onnxruntime multiplies int4 by fp32 directly, but unpacks a whole int8 weight at every call, which is 50 times
# slower for one token. With this level it rounds activations to int8 too, in blocks, and is fast.
_ACCURACY_LEVELS = {8: 4}
_ALIGNMENT = 4096  # so that onnxruntime can map the file into memory


@dataclass(frozen=True)
class Precision:
    """`dtype`: of matrix products and the KV cache; the residual stream and norms are fp32. `bits`: of the layers'
    weights; 0: they have `dtype`. `embedding_bits`: of embedding and LM head, which suffer more."""

    dtype: str
    bits: int = 0
    embedding_bits: int = 0


PRECISIONS = {
    "fp32": Precision("float32"),
    "fp16": Precision("float16"),
    "int8": Precision("float32", 8, 8),
    "int4": Precision("float32", 4, 8),
}


class StoredWeights:
    """`names`: the source's name of a weight, by its name in the graph."""

    def __init__(self, graph: Graph, source: WeightSource, names: dict[str, str], precision: Precision) -> None:
        self.parts: list[Part] = []
        self.bytes = 0
        self._graph, self._source, self._names, self._precision = graph, source, names, precision
        self._stored: dict[tuple[str, int, bool], list[str]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def vector(self, name: str, dtype: str, add: float = 0.0) -> str:
        """A norm's weight or a bias, plus `add`; within the graph's file. Names are transformers', with an ending that
        says what was done to the values: `infer/runtimes/onnx_weights.py` reads them back."""
        value = (self._source.load(self._names[name]).float() + add).numpy().astype(dtype)
        return self._graph.tensor(self._names[name] + (f"+{add:g}" if add else ""), value)

    def linear(self, values: str, name: str) -> str:
        """`values` [tokens, in] times the transposed weight, plus its bias where it has one. In `dtype`."""
        return self._product(values, name, self._precision.bits)

    def embedding(self, ids: str) -> str:
        """[…, width], in `dtype`."""
        name, bits = "embed_tokens.weight", self._precision.embedding_bits
        if bits and self._shape(name)[1] % BLOCK == 0:
            table, scales, *_ = self._quantized(name, bits, flat=True)
            return self._graph.node(
                "GatherBlockQuantized", [table, ids, scales], domain=MICROSOFT,
                gather_axis=0, quantize_axis=1, block_size=BLOCK, bits=bits,
            )  # fmt: skip
        return self._graph.node("Gather", [self._plain(name), ids])

    def head(self, values: str) -> str:
        name = "lm_head.weight" if "lm_head.weight" in self else "embed_tokens.weight"
        return self._product(values, name, self._precision.embedding_bits)

    def _product(self, values: str, name: str, bits: int) -> str:
        bias_name = f"{name.removesuffix('weight')}bias"
        bias = [self.vector(bias_name, self._precision.dtype)] if bias_name in self else []
        if not bits:
            return self._graph.node("Gemm", [values, self._plain(name), *bias], transB=1)
        rows, width = self._shape(name)
        product = self._graph.node(
            "MatMulNBits", [values, *self._quantized(name, bits)], domain=MICROSOFT,
            K=width, N=rows, bits=bits, block_size=BLOCK, accuracy_level=_ACCURACY_LEVELS.get(bits, 0),
        )  # fmt: skip
        return self._graph.node("Add", [product, *bias]) if bias else product

    def _shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(self._names[name])

    def _plain(self, name: str) -> str:
        if (name, 0, False) not in self._stored:
            kind = self._precision.dtype
            row_bytes = math.prod(self._shape(name)[1:]) * (2 if kind == "float16" else 4)
            load = partial(_plain_rows, self._source, self._names[name], kind)
            self._stored[name, 0, False] = [self._add("", name, kind, self._shape(name), row_bytes, load)]
        return self._stored[name, 0, False][0]

    def _quantized(self, name: str, bits: int, flat: bool = False) -> list[str]:
        """Names of values, scales and, with 4 bits, zero points. `flat`: without a dimension for blocks, over the same
        bytes."""
        if (name, bits, flat) in self._stored:
            return self._stored[name, bits, flat]
        rows, width = self._shape(name)
        blocks = block_count(width)
        packed = BLOCK * bits // 8
        if (name, bits, not flat) in self._stored:
            values, scales, *zeros = self._stored[name, bits, not flat]
            alias = self._alias(values, f"{name}_{'flat' if flat else 'blocks'}", rows, blocks, packed, flat)
            self._stored[name, bits, flat] = [alias, scales, *zeros]
            return self._stored[name, bits, flat]
        load = partial(_quantized_rows, self._source, self._names[name], bits)
        shape = (rows, blocks * packed) if flat else (rows, blocks, packed)
        found = [
            self._add(f"_q{bits}", name, "uint8", shape, blocks * packed, partial(load, 0)),
            self._add("_scales", name, "float32", (rows, blocks), blocks * 4, partial(load, 1)),
        ]
        if bits == 4:
            bytes_ = -(-blocks // 2)
            found.append(self._add("_zeros", name, "uint8", (rows, bytes_), bytes_, partial(load, 2)))
        self._stored[name, bits, flat] = found
        return found

    def _alias(self, values: str, name: str, rows: int, blocks: int, packed: int, flat: bool) -> str:
        """The same bytes of the file as another tensor."""
        stored = next(one for one in self._graph.initializers if one.name == values)
        at = {entry.key: entry.value for entry in stored.external_data}
        shape = (rows, blocks * packed) if flat else (rows, blocks, packed)
        return self._graph.external(name, stored.data_type, shape, at["location"], int(at["offset"]), int(at["length"]))

    def _add(
        self, suffix: str, name: str, kind: str, shape: tuple[int, ...], row_bytes: int, load: Callable[[int, int], Any]
    ) -> str:
        """Plans a tensor's parts in the file: the same pieces of rows for all tensors that are made of a weight."""
        padding = -self.bytes % _ALIGNMENT
        if padding:
            self._plan(padding, partial(bytes, padding))
        start = self.bytes
        for first, last in row_pieces(self._shape(name)):
            self._plan((last - first) * row_bytes, partial(load, first, last))
        stored = self._names[name] + suffix
        return self._graph.external(stored, _onnx_type(kind), shape, DATA_FILE, start, self.bytes - start)

    def _plan(self, length: int, load: Callable[[], Any]) -> None:
        self.parts.append(Part(self.bytes, length, load))
        self.bytes += length


def _onnx_type(kind: str) -> int:
    from onnx import TensorProto

    return int({"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16, "uint8": TensorProto.UINT8}[kind])


def _plain_rows(source: WeightSource, name: str, kind: str, start: int, stop: int) -> np.ndarray:
    import torch

    rows = source.rows(name, start, stop).to(getattr(torch, kind)).contiguous()
    if kind == "float16" and not is_finite(rows):
        raise RunFailed(f"{name} has values that fp16 cannot hold; export it with --quantize fp32")
    values: np.ndarray = rows.view(torch.uint8).numpy()
    return values.reshape(-1)


def _quantized_rows(source: WeightSource, name: str, bits: int, which: int, start: int, stop: int) -> np.ndarray:
    """Values (0), scales (1) or zero points (2). Each is computed anew: an export that goes on may need one alone."""
    import torch

    found = quantize_rows(source.rows(name, start, stop), bits)[which]
    values: np.ndarray = found.contiguous().view(torch.uint8).numpy()
    return values.reshape(-1)
