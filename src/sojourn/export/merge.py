"""Base weights with adapters merged into them, computed when they are read: some rows at a time, in fp32, rounded once
to the base's dtype. Neither the base nor the result is ever in memory as a whole."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sojourn.errors import UserError
from sojourn.export.combine import Combine, dare_mask, ties, trim_threshold
from sojourn.infer.adapter_weights import WITH_PEFT, AdapterWeights
from sojourn.infer.weight_source import FolderWeights, WeightSource, check_finite, is_tied, row_pieces
from sojourn.model.weights import is_finite

if TYPE_CHECKING:
    from torch import Tensor, dtype

_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight")
_HEAD = "lm_head.weight"
_BLOCK = 1 << 19  # values that are merged at a time: in fp32 they stay in the CPU's cache


class MergedWeights:
    """`tokenizer_folder`: the base's, unless another is set. Several threads may read."""

    def __init__(self, base: WeightSource, adapters: Sequence[AdapterWeights], combine: Combine | None = None) -> None:
        self.base, self.adapters, self.combine = base, list(adapters), combine or Combine()
        self.generation_config: dict[str, Any] = base.generation_config
        self.tokenizer_folder: Path = base.tokenizer_folder
        self._base_names = base.names()
        self._unchecked_base_rows = base.unchecked_rows if isinstance(base, FolderWeights) else base.rows
        self._embedding = next((name for name in self._base_names if name.endswith(_EMBEDDINGS)), "")
        self._tied = _HEAD not in self._base_names and is_tied(base.config)
        self._unties = self._tied and any(map(self._changes_one_end, adapters))
        self.config = {**base.config, **({"tie_word_embeddings": False} if self._unties else {})}
        for adapter in adapters:
            self._check_fit(adapter)
        self._changed = {name for one in adapters for name in (*one.modules(), *one.saved(), *one.biased())}
        self._lora = lru_cache(maxsize=4 * len(self.adapters))(lambda number, name: self.adapters[number].lora(name))
        self._column_norms = lru_cache(maxsize=4)(self._compute_column_norms)
        self._thresholds: list[float] | None = None
        self._lock = threading.Lock()

    def names(self) -> list[str]:
        return [*self._base_names, *([_HEAD] if self._unties else [])]

    def shape(self, name: str) -> tuple[int, ...]:
        return self.base.shape(self._in_base(name))

    def dtype(self, name: str) -> dtype:
        return self.base.dtype(self._in_base(name))

    def load(self, name: str) -> Tensor:
        import torch

        shape = self.shape(name)
        if name not in self._changed:
            return self.base.load(self._in_base(name))
        whole = torch.empty(shape, dtype=self.dtype(name))
        for start, stop in row_pieces(shape):
            whole[start:stop] = self.rows(name, start, stop)
        return whole

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        import torch

        if name not in self._changed:
            return self.base.rows(self._in_base(name), start, stop)
        rows = self._unchecked_base_rows(self._in_base(name), start, stop)
        with torch.no_grad():
            for first, last in row_pieces(tuple(rows.shape), _BLOCK):
                rows[first:last] = self._merge(name, rows[first:last].float(), start + first, start + last)
        if not is_finite(rows):
            self.base.rows(self._in_base(name), start, stop)  # raises if it is the base's
        return check_finite(rows, name, self.adapters[0].path)

    def stamp(self) -> str:
        return " ".join([self.base.stamp(), *(one.stamp() for one in self.adapters), repr(self.combine)])

    def _in_base(self, name: str) -> str:
        return self._embedding if self._tied and name == _HEAD else name

    def _changes_one_end(self, adapter: AdapterWeights) -> bool:
        """An adapter is on one of two tied layers, so that they differ from then on, unless it keeps them tied."""
        trained = tuple(f"{name}.weight" for name in adapter.config.get("modules_to_save") or ())
        saved = {name for name in adapter.saved() if f".{name}".endswith(tuple(f".{one}" for one in trained))}
        ends = {self._embedding, _HEAD} & {*adapter.modules(), *saved}
        return bool(ends) and not adapter.config.get("ensure_weight_tying")

    def _check_fit(self, adapter: AdapterWeights) -> None:
        known = {*self._base_names, *([_HEAD] if self._tied else [])}
        shapes: dict[str, tuple[int, ...]] = {name: adapter.changed_shape(name) for name in adapter.modules()}
        shapes |= {name: adapter.saved_shape(name) for name in adapter.saved()}
        shapes |= {name: shapes[weight][:1] for name, weight in adapter.biased().items()}
        for name, shape in shapes.items():
            there = self.base.shape(self._in_base(name)) if name in known else None
            if there == shape:
                continue
            if there and name in (self._embedding, _HEAD) and shape[0] > there[0] and shape[1:] == there[1:]:
                raise UserError(
                    f"{adapter.path}: trained with {shape[0] - there[0]} tokens added to its base ({name} has "
                    f"{shape[0]:,} rows, the base's {there[0]:,}), which is not merged here; {WITH_PEFT}"
                )
            sizes = "×".join(map(str, shape))
            found = f"is {'×'.join(map(str, there))} there" if there else "is not there"
            of = f" (it was trained on {adapter.base_name})" if adapter.base_name else ""
            raise UserError(
                f"{adapter.path}: an adapter of another base: its {name} is {sizes}, but {found}; "
                f"name its own base: --base DIR{of}"
            )

    def _merge(self, name: str, rows: Tensor, start: int, stop: int) -> Tensor:
        """`rows`: the base's, in fp32; they may be changed."""
        changing = [number for number, one in enumerate(self.adapters) if self._touches(one, name)]
        if len(changing) == 1 == self.adapters[changing[0]].weight and self.combine.method == "linear":
            return self._adapted(changing[0], name, rows, start, stop)
        vectors = [self._task_vector(number, name, rows, start, stop) for number in changing]
        if self.combine.method == "ties":
            return rows + ties(vectors, [self._threshold(number) for number in changing])
        if self.combine.method == "dare":
            columns = rows[0].numel()
            masks = [dare_mask(name, number, start, stop, columns, self.combine) for number in changing]
            vectors = [v * m.reshape(v.shape) / self.combine.density for v, m in zip(vectors, masks, strict=True)]
        for vector in vectors:
            rows = rows + vector
        return rows

    def _touches(self, adapter: AdapterWeights, name: str) -> bool:
        return name in adapter.saved() or name in adapter.modules() or name in adapter.biased()

    def _task_vector(self, number: int, name: str, rows: Tensor, start: int, stop: int) -> Tensor:
        """The change of these rows by one adapter, times its weight."""
        import torch

        adapter = self.adapters[number]
        is_plain = name in adapter.modules() and name not in adapter.saved() and not adapter.has_magnitude(name)
        if is_plain:
            return self._add_low_rank(number, name, torch.zeros_like(rows), start, stop) * adapter.weight
        return (self._adapted(number, name, rows.clone(), start, stop) - rows) * adapter.weight

    def _adapted(self, number: int, name: str, rows: Tensor, start: int, stop: int) -> Tensor:
        """The rows with one adapter, as peft's forward has them."""
        adapter = self.adapters[number]
        if name in adapter.saved():
            rows = adapter.saved_rows(name, start, stop).float()
        if name in adapter.biased():
            bias = adapter.bias(adapter.biased()[name])
            rows = rows if bias is None else rows + bias[start:stop]
        if name not in adapter.modules():
            return rows
        self._add_low_rank(number, name, rows, start, stop)
        magnitude = adapter.magnitude(name)
        if magnitude is None:
            return rows
        if adapter.is_transposed(name):
            return rows * (magnitude / self._column_norms(number, name))
        return rows * (magnitude[start:stop] / rows.norm(dim=1)).unsqueeze(1)

    def _add_low_rank(self, number: int, name: str, rows: Tensor, start: int, stop: int) -> Tensor:
        """Adds the LoRA's product to `rows`, in place."""
        a, b, scaling = self._lora(number, name)
        if self.adapters[number].is_transposed(name):
            return rows.addmm_(a[:, start:stop].T, b.T, alpha=scaling)
        return rows.addmm_(b[start:stop], a, alpha=scaling)

    def _compute_column_norms(self, number: int, name: str) -> Tensor:
        """Norms over all rows of the base plus LoRA, for layers whose weight is (in, out)."""
        import torch

        squares = torch.zeros(self.shape(name)[1], dtype=torch.float64)
        for start, stop in row_pieces(self.shape(name)):
            rows = self.base.rows(self._in_base(name), start, stop).float()
            squares += self._add_low_rank(number, name, rows, start, stop).double().square().sum(0)
        return squares.sqrt().float()

    def _threshold(self, number: int) -> float:
        with self._lock:  # two threads would compute it twice
            if self._thresholds is None:
                density, numbers = self.combine.density, range(len(self.adapters))
                self._thresholds = [trim_threshold(partial(self._pieces, number), density) for number in numbers]
        return self._thresholds[number]

    def _pieces(self, number: int) -> Iterator[Tensor]:
        """An adapter's whole task vector."""
        adapter = self.adapters[number]
        for name in sorted(name for name in self._changed if self._touches(adapter, name)):
            for start, stop in row_pieces(self.shape(name)):
                rows = self.base.rows(self._in_base(name), start, stop).float()
                yield self._task_vector(number, name, rows, start, stop)
