"""The prepared artefact: tokens, loss mask and rows as memory-mapped arrays, in a folder named by a hash of its inputs.

HASH covers the sources' bytes and every setting that matters, but no path and no number of workers, so it is the same
on every machine (`inputs.py`). An artefact is written to a stage folder, synced and renamed: it is complete or absent.
The train/eval split is by a hash of each document's content, so it stays when data is added.

prepared/HASH/
  artefact.json             format version, dtype, lengths, size and SHA-256 of each array
  report.json report.svg    what was read and what became of it
  probes.json               a few rendered chats with their token ids, to check exports against
  tokenizer/                as transformers opens it
  train/ eval/              tokens.bin mask.bin documents.bin rows.bin, all little-endian
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from sojourn.errors import RunFailed, UserError
from sojourn.run.folder import RunFolder
from sojourn.run.home import prepared_folder
from sojourn.storage.files import read_json, read_json_object, sha256

FORMAT = 2


@dataclass(frozen=True)
class Split:
    """Rows of packed documents. Row r is tokens[rows[r]:rows[r+1]]; `documents` are the start offsets of documents.

    In an artefact of preference pairs the documents of a row are chosen, rejected, chosen, rejected, …
    """

    tokens: np.ndarray
    mask: np.ndarray
    documents: np.ndarray
    rows: np.ndarray

    def __len__(self) -> int:
        return len(self.rows) - 1

    def row(self, index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Token ids, loss mask, and the start of each document in the row."""
        start, stop = self.rows[index], self.rows[index + 1]
        first, last = np.searchsorted(self.documents, [start, stop])
        return self.tokens[start:stop], self.mask[start:stop], self.documents[first:last] - start


@dataclass(frozen=True)
class Artefact:
    path: Path

    @cached_property
    def facts(self) -> dict[str, Any]:
        facts = read_json(self.path / "artefact.json")
        if not isinstance(facts, dict) or facts.get("format") != FORMAT:
            raise RunFailed(f"{self.path}: not a prepared artefact of this version; remove it and run: sojourn prepare")
        return facts

    @property
    def report(self) -> dict[str, Any]:
        return read_json_object(self.path / "report.json")

    @property
    def tokenizer(self) -> Path:
        return self.path / "tokenizer"

    @property
    def max_length(self) -> int:
        return int(self.facts["max_length"])

    @property
    def row_length(self) -> int:
        """Most tokens in a row: `max_length`, or twice that for preference pairs."""
        return self.max_length * (2 if self.facts["kind"] == "pairs" else 1)

    @property
    def is_pairs(self) -> bool:
        return bool(self.facts["kind"] == "pairs")

    @property
    def stop_ids(self) -> list[int]:
        """The tokens that end an answer or a text."""
        return [int(number) for number in self.facts["stop_ids"]]

    @property
    def vocab_size(self) -> int:
        return int(self.facts["vocab_size"])

    @property
    def pad_id(self) -> int:
        return int(self.facts["pad_id"])

    @cached_property
    def train(self) -> Split:
        return self._split("train")

    @cached_property
    def eval(self) -> Split:
        return self._split("eval")

    def _split(self, name: str) -> Split:
        dtypes = {"tokens": self.facts["dtype"], "mask": "|u1", "documents": "<i8", "rows": "<i8"}
        try:
            return Split(**{kind: self._array(f"{name}/{kind}.bin", dtype) for kind, dtype in dtypes.items()})
        except (OSError, ValueError, KeyError) as error:
            raise RunFailed(
                f"{self.path / name} is damaged ({error}); remove {self.path} and run: sojourn prepare"
            ) from None

    def _array(self, name: str, dtype: str) -> np.ndarray:
        path, size = self.path / name, int(self.facts["files"][name]["bytes"])
        if path.stat().st_size != size:
            raise ValueError(f"{path.name} has {path.stat().st_size:,} bytes instead of {size:,}")
        # A plain array view of the memmap is read a third faster.
        return np.asarray(np.memmap(path, np.dtype(dtype), "r")) if size else np.zeros(0, np.dtype(dtype))

    def damaged_files(self) -> list[str]:
        """The arrays whose bytes differ from what was written."""
        files = {name: self.path / name for name in self.facts["files"]}
        written = {name: facts["sha256"] for name, facts in self.facts["files"].items()}
        return [name for name, file in files.items() if not file.is_file() or sha256(file) != written[name]]


def artefact_of(run: RunFolder) -> Artefact:
    """What a run was trained on: where the run says, or in this machine's home."""
    written = read_json_object(run.environment).get("data")
    places = (Path(written), prepared_folder() / Path(written).name) if isinstance(written, str) else ()
    for path in places:
        if (path / "artefact.json").is_file():
            return Artefact(path)
    raise UserError(f"{run.path}: its prepared data is not on this machine; run: sojourn prepare {run.config}")


@dataclass(frozen=True)
class Batch:
    """Rows as arrays of shape (B, T). A label of -100 is not a target; positions restart with each document."""

    ids: np.ndarray
    labels: np.ndarray
    positions: np.ndarray
    documents: np.ndarray
    noise_keys: np.ndarray | None = None  # for NEFTune: see model/neftune.py

    @property
    def targets(self) -> int:
        return int((self.labels >= 0).sum())

    @property
    def real_tokens(self) -> int:
        return int((self.documents >= 0).sum())


def read_batch(split: Split, rows: np.ndarray, width: int, pad_id: int) -> Batch:
    """The given rows, padded on the right. Token t has token t+1 of its document as label, if the mask has it."""
    shape = (len(rows), width)
    ids, mask = np.full(shape, pad_id, np.int64), np.zeros(shape, np.uint8)
    is_start, is_padding = np.zeros(shape, bool), np.zeros(shape, bool)
    for i, row in enumerate(rows):  # row by row only what must be: the thread that prefetches holds up the step
        row_ids, row_mask, starts = split.row(int(row))
        length = len(row_ids)
        ids[i, :length], mask[i, :length] = row_ids, row_mask
        is_start[i, starts] = True
        if length < width:  # padding counts as one more document
            is_start[i, length], is_padding[i, length:] = True, True
    index = np.arange(width, dtype=np.int64)
    positions = index - np.maximum.accumulate(np.where(is_start, index, 0), axis=1)
    documents = np.cumsum(is_start, axis=1, dtype=np.int32) - 1
    documents[is_padding] = -1
    labels = np.full(shape, -100, np.int64)
    is_target = (mask[:, 1:] == 1) & ~is_start[:, 1:]
    labels[:, :-1][is_target] = ids[:, 1:][is_target]
    return Batch(ids, labels, positions, documents)
