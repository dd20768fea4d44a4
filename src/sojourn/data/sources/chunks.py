"""A chunk: about a megabyte of raw records of one file, and how they become documents.

Readers only split files into chunks. Decoding, parsing, format detection and conversion happen in `parse_chunk`, which
runs in a worker process. The result does not depend on where a file is split into chunks.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from sojourn.data.sources.document import Document
from sojourn.data.sources.formats import BadRecord, EmptyRecord, detect_format, rename_columns, to_document
from sojourn.errors import UserError

Kind = Literal["json", "table", "text", "documents"]


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
    columns: dict[str, str] = field(default_factory=dict)
    format: str | None = None
    first: str = ""


def parse_chunk(chunk: Chunk) -> tuple[list[Document], int, list[tuple[str, str]]]:
    """The documents, the number of records, and (location, reason) of each bad record."""
    if chunk.kind == "documents":
        return chunk.records, len(chunk.records), []
    documents: list[Document] = []
    bad: list[tuple[str, str]] = []
    format, first = chunk.format, chunk.first
    formats: dict[tuple[Any, ...], str] = {}
    for line, raw in zip(chunk.lines, chunk.records, strict=True):
        where = f"{chunk.file}:{line}"
        try:
            if chunk.kind == "text":
                documents.append(to_document({"text": _decode(raw)}, "text", where))
                continue
            record = rename_columns(parse_record(raw), chunk.columns)
            keys = tuple(record)
            name = formats.get(keys) or formats.setdefault(keys, detect_format(record))
            if format is None:
                format, first = name, where
            elif name != format:
                raise UserError(f"{where}: format {name}, but {first} is {format}; a file must have one format")
            documents.append(to_document(record, name, where))
        except EmptyRecord:
            continue
        except BadRecord as error:
            bad.append((where, str(error)))
    return documents, len(chunk.records), bad


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
        raise BadRecord(f"not UTF-8 text ({error.reason}); save it as UTF-8") from None
