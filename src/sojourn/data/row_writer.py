"""Writes one split of an artefact: buffers pieces, packs them into rows block by block, and appends to the arrays.

Only one block is in memory, so memory does not grow with the corpus.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np

from sojourn.data.packing import pack_best_fit

_MIN_BLOCK_TOKENS, _MAX_BLOCK_TOKENS = 4 << 20, 32 << 20


def token_indices(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The indices of all tokens of pieces with these starts and lengths."""
    ends = np.cumsum(lengths)
    return np.repeat(starts - (ends - lengths), lengths) + np.arange(int(ends[-1]) if len(ends) else 0)


@dataclass
class RowWriter:
    """`unit` consecutive pieces stay together in a row: 2 for preference pairs. `packing` is `data.packing`."""

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
        self._block_tokens = min(max(1024 * self.row_length, _MIN_BLOCK_TOKENS), _MAX_BLOCK_TOKENS)
        self._buffer: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self._buffered_tokens = 0
        self._files: dict[str, IO[bytes]] = {}
        self._open_files()

    def _open_files(self) -> None:
        self.folder.mkdir()
        for name in ("tokens", "mask", "documents", "rows"):
            self._files[name] = (self.folder / f"{name}.bin").open("wb")
            self.digests[name] = hashlib.sha256()

    def add(self, ids: np.ndarray, mask: np.ndarray, lengths: np.ndarray) -> None:
        """Appends pieces. Where a block ends depends on the tokens alone, not on how they are divided among calls."""
        while len(lengths):
            ends = np.cumsum(lengths)
            count = int(np.searchsorted(ends, self._block_tokens - self._buffered_tokens)) + 1
            count = min(count + (-count) % self.unit, len(lengths))
            stop = int(ends[count - 1])
            self._buffer.append((ids[:stop].astype(self.dtype), mask[:stop].astype(np.uint8), lengths[:count]))
            self._buffered_tokens += stop
            self.added += stop
            ids, mask, lengths = ids[stop:], mask[stop:], lengths[count:]
            if self._buffered_tokens >= self._block_tokens:
                self._write_block()

    def close(self) -> None:
        if self._buffer:
            self._write_block()
        self._append("rows", np.array([self.tokens], "<i8"))
        for file in self._files.values():
            file.close()

    def _append(self, name: str, values: np.ndarray) -> None:
        data = np.ascontiguousarray(values).data.cast("B")
        self._files[name].write(data)
        self.digests[name].update(data)

    def _write_block(self) -> None:
        ids, mask, lengths = (np.concatenate(parts) for parts in zip(*self._buffer, strict=True))
        self._buffer, self._buffered_tokens = [], 0
        lengths = lengths.astype(np.int64)
        starts = np.cumsum(lengths) - lengths
        units = lengths.reshape(-1, self.unit).sum(axis=1)
        packed = self.packing == "packed"
        rows = pack_best_fit(units, self.row_length) if packed else [[number] for number in range(len(units))]
        order = np.array([unit for row in rows for unit in row], np.int64)
        order = (order[:, None] * self.unit + np.arange(self.unit)).reshape(-1)
        indices = token_indices(starts[order], lengths[order])
        self._append("tokens", ids[indices])
        self._append("mask", mask[indices])
        document_starts = self.tokens + np.cumsum(lengths[order]) - lengths[order]
        firsts = np.cumsum([0, *(len(row) * self.unit for row in rows)])[:-1]
        self._append("documents", document_starts.astype("<i8"))
        self._append("rows", document_starts[firsts].astype("<i8"))
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


@dataclass
class RowCounter(RowWriter):
    """Counts the rows that a `RowWriter` would write, and keeps the lengths of their pieces."""

    lengths: list[np.ndarray] = field(default_factory=list)

    def _open_files(self) -> None:
        pass

    def _append(self, name: str, values: np.ndarray) -> None:
        pass

    def add(self, ids: np.ndarray, mask: np.ndarray, lengths: np.ndarray) -> None:
        self.lengths.append(lengths)
        super().add(ids, mask, lengths)
