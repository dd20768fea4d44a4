"""Decides for each document whether it stays, in which split and how often, and writes it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from sojourn.config.data import DataConfig, Source
from sojourn.data.clean.duplicates import ExactDuplicates, NearDuplicates
from sojourn.data.encode import PAIR, EncodedChunk
from sojourn.data.row_writer import RowWriter, gather
from sojourn.data.sources.source import OpenedSource
from sojourn.data.tally import Tally
from sojourn.errors import UserError

_EVAL_PARTS = 1_000_003


@dataclass
class Router:
    """Decides for each document whether it stays, in which split and how often, and writes it."""

    data: DataConfig
    writers: dict[str, RowWriter]
    unit: int
    near: NearDuplicates | None = None
    seen: ExactDuplicates = field(default_factory=ExactDuplicates)
    taken: dict[int, tuple[int, int]] = field(default_factory=dict)
    total: int = 0

    def __post_init__(self) -> None:
        self.tally = Tally(self.data)
        if self.data.clean.duplicates == "near":
            self.near = NearDuplicates(self.data.clean.similarity)

    def has_enough(self, opened: OpenedSource, held: bool) -> bool:
        documents, size = self.taken.get(id(opened), (0, 0))
        source, take = opened.source, self.data.take
        return (
            (source.take is not None and documents >= source.take)
            or (source.size is not None and size >= source.size and not _is_builtin(source))
            or (take is not None and self.total >= take and not held)
        )

    def add(self, opened: OpenedSource, held: bool, encoded: EncodedChunk) -> None:
        self.tally.read(encoded)
        if ((encoded.kinds == PAIR) != (self.unit == 2)).any():
            raise UserError(
                f"{opened.source.path}: preference pairs and other documents; prepare them apart, each for its own run"
            )
        copies = self._copies(opened, held, encoded)
        aside = np.full(len(copies), held)
        if not self.data.eval_sources:
            aside = encoded.fingerprints % np.uint64(_EVAL_PARTS) < self.data.eval_fraction * _EVAL_PARTS
        for name, times in (("train", np.where(aside, 0, copies)), ("eval", np.where(aside, copies.clip(max=1), 0))):
            getattr(self.tally, name).add(encoded, times)
            self._write(self.writers[name], encoded, times)

    def _copies(self, opened: OpenedSource, held: bool, encoded: EncodedChunk) -> np.ndarray:
        """How often each document is taken: a weight of 2.3 gives it twice, and three tenths of them once more."""
        source, fingerprints = opened.source, encoded.fingerprints
        documents, size = self.taken.get(id(opened), (0, 0))
        stays = np.ones(len(fingerprints), bool)
        if source.take is not None:
            stays &= documents + np.arange(len(stays)) < source.take
        if source.size is not None and not _is_builtin(source):
            stays &= size + np.cumsum(encoded.sizes) <= source.size
        self.taken[id(opened)] = (documents + len(stays), size + int(encoded.sizes.sum()))
        stays &= self._not_seen(encoded, stays)
        whole, part = divmod(source.weight, 1.0)
        copies = np.where(stays, int(whole) + (fingerprints < part * 2.0**64), 0)
        if self.data.take is not None and not held:
            room = max(0, int(self.data.take) - self.total)
            copies = np.diff(np.minimum(np.cumsum(copies), room), prepend=0)
        self.total += 0 if held else int(copies.sum())
        return copies

    def _not_seen(self, encoded: EncodedChunk, stays: np.ndarray) -> np.ndarray:
        """Which documents are no duplicates of earlier ones; all of them, if duplicates are to be kept."""
        new = np.ones(len(stays), bool)
        new[stays] = self.seen.new(encoded.fingerprints[stays])
        self.tally.duplicates += int((~new).sum())
        if self.data.clean.duplicates == "keep":
            return np.ones(len(stays), bool)
        if self.near is not None and encoded.signatures is not None:
            left = np.flatnonzero(new & stays)
            unlike = self.near.new([encoded.signatures[number] for number in left])
            self.tally.near_duplicates += int((~unlike).sum())
            new[left[~unlike]] = False
        return new

    def _write(self, writer: RowWriter, encoded: EncodedChunk, times: np.ndarray) -> None:
        lengths = encoded.lengths
        units = np.repeat(np.arange(len(lengths) // self.unit), times[encoded.document[:: self.unit]])
        pieces = (units[:, None] * self.unit + np.arange(self.unit)).reshape(-1)
        if len(pieces):
            where = gather((np.cumsum(lengths) - lengths)[pieces], lengths[pieces])
            writer.add(encoded.ids[where], encoded.mask[where], lengths[pieces])

    def news(self, seconds: float) -> str:
        tokens = sum(writer.added for writer in self.writers.values())
        return f"{self.tally.records:,} records, {tokens:,} tokens, {tokens / seconds:,.0f} a second"


def _is_builtin(source: Source) -> bool:
    return source.path.startswith("builtin:")
