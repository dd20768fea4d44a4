"""Reads a file of any known kind as parcels of records: never more than a few of them in memory, however big it is."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sojourn.data.sources.files import KNOWN, read_bytes, suffix_of
from sojourn.data.sources.json_values import json_lines, json_shape, json_values
from sojourn.data.sources.tables import parquet_rows, table_rows
from sojourn.data.sources.texts import Numbered, documents
from sojourn.errors import UserError

Kind = Literal["json", "table", "text", "documents"]


@dataclass(frozen=True)
class Parcel:
    """Some consecutive records of one file, small enough to hand to a worker."""

    file: str
    kind: Kind
    lines: Sequence[int]  # of each record, from 1; in a parquet file its row
    records: list[Any]  # json: the bytes of a value; text: the bytes of a document; table: a dict, or a misfit's list


def read_file(path: Path, size: int = 1 << 20) -> Iterator[Parcel]:
    """All records of a file in parcels of about `size` bytes."""
    line = 0
    try:
        for parcel in _read(path, size):
            yield parcel
            line = parcel.lines[-1]
    except (EOFError, zlib.error, OSError) as error:
        if line or not isinstance(error, OSError) or error.errno is None:
            where, told = f"{path}:{line + 1}", "damaged or cut off about here or further on"
            raise UserError(f"{where}: {told} ({error}); copy or download it again") from None
        raise UserError(f"{path}: cannot be read: {os.strerror(error.errno)}") from None


def _read(path: Path, size: int) -> Iterator[Parcel]:
    file, suffix = str(path), suffix_of(path)
    inner = suffix.inner if suffix else ""
    if inner == ".parquet":
        return _parcels(file, "table", parquet_rows(path, size))
    blocks = read_bytes(path, size)
    if inner in (".json", ".jsonl", ".ndjson"):
        return _read_json(file, blocks, size, lines=inner != ".json")
    if inner in (".csv", ".tsv"):
        return gather(file, "table", table_rows(file, blocks, tabs=inner == ".tsv"), size)
    if inner in (".txt", ".md"):
        return gather(file, "text", documents(blocks), size)
    raise UserError(f"{path}: files of this kind cannot be read; the kinds are {KNOWN}")


def _read_json(file: str, blocks: Iterator[bytes], size: int, lines: bool) -> Iterator[Parcel]:
    shape, blocks = json_shape(blocks, lines)
    if shape == "lines":
        return _parcels(file, "json", json_lines(file, blocks))
    return gather(file, "json", json_values(file, blocks, is_list=shape == "list"), size)


def _parcels(file: str, kind: Kind, gathered: Iterable[tuple[Sequence[int], list[Any]]]) -> Iterator[Parcel]:
    return (Parcel(file, kind, lines, records) for lines, records in gathered)


def gather(file: str, kind: Kind, numbered: Iterable[Numbered], size: int) -> Iterator[Parcel]:
    lines: list[int] = []
    records: list[Any] = []
    held = 0
    for line, weight, record in numbered:
        lines.append(line)
        records.append(record)
        held += weight
        if held >= size:
            yield Parcel(file, kind, lines, records)
            lines, records, held = [], [], 0
    if records:
        yield Parcel(file, kind, lines, records)
