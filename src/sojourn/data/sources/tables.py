"""Reads the rows of CSV, TSV and parquet files as records by column name."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from sojourn.data.sources.files import BOMB, most_unpacked, not_utf8
from sojourn.data.sources.texts import LocatedRecord, normalize_newlines, whole_lines
from sojourn.errors import UserError

_MAX_FIELD_CHARACTERS = 1 << 24


def table_rows(file: str, blocks: Iterable[bytes], tabs: bool) -> Iterator[LocatedRecord]:
    """The rows below the header as dicts; a row with another number of columns as a list."""
    csv.field_size_limit(_MAX_FIELD_CHARACTERS)
    header, lines = _header(_text_lines(file, normalize_newlines(blocks)))
    ended = False

    def tracked_lines() -> Iterator[str]:
        nonlocal ended
        yield from lines
        ended = True

    reader = csv.reader(tracked_lines(), delimiter="\t" if tabs else _delimiter(header))
    names: list[str] = []
    start = 1
    try:
        for row in reader:
            if ended:  # the reader asked for more lines in the middle of a row
                raise UserError(f"{file}:{start}: a quote in this row is never closed; close or remove it")
            if len(row) > 1 or (row and row[0].strip()):
                if names:
                    record = dict(zip(names, row, strict=True)) if len(row) == len(names) else row
                    yield start, sum(map(len, row)) + len(row), record
                else:
                    names = _column_names(f"{file}:{start}", row)
            start = reader.line_num + 1
    except csv.Error as error:
        raise UserError(f"{file}:{start}: not a valid row: {error}; correct or remove it") from None


def parquet_rows(path: Path, size: int) -> Iterator[tuple[Sequence[int], list[Any]]]:
    """Row numbers and rows, about `size` bytes at a time."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise UserError(f"{path}: reading .parquet needs pyarrow: pip install 'sojourn[train]'") from None
    row, most, total = 1, most_unpacked(path), 0
    try:
        with parquet.ParquetFile(path, buffer_size=1 << 18, pre_buffer=False) as table:
            _check_unique(str(path), table.schema_arrow.names)
            if _declared_bytes(table.metadata) > most:
                raise UserError(f"{path}: {BOMB}")
            for batch in table.iter_batches(_rows_per_batch(table.metadata, size), use_threads=False):
                total += batch.nbytes
                if total > most:
                    raise UserError(f"{path}: {BOMB}")
                pieces = max(1, batch.nbytes // max(size, 1))
                step = max(1, batch.num_rows // pieces)
                for at in range(0, batch.num_rows, step):
                    records = batch.slice(at, step).to_pylist()
                    yield range(row, row + len(records)), records
                    row += len(records)
    except (pyarrow.ArrowException, OSError, ValueError, KeyError, ArithmeticError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # the file cannot be opened
            raise
        reason = " ".join(str(error).split())
        raise UserError(f"{path}:{row}: damaged parquet file from this row on: {reason}; write it again") from None


def _text_lines(file: str, blocks: Iterable[bytes]) -> Iterator[str]:
    lines = whole_lines(file, blocks)
    for first, block in lines:
        try:
            text = block.decode()
        except UnicodeDecodeError as error:
            line = first + block.count(b"\n", 0, error.start)
            raise UserError(f"{file}:{line}: {not_utf8(error, (more for _, more in lines))}") from None
        if "\0" in text:
            line = first + text.count("\n", 0, text.index("\0"))
            raise UserError(f"{file}:{line}: a NUL character: not a text file; save it as UTF-8 text")
        yield from io.StringIO(text, newline="\n")


def _header(lines: Iterator[str]) -> tuple[str, Iterator[str]]:
    """The first line that is not blank, and an iterator over all lines."""
    before = []
    for line in lines:
        before.append(line)
        if line.strip():
            break
    return "".join(before), chain(before, lines)


def _delimiter(header: str) -> str:
    return next((sign for sign in ",;\t" if sign in header), ",")


def _column_names(where: str, row: list[str]) -> list[str]:
    names = [name.strip() for name in row]
    if "" in names[1:]:  # the first may be pandas' index
        raise UserError(f"{where}: column {names.index('') + 1} has no name; give every column of the first row a name")
    _check_unique(where, names)
    return names


def _check_unique(where: str, names: list[str]) -> None:
    duplicate = next((name for at, name in enumerate(names) if name in names[:at]), None)
    if duplicate is not None:
        raise UserError(f"{where}: two columns are named “{duplicate}”; give each its own name")


def _declared_bytes(metadata: Any) -> int:
    return sum(int(metadata.row_group(at).total_byte_size) for at in range(metadata.num_row_groups))


def _rows_per_batch(metadata: Any, size: int) -> int:
    groups = [metadata.row_group(at) for at in range(metadata.num_row_groups)]
    row_bytes = max((group.total_byte_size // max(group.num_rows, 1) for group in groups), default=0)
    return min(1000, max(1, size // max(row_bytes, 1)))
