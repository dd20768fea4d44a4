"""LoRA adapters over one base, several in one batch.

All adapters of a matrix are one: their A matrices below each other, their B matrices side by side. A token's values
between the two are zero but for its own adapter. So a batch costs two more matmuls a matrix, whatever adapters it has.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from sojourn.errors import UserError
from sojourn.infer.adapter_weights import AdapterWeights, open_adapter
from sojourn.infer.engine.decoder import Decoder

_NAME = re.compile(r".*\blayers\.(\d+)\.(?:self_attn|mlp)\.(\w+)\.weight")
_PARTS = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "gate_up": ("gate_proj", "up_proj"),
    "o": ("o_proj",),
    "down": ("down_proj",),
}
_FUSED = {"qkv_proj": "qkv", "gate_up_proj": "gate_up"}


@dataclass
class _Matrix:
    """`a_RI` and `b_OR` of all adapters; `owner_R`: the adapter of each row between them."""

    a_RI: Tensor
    b_OR: Tensor
    owner_R: Tensor


@dataclass
class Adapters:
    """`indices`: of each name, from 1 on."""

    indices: dict[str, int] = field(default_factory=dict)
    _loaded: dict[str, dict[tuple[int, str], tuple[Tensor, Tensor]]] = field(default_factory=dict)
    _matrices: dict[tuple[int, str], _Matrix] = field(default_factory=dict)

    def load(self, name: str, folder: Path, decoder: Decoder) -> None:
        """Raises UserError where the adapter does not fit, or changes more than the engine can add."""
        self._loaded[name] = dict(_matrices(open_adapter(folder), decoder))
        self._join(decoder)

    def unload(self, name: str, decoder: Decoder) -> None:
        del self._loaded[name]
        self._join(decoder)

    def add(self, y_TO: Tensor, x_TI: Tensor, layer: int, name: str, adapter_T: Tensor | None) -> Tensor:
        """Adds each token's adapter to the outputs of a matrix."""
        matrix = self._matrices.get((layer, name))
        if adapter_T is None or matrix is None:
            return y_TO
        between_TR = (x_TI @ matrix.a_RI.T) * (matrix.owner_R == adapter_T[:, None])
        return y_TO.addmm_(between_TR, matrix.b_OR.T)

    def _join(self, decoder: Decoder) -> None:
        names = list(self._loaded)
        self.indices = {name: at + 1 for at, name in enumerate(names)}
        self._matrices = {}
        for key in {key for one in self._loaded.values() for key in one}:
            having = [(self.indices[name], *self._loaded[name][key]) for name in names if key in self._loaded[name]]
            owner = torch.cat([torch.full((len(a),), index) for index, a, _ in having])
            a, b = torch.cat([a for _, a, _ in having]), torch.cat([b for _, _, b in having], 1)
            to = {"device": decoder.device, "dtype": decoder.dtype}
            self._matrices[key] = _Matrix(a.to(**to), b.to(**to), owner.to(decoder.device))


def _matrices(adapter: AdapterWeights, decoder: Decoder) -> Iterator[tuple[tuple[int, str], tuple[Tensor, Tensor]]]:
    """A and B of each of the engine's matrices; B is scaled."""
    _refuse(adapter)
    found: dict[tuple[int, str], list[tuple[str, Tensor, Tensor]]] = {}
    for name in adapter.modules():
        match = _NAME.fullmatch(name)
        part = match[2] if match else ""
        matrix = _FUSED.get(part) or next((key for key, parts in _PARTS.items() if part in parts), None)
        if match is None or matrix is None or int(match[1]) >= len(decoder.layers):
            raise UserError(
                f"{adapter.path}: it changes {name}, which the engine cannot; merge it: sojourn export --to hf"
            )
        a, b, scaling = adapter.lora(name)
        found.setdefault((int(match[1]), matrix), []).append((part, a, b * scaling))
    for (layer, matrix), parts in found.items():
        sizes = _sizes(decoder, layer, matrix)
        yield (layer, matrix), _join_parts(adapter.path, matrix, parts, sizes)


def _refuse(adapter: AdapterWeights) -> None:
    dora = any(adapter.has_magnitude(name) for name in adapter.modules())
    reason = "is a DoRA" if dora else "replaces whole tensors" if adapter.saved() else None
    reason = reason or ("has biases" if adapter.biased() else None)
    if reason is not None:
        raise UserError(f"{adapter.path}: the adapter {reason}; serve it merged: sojourn serve {adapter.path}")


def _sizes(decoder: Decoder, layer: int, matrix: str) -> dict[str, int]:
    """Outputs of each part of a matrix, in order."""
    spec = decoder.layers[layer].attention
    kv = spec.kv_heads * spec.head_dim
    width = decoder.embedding_VD.shape[1]
    if matrix == "qkv":
        return {"q_proj": spec.heads * spec.head_dim, "k_proj": kv, "v_proj": kv}
    if matrix == "gate_up":
        return {"gate_proj": decoder.mlp_size, "up_proj": decoder.mlp_size}
    return {_PARTS[matrix][0]: width}


def _join_parts(
    path: Path, matrix: str, parts: list[tuple[str, Tensor, Tensor]], sizes: dict[str, int]
) -> tuple[Tensor, Tensor]:
    """A's of all parts below each other; each part's B in its own rows and columns."""
    total = sum(sizes.values())
    a = torch.cat([a for _, a, _ in parts])
    b = torch.zeros(total, len(a))
    starts = dict(zip(sizes, [sum(list(sizes.values())[:at]) for at in range(len(sizes))], strict=True))
    column = 0
    for part, own_a, own_b in parts:
        size = sizes.get(part, total)
        if len(own_b) != size:
            raise UserError(f"{path}: {part} has {len(own_b)} outputs there, {size} in the base model")
        start = starts.get(part, 0)
        b[start : start + size, column : column + len(own_a)] = own_b
        column += len(own_a)
    return a, b
