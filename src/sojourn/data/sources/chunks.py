"""A chunk: about a megabyte of raw records of one file, and how they become documents.

Readers only split files into chunks. Decoding, parsing, format detection and conversion happen in `parse_chunk`, which
runs in a worker process. The result does not depend on where a file is split into chunks.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from sojourn.data.order import splitmix64
from sojourn.data.sources.columns import (
    ReadRecord,
    check_media,
    has_placeholder,
    rename_columns,
    row_marks,
    unread_turn_keys,
)
from sojourn.data.sources.document import Document
from sojourn.data.sources.files import not_utf8
from sojourn.data.sources.formats import detect_format, to_document
from sojourn.data.sources.values import BadRecord, EmptyRecord, Record
from sojourn.errors import UserError

_EMPTY: tuple[Any, ...] = (None, "", [], {})
Kind = Literal["json", "table", "text", "documents"]


@dataclass(frozen=True)
class Sample:
    """The documents whose priority is at most `last`: `kept` of `total`."""

    seed: int
    last: int
    kept: int
    total: int

    def __call__(self, documents: list[Document]) -> list[Document]:
        inside = self.contains(np.array([d.fingerprint() for d in documents], np.uint64)).tolist()
        return [document for document, is_inside in zip(documents, inside, strict=True) if is_inside]

    def contains(self, fingerprints: np.ndarray) -> np.ndarray:
        found = priorities(fingerprints, self.seed)
        return found <= np.uint64(self.last) if self.last >= 0 else np.zeros(len(found), bool)


def priorities(fingerprints: np.ndarray, seed: int) -> np.ndarray:
    return splitmix64(fingerprints, seed)


def copies_by_weight(fingerprints: np.ndarray, weight: float) -> np.ndarray:
    """How often each document is taken. A weight of 2.3 takes every document twice and 30 % of them once more."""
    whole, fraction = divmod(weight, 1.0)
    return int(whole) + (fingerprints < fraction * 2.0**64).astype(np.int64)


@dataclass(frozen=True)
class Chunk:
    """Consecutive records of one file.

    `records` are, by `kind`: json: the bytes of one value; text: the bytes of one document; table: a dict, or a list
    where a row does not fit the header; documents: ready-made Documents. `lines` are their line numbers from 1 (in a
    parquet file, row numbers). `format` is the format of the file's first valid record, which is at `first`.
    """

    file: str
    kind: Kind
    lines: Sequence[int]
    records: list[Any]
    columns: dict[str, Any] = field(default_factory=dict)
    format: str | None = None
    first: str = ""
    sample: Sample | None = None


@dataclass
class ParsedChunk:
    """`bad` are (location, reason); `unused` counts records by column, `left_out` records by the mark that says so."""

    documents: list[Document]
    records: int
    bad: list[tuple[str, str]] = field(default_factory=list)
    unused: Counter[str] = field(default_factory=Counter)
    left_out: Counter[str] = field(default_factory=Counter)
    placeholders: int = 0  # chats with the text of a picture, sound or video that is not there


def parse_chunk(chunk: Chunk) -> ParsedChunk:
    """Everything that is read of a chunk; of its documents, those in the sample."""
    parsed = ParsedChunk(chunk.records, len(chunk.records)) if chunk.kind == "documents" else _parse_records(chunk)
    if chunk.sample:
        parsed.documents = chunk.sample(parsed.documents)
    return parsed


def _parse_records(chunk: Chunk) -> ParsedChunk:
    parsed = ParsedChunk([], len(chunk.records))
    converter = _Converter(chunk, parsed)
    for line, raw in zip(chunk.lines, chunk.records, strict=True):
        where = f"{chunk.file}:{line}"
        try:
            document = (
                to_document({"text": _decode(raw)}, "text", where)
                if chunk.kind == "text"
                else converter(parse_record(raw), where)
            )
            if document is not None:
                parsed.documents.append(document)
        except EmptyRecord:
            continue
        except BadRecord as error:
            parsed.bad.append((where, str(error)))
    converter.count_unused()
    return parsed


class _Converter:
    """Records of one file to documents. Which columns are read is noted once for each combination of columns."""

    def __init__(self, chunk: Chunk, parsed: ParsedChunk) -> None:
        self._columns, self._parsed = chunk.columns, parsed
        self._format, self._first = chunk.format, chunk.first
        self._formats: dict[tuple[str, ...], str] = {}
        self._unread: dict[tuple[str, ...], tuple[str, ...]] = {}
        self._counts: Counter[tuple[str, ...]] = Counter()

    def __call__(self, original: Record, where: str) -> Document | None:
        """None for a record whose marks leave it out."""
        record = rename_columns(original, self._columns)
        keys = tuple(record)
        name = self._formats.get(keys) or self._formats.setdefault(keys, detect_format(record))
        if self._format is None:
            self._format, self._first = name, where
        elif name != self._format:
            message = f"{where}: format {name}, but {self._first} is {self._format}; a file must have one format"
            raise UserError(message)
        check_media(record)
        marks = row_marks(record, name)
        filled = tuple(key for key, value in original.items() if value not in _EMPTY)
        if filled in self._unread:
            document = to_document(record, name, where)
        else:
            watched = ReadRecord(record)
            document = to_document(watched, name, where)
            read = {*watched.read, *marks}
            used = {self._columns.get(ours, ours) for ours in read} if self._named() else read
            self._unread[filled] = tuple(key for key in filled if key not in used)
        self._counts[filled] += 1
        self._parsed.unused.update(unread_turn_keys(record))
        self._parsed.placeholders += document.is_chat and has_placeholder(document)
        left_out = next((f"{mark}_false" for mark, flag in marks.items() if not flag), None)
        if left_out:
            self._parsed.left_out[left_out] += 1
        return None if left_out else document

    def _named(self) -> bool:
        return any(ours != "tags" for ours in self._columns)

    def count_unused(self) -> None:
        for filled, count in self._counts.items():
            self._parsed.unused.update(dict.fromkeys(self._unread[filled], count))


def parse_record(raw: Any) -> dict[str, Any]:
    """JSON bytes parsed; a table's row as it is."""
    if isinstance(raw, bytes):
        try:
            raw = json.loads(_decode(raw))
        except (ValueError, RecursionError) as error:
            raise BadRecord(f"not valid JSON: {error}") from None
    elif isinstance(raw, list):
        raise BadRecord(f"{len(raw)} columns, which is not the number of columns in the header")
    if not isinstance(raw, dict):
        detect_format(raw)
    return raw  # type: ignore[no-any-return]


def _decode(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise BadRecord(not_utf8(error)) from None
