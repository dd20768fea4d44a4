"""Decides for each document whether it is kept, in which split, and how often; then hands it to the split's writer.

This runs in the main process; all costly work on a chunk has been done in a worker. Memory grows by 8 bytes a
document, to count exact duplicates.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from sojourn.config.data import DataConfig
from sojourn.data.clean.duplicates import ExactDuplicates, NearDuplicates
from sojourn.data.encode import PAIR, EncodedChunk
from sojourn.data.row_writer import RowWriter, token_indices
from sojourn.data.sources.chunks import Sample, copies_by_weight
from sojourn.data.sources.source import OpenedSource
from sojourn.data.tally import Tally
from sojourn.errors import UserError

_EVAL_BUCKETS = 1_000_003


@dataclass
class Router:
    data: DataConfig
    held_out: Sample | None
    writers: dict[str, RowWriter]
    unit: int
    near: NearDuplicates | None = None
    exact: ExactDuplicates = field(default_factory=ExactDuplicates)
    taken: dict[int, tuple[int, int]] = field(default_factory=dict)  # documents and bytes of each source
    total: int = 0

    def __post_init__(self) -> None:
        self.tally = Tally(self.data)
        if self.data.clean.duplicates == "near":
            self.near = NearDuplicates(self.data.clean.similarity)

    def has_enough(self, opened: OpenedSource, for_eval: bool) -> bool:
        documents, size = self.taken.get(id(opened), (0, 0))
        limits, take = opened.limits, self.data.take
        return (
            (limits.take is not None and documents >= limits.take)
            or (limits.size is not None and size >= limits.size)
            or (take is not None and self.total >= take and not for_eval)
        )

    def add(self, opened: OpenedSource, for_eval: bool, encoded: EncodedChunk) -> None:
        self.tally.add(opened.source.path, encoded)
        if ((encoded.kinds == PAIR) != (self.unit == 2)).any():
            raise UserError(
                f"{opened.source.path}: preference pairs mixed with other documents; prepare each kind in its own run"
            )
        copies = self._copies(opened, for_eval, encoded)
        held_out = self._held_out(encoded.fingerprints, for_eval)
        train, evaluation = np.where(held_out, 0, copies), np.where(held_out, copies.clip(max=1), 0)
        for name, times in (("train", train), ("eval", evaluation)):
            getattr(self.tally, name).add(encoded, times)
            self._write(self.writers[name], encoded, times)

    def _held_out(self, fingerprints: np.ndarray, for_eval: bool) -> np.ndarray:
        if self.data.eval_sources:
            return np.full(len(fingerprints), for_eval)
        if self.held_out:
            return self.held_out.contains(fingerprints)
        buckets: np.ndarray = fingerprints % np.uint64(_EVAL_BUCKETS)
        return buckets < self.data.eval_fraction * _EVAL_BUCKETS

    def _copies(self, opened: OpenedSource, for_eval: bool, encoded: EncodedChunk) -> np.ndarray:
        """How often each document is taken."""
        limits, fingerprints = opened.limits, encoded.fingerprints
        documents, size = self.taken.get(id(opened), (0, 0))
        stays = np.ones(len(fingerprints), bool)
        if limits.take is not None:
            stays &= documents + np.arange(len(stays)) < limits.take
        if limits.size is not None:
            stays &= size + np.cumsum(encoded.sizes) <= limits.size
        self.taken[id(opened)] = (documents + len(stays), size + int(encoded.sizes.sum()))
        stays &= self._not_duplicate(encoded, stays)
        copies = np.where(stays, copies_by_weight(fingerprints, limits.weight), 0)
        if self.data.take is not None and not for_eval:
            left = max(0, int(self.data.take) - self.total)
            copies = np.diff(np.minimum(np.cumsum(copies), left), prepend=0)
        self.total += 0 if for_eval else int(copies.sum())
        return copies

    def _not_duplicate(self, encoded: EncodedChunk, stays: np.ndarray) -> np.ndarray:
        """Which documents are not duplicates of earlier ones; all of them, if duplicates are kept."""
        new = np.ones(len(stays), bool)
        new[stays] = self.exact.add(encoded.fingerprints[stays])
        self.tally.add_duplicates(encoded, ~new, "exact")
        if self.data.clean.duplicates == "keep":
            return np.ones(len(stays), bool)
        if self.near is not None and encoded.signatures is not None:
            left = np.flatnonzero(new & stays)
            distinct = self.near.add([encoded.signatures[index] for index in left])
            alike = np.zeros(len(stays), bool)
            alike[left[~distinct]] = True
            self.tally.add_duplicates(encoded, alike, "near")
            new &= ~alike
        return new

    def _write(self, writer: RowWriter, encoded: EncodedChunk, times: np.ndarray) -> None:
        lengths = encoded.lengths
        units = np.repeat(np.arange(len(lengths) // self.unit), times[encoded.document[:: self.unit]])
        pieces = (units[:, None] * self.unit + np.arange(self.unit)).reshape(-1)
        if len(pieces):
            indices = token_indices((np.cumsum(lengths) - lengths)[pieces], lengths[pieces])
            writer.add(encoded.ids[indices], encoded.mask[indices], lengths[pieces])

    def format_progress(self, seconds: float) -> str:
        tokens = sum(writer.added for writer in self.writers.values())
        return f"{self.tally.records:,} records, {tokens:,} tokens, {tokens / seconds:,.0f} tokens/s"
