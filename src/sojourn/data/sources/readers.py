"""Reads a file of any supported type as chunks of records; only a few chunks are in memory at a time."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from sojourn.data.sources.chunks import Chunk, Kind
from sojourn.data.sources.files import KNOWN, read_bytes, suffix_of
from sojourn.data.sources.json_values import json_layout, json_lines, json_values
from sojourn.data.sources.tables import parquet_rows, table_rows
from sojourn.data.sources.texts import LocatedRecord, split_documents
from sojourn.errors import UserError


def read_file(path: Path, size: int = 1 << 20, encoding: str = "utf-8") -> Iterator[Chunk]:
    """All records of a file in chunks of about `size` bytes; a file that is not UTF-8 is converted from `encoding`."""
    line = 0
    try:
        for chunk in _read(path, size, encoding):
            yield chunk
            line = chunk.lines[-1]
    except (EOFError, zlib.error, OSError) as error:
        if line or not isinstance(error, OSError) or error.errno is None:
            reason = "the file is damaged or truncated at about this line or later"
            raise UserError(f"{path}:{line + 1}: {reason} ({error}); copy or download it again") from None
        raise UserError(f"{path}: cannot be read: {os.strerror(error.errno)}") from None


def _read(path: Path, size: int, encoding: str) -> Iterator[Chunk]:
    file, suffix = str(path), suffix_of(path)
    inner = suffix.inner if suffix else ""
    if inner == ".parquet":
        return _as_chunks(file, "table", parquet_rows(path, size))
    blocks = read_bytes(path, size, encoding)
    if inner in (".json", ".jsonl", ".ndjson"):
        return _read_json(file, blocks, size, lines=inner != ".json")
    if inner in (".csv", ".tsv"):
        return group_records(file, "table", table_rows(file, blocks, tabs=inner == ".tsv"), size)
    if inner in (".txt", ".md"):
        return group_records(file, "text", split_documents(blocks), size)
    raise UserError(f"{path}: files of this type cannot be read; supported: {KNOWN}")


def _read_json(file: str, blocks: Iterator[bytes], size: int, lines: bool) -> Iterator[Chunk]:
    layout, blocks = json_layout(blocks, lines)
    if layout == "lines":
        return _as_chunks(file, "json", json_lines(file, blocks))
    return group_records(file, "json", json_values(file, blocks, is_list=layout == "list"), size)


def _as_chunks(file: str, kind: Kind, groups: Iterable[tuple[Sequence[int], list[Any]]]) -> Iterator[Chunk]:
    return (Chunk(file, kind, lines, records) for lines, records in groups)


def group_records(file: str, kind: Kind, located: Iterable[LocatedRecord], size: int) -> Iterator[Chunk]:
    """Chunks of about `size` bytes."""
    lines: list[int] = []
    records: list[Any] = []
    chunk_bytes = 0
    for line, record_bytes, record in located:
        lines.append(line)
        records.append(record)
        chunk_bytes += record_bytes
        if chunk_bytes >= size:
            yield Chunk(file, kind, lines, records)
            lines, records, chunk_bytes = [], [], 0
    if records:
        yield Chunk(file, kind, lines, records)
