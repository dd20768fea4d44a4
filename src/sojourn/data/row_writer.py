"""One split of an artefact on its way to disk: pieces are gathered, packed into rows block by block, and written.

Only one block is ever in memory, so that preparing needs no more of it however large the corpus is.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np

from sojourn.data.packing import pack_best_fit

_SMALLEST_BLOCK, _LARGEST_BLOCK = 4 << 20, 32 << 20


def gather(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The indices of all tokens of pieces that start and last so."""
    ends = np.cumsum(lengths)
    return np.repeat(starts - (ends - lengths), lengths) + np.arange(int(ends[-1]) if len(ends) else 0)


@dataclass
class RowWriter:
    """`unit` pieces belong together: 2 for preference pairs. `packing` as in the configuration."""

    folder: Path
    dtype: np.dtype
    row_length: int
    packing: str = "packed"
    unit: int = 1
    tokens: int = 0
    trained_tokens: int = 0
    pieces: int = 0
    rows: int = 0
    digests: dict[str, Any] = field(default_factory=dict)
    added: int = 0

    def __post_init__(self) -> None:
        self.folder.mkdir()
        self._block = min(max(1024 * self.row_length, _SMALLEST_BLOCK), _LARGEST_BLOCK)
        self._waiting: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self._held = 0
        self._files: dict[str, IO[bytes]] = {}
        for name in ("tokens", "mask", "documents", "rows"):
            self._files[name] = (self.folder / f"{name}.bin").open("wb")
            self.digests[name] = hashlib.sha256()

    def add(self, ids: np.ndarray, mask: np.ndarray, lengths: np.ndarray) -> None:
        """Pieces one after another. A block ends where its tokens are enough, whatever portions they come in."""
        while len(lengths):
            ends = np.cumsum(lengths)
            room = self._block - self._held
            count = int(np.searchsorted(ends, room)) + 1
            count = min(count + (-count) % self.unit, len(lengths))
            stop = int(ends[count - 1])
            self._waiting.append((ids[:stop].astype(self.dtype), mask[:stop].astype(np.uint8), lengths[:count]))
            self._held += stop
            self.added += stop
            ids, mask, lengths = ids[stop:], mask[stop:], lengths[count:]
            if self._held >= self._block:
                self._write_block()

    def close(self) -> None:
        if self._waiting:
            self._write_block()
        self._put("rows", np.array([self.tokens], "<i8"))
        for file in self._files.values():
            file.close()

    def _put(self, name: str, values: np.ndarray) -> None:
        data = np.ascontiguousarray(values).data.cast("B")
        self._files[name].write(data)
        self.digests[name].update(data)

    def _write_block(self) -> None:
        ids, mask, lengths = (np.concatenate(parts) for parts in zip(*self._waiting, strict=True))
        self._waiting, self._held = [], 0
        lengths = lengths.astype(np.int64)
        starts = np.cumsum(lengths) - lengths
        units = lengths.reshape(-1, self.unit).sum(axis=1)
        packed = self.packing == "packed"
        rows = pack_best_fit(units, self.row_length) if packed else [[number] for number in range(len(units))]
        order = np.array([unit for row in rows for unit in row], np.int64)
        order = (order[:, None] * self.unit + np.arange(self.unit)).reshape(-1)
        where = gather(starts[order], lengths[order])
        self._put("tokens", ids[where])
        self._put("mask", mask[where])
        placed = self.tokens + np.cumsum(lengths[order]) - lengths[order]
        firsts = np.cumsum([0, *(len(row) * self.unit for row in rows)])[:-1]
        self._put("documents", placed.astype("<i8"))
        self._put("rows", placed[firsts].astype("<i8"))
        self.tokens += int(lengths.sum())
        self.trained_tokens += int(mask.sum(dtype=np.int64))
        self.pieces += len(lengths)
        self.rows += len(rows)

    def facts(self) -> dict[str, Any]:
        fill = self.tokens / (self.rows * self.row_length) if self.rows else 0.0
        return {
            "pieces": self.pieces, "tokens": self.tokens, "trained_tokens": self.trained_tokens, "rows": self.rows,
            "fill": round(fill, 4),
        }  # fmt: skip
