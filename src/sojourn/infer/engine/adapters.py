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


@dataclass
class _Matrix:
    """`a_RI` and `b_OR` of all adapters; `owner_R`: the adapter of each row between them."""

    a_RI: Tensor
    b_OR: Tensor
    owner_R: Tensor


@dataclass
class Adapters:
    """`indices`: of each name, from 1 on. `changes`: how often adapters were loaded or unloaded."""

    indices: dict[str, int] = field(default_factory=dict)
    changes: int = 0
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
        self.changes += 1
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
    if (more := adapter.more_than_lora()) is not None:
        raise UserError(f"{adapter.path}: the adapter {more}; serve it merged: sojourn serve {adapter.path}")
    names = {(int(match[1]), match[2]): name for name in adapter.modules() if (match := _NAME.fullmatch(name))}
    left = set(adapter.modules())
    for index in range(len(decoder.layers)):
        for matrix, parts in _outputs(decoder, index).items():
            whole = f"{matrix}_proj"
            outputs = {whole: sum(parts.values())} if (index, whole) in names else parts  # one matrix there, too
            own = {part: names[index, part] for part in outputs if (index, part) in names}
            if own:
                a, b = _join_parts(adapter, own, outputs)
                order = decoder.layers[index].qkv_order if matrix == "qkv" else None
                yield (index, matrix), (a, b if order is None else b[order.cpu()])
                left -= set(own.values())
    if left:
        what = f"{adapter.path}: it changes {min(left)}, which the engine cannot"
        raise UserError(f"{what}; merge it: sojourn export --to hf")


def _outputs(decoder: Decoder, index: int) -> dict[str, dict[str, int]]:
    """Of each matrix: the parts that it joins, with their outputs."""
    spec, mlp, width = decoder.layers[index].attention, decoder.mlp_size, decoder.embedding_VD.shape[1]
    kv = spec.kv_heads * spec.head_dim
    return {
        "qkv": {"q_proj": spec.heads * spec.head_dim, "k_proj": kv, "v_proj": kv},
        "o": {"o_proj": width},
        "gate_up": {"gate_proj": mlp, "up_proj": mlp},
        "down": {"down_proj": width},
    }


def _join_parts(adapter: AdapterWeights, names: dict[str, str], outputs: dict[str, int]) -> tuple[Tensor, Tensor]:
    """A's of all parts below each other; each part's B in its own rows and columns."""
    left, right = [], []
    for part, size in outputs.items():
        b = torch.zeros(size, 0)
        if part in names:
            a, b, scaling = adapter.lora(names[part])
            if len(b) != size:
                raise UserError(f"{adapter.path}: {part} has {len(b)} outputs there, {size} in the base model")
            left.append(a)
            b = b * scaling
        right.append(b)
    return torch.cat(left), torch.block_diag(*right)
