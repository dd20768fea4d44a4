"""Counts what is read and what becomes of it, and fails when too many records are bad."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from sojourn.config.data import DataConfig
from sojourn.data.clean.language import detect_language_or_unknown
from sojourn.data.encode import PAIR, TEXT, EncodedChunk
from sojourn.data.truncate import DROPPED, SPLIT, TRUNCATED
from sojourn.errors import UserError

_MAX_EXAMPLES = 20
_MAX_PLACES = 5  # of documents with the same text
_MAX_TOKENS = 60  # of a duplicate that are shown


@dataclass
class Counts:
    """Documents of one split."""

    documents: int = 0
    chats: int = 0
    pairs: int = 0
    bytes: int = 0
    split_documents: int = 0
    truncated_texts: int = 0
    truncated_chats: int = 0
    dropped_chats: int = 0
    dropped_texts: int = 0
    longest: int = 0
    _lengths: np.ndarray = field(default_factory=lambda: np.zeros(40, np.int64))

    def add(self, encoded: EncodedChunk, copies: np.ndarray) -> None:
        kinds, outcomes = encoded.kinds, encoded.outcomes
        stays = outcomes != DROPPED

        def times(which: np.ndarray) -> int:
            return int(copies[which].sum())

        self.documents += times(stays)
        self.chats += times(stays & (kinds != TEXT))
        self.pairs += times(stays & (kinds == PAIR))
        self.bytes += int((copies * encoded.sizes)[stays].sum())
        self.split_documents += times(outcomes == SPLIT)
        self.truncated_texts += times((outcomes == TRUNCATED) & (kinds == TEXT))
        self.truncated_chats += times((outcomes == TRUNCATED) & (kinds != TEXT))
        self.dropped_texts += times(~stays & (kinds == TEXT))
        self.dropped_chats += times(~stays & (kinds != TEXT))
        lengths = encoded.document_lengths[copies > 0]
        self.longest = max(self.longest, int(lengths.max(initial=0)))
        self._lengths += np.bincount(np.frexp(lengths - 0.5)[1], copies[copies > 0], 40).astype(np.int64)

    def lengths(self) -> list[dict[str, int]]:
        """Documents by length in tokens before truncation, in bins that double: 1, 2, 3–4, 5–8, …"""
        powers = np.flatnonzero(self._lengths)
        return [
            {"from": 2 ** (power - 1) + 1 if power else 1, "to": 2**power, "documents": int(self._lengths[power])}
            for power in (range(int(powers[0]), int(powers[-1]) + 1) if len(powers) else ())
        ]

    def facts(self) -> dict[str, Any]:
        counts = {key: value for key, value in vars(self).items() if not key.startswith("_")}
        return {**counts, "lengths": self.lengths()}


@dataclass
class Duplicate:
    """A document that had come before: `ids` are its first tokens, `where` the places of some of its repeats, `count`
    of how many."""

    kind: Literal["exact", "near"]
    ids: list[int]
    where: list[str] = field(default_factory=list)
    count: int = 0


@dataclass
class Tally:
    """Everything that was read."""

    data: DataConfig
    train: Counts = field(default_factory=Counts)
    eval: Counts = field(default_factory=Counts)
    records: int = 0
    bad: int = 0
    bad_examples: list[tuple[str, str]] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    unused: dict[str, Counter[str]] = field(default_factory=dict)  # of each source: records by column
    duplicates: int = 0
    near_duplicates: int = 0
    duplicate_examples: dict[int, Duplicate] = field(default_factory=dict)  # by fingerprint
    escaped: int = 0
    placeholders: int = 0
    unknown: int = 0
    texts: Counter[str] = field(default_factory=Counter)  # of each source: documents that are texts
    languages: dict[str, int] = field(default_factory=dict)

    def add(self, path: str, encoded: EncodedChunk) -> None:
        self.records += encoded.records
        self.bad += len(encoded.bad)
        self.bad_examples += encoded.bad[: _MAX_EXAMPLES - len(self.bad_examples)]
        self.escaped += encoded.escaped
        self.placeholders += encoded.placeholders
        self.unknown += encoded.unknown
        self.left_out.update(encoded.left_out)
        self.texts[path] += int((encoded.kinds == TEXT).sum())
        self.unused.setdefault(path, Counter()).update(encoded.unused)
        for text in encoded.samples:
            code = detect_language_or_unknown(text)
            self.languages[code] = self.languages.get(code, 0) + len(text.encode())
        # Fail early where the limit is far exceeded.
        if self.records >= 10_000 and self.bad > 10 * self.data.max_bad * self.records:
            self.check_bad()

    def add_duplicates(self, encoded: EncodedChunk, which: np.ndarray, kind: Literal["exact", "near"]) -> None:
        """Counts them, and keeps the first as examples."""
        if kind == "exact":
            self.duplicates += int(which.sum())
        else:
            self.near_duplicates += int(which.sum())
        examples = self.duplicate_examples
        for index in np.flatnonzero(which):
            fingerprint = int(encoded.fingerprints[index])
            if fingerprint not in examples and len(examples) < _MAX_EXAMPLES:
                examples[fingerprint] = Duplicate(kind, _first_tokens(encoded, int(index)))
            found = examples.get(fingerprint)
            if found is None:
                continue
            found.count += 1
            if len(found.where) < _MAX_PLACES:
                found.where.append(encoded.where[index])

    def check_bad(self) -> None:
        """Fails if the share of bad records exceeds `data.max_bad`."""
        if self.data.on_bad == "skip" or self.bad <= self.data.max_bad * self.records:
            return
        first = "; ".join(f"{where}: {why}" for where, why in self.bad_examples[:3])
        more = f" (and {self.bad - 3:,} more)" if self.bad > 3 else ""
        raise UserError(
            f"{first}{more}. Bad: {self.bad:,} of {self.records:,} records ({self.bad / self.records:.2%}); correct "
            "them, or leave them out with data.on_bad=skip"
        )

    def facts(self) -> dict[str, Any]:
        whole = sum(self.languages.values())
        large = {code: size for code, size in self.languages.items() if size >= whole / 200}
        large["?"] = whole - sum(size for code, size in large.items() if code != "?")  # unknown, or too small a share
        shares = sorted(((code, size) for code, size in large.items() if size), key=lambda item: (-item[1], item[0]))
        return {
            "records": self.records,
            "damaged": self.bad,
            "damaged_examples": [list(one) for one in self.bad_examples],
            "left_out": {key: count for key, count in self.left_out.items() if count},
            "unused_columns": [{"path": path, "columns": dict(names)} for path, names in self.unused.items() if names],
            "texts": {path: count for path, count in self.texts.items() if count},
            "duplicates": self.duplicates,
            "near_duplicates": self.near_duplicates,
            "special_token_texts": self.escaped,
            "media_placeholders": self.placeholders,
            "unknown_tokens": self.unknown,
            "languages": {code: round(size / whole, 4) for code, size in shares} if whole else {},
        }


def _first_tokens(encoded: EncodedChunk, document: int) -> list[int]:
    pieces = np.flatnonzero(encoded.document == document)
    if not len(pieces):  # too long, and left out
        return []
    start = int(encoded.lengths[: pieces[0]].sum())
    ids: list[int] = encoded.ids[start : start + min(int(encoded.lengths[pieces[0]]), _MAX_TOKENS)].tolist()
    return ids
