"""Reads a file of any known kind as parcels of records: never more than a few of them in memory, however big it is."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import zlib
from codecs import getincrementaldecoder
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal

from sojourn.data.read.files import KNOWN, read_bytes, suffix_of
from sojourn.errors import UserError

Kind = Literal["json", "table", "text", "documents"]
Numbered = tuple[int, int, Any]  # a record's line, about how many bytes it holds, and itself

_LONGEST = 1 << 28  # bytes of one line or one JSON value
_LONGEST_FIELD = 1 << 24
_END_OF_TEXT = b"<|endoftext|>"
_ENOUGH_TEXT = 4000
_LONGEST_TEXT = 1 << 20
_SPACE = re.compile(rb"\s*")
_BLANK_LINE = re.compile(rb"\n[ \t\v\f]*(?=\n)")
_HEADING = re.compile(rb"\n(?= ?= [^=\n][^\n]*[^=\n] = ?\n)")
_JSON_SPACE = re.compile(r"[ \t\n\r]*")
_JSON_COMMA = re.compile(r"[ \t\n\r]*,[ \t\n\r]*")
_MARGIN = 16  # longer than any JSON word, escape or half of a number that the end of a buffer may cut


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
        return _read_parquet(path, size)
    blocks = read_bytes(path, size)
    if inner in (".json", ".jsonl", ".ndjson"):
        return _read_json(file, blocks, size, lines=inner != ".json")
    if inner in (".csv", ".tsv"):
        return _gather(file, "table", _table_rows(file, blocks, tabs=inner == ".tsv"), size)
    if inner in (".txt", ".md"):
        return _gather(file, "text", _documents(blocks), size)
    raise UserError(f"{path}: files of this kind cannot be read; the kinds are {KNOWN}")


def _gather(file: str, kind: Kind, numbered: Iterable[Numbered], size: int) -> Iterator[Parcel]:
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


def _whole_lines(file: str, blocks: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    """Blocks cut anew so that each holds whole lines, with the number of the first."""
    line, parts, held = 1, [b""], 0
    for block in blocks:
        cut = block.rfind(b"\n") + 1
        if cut:
            parts.append(block[:cut])
            whole = b"".join(parts)
            yield line, whole
            line, parts, held = line + whole.count(b"\n"), [block[cut:]], len(block) - cut
        else:
            parts.append(block)
            held += len(block)
        if held > _LONGEST:
            raise UserError(f"{file}:{line}: a line of more than {_LONGEST >> 20} MiB; break it into lines")
    if held:
        yield line, b"".join(parts)


def _universal(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """Lines end in \\n alone, wherever the file was written."""
    held = b""
    for block in blocks:
        if held or b"\r" in block:
            joined = held + block
            held = b"\r" if joined.endswith(b"\r") else b""
            joined = joined.removesuffix(b"\r").replace(b"\r\n", b"\n").replace(b"\r", b"\n")
            if joined:
                yield joined
        else:
            yield block
    if held:
        yield b"\n"


def _read_json(file: str, blocks: Iterator[bytes], size: int, lines: bool) -> Iterator[Parcel]:
    """What the file holds decides how it is read, since names are not to be trusted."""
    head = _head(blocks, bytes.lstrip)
    is_list = head.lstrip().startswith(b"[")
    if not is_list and not lines:
        head = _head(chain([head], blocks), lambda head: b"\n" in head.lstrip())
        lines = _is_json(head.lstrip().partition(b"\n")[0])
    blocks = chain([head], blocks)
    if lines and not is_list:
        return _read_json_lines(file, blocks)
    return _gather(file, "json", _json_values(_Window(file, blocks), is_list), size)


def _head(blocks: Iterator[bytes], enough: Callable[[bytes], object]) -> bytes:
    """The beginning of a file; each time it is not enough to judge by, twice as much is read."""
    head, count = b"", 1
    while block := b"".join(islice(blocks, count)):
        head += block
        if enough(head) or len(head) > _LONGEST:
            break
        count *= 2
    return head


def _is_json(text: bytes) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _read_json_lines(file: str, blocks: Iterable[bytes]) -> Iterator[Parcel]:
    for first, block in _whole_lines(file, blocks):
        records = block.removesuffix(b"\n").split(b"\n")
        if b"\r" in block:
            records = [record.rstrip(b"\r") for record in records]
        lines: Sequence[int] = range(first, first + len(records))
        if not all(map(bytes.strip, records)):
            lines = [line for line, record in zip(lines, records, strict=True) if record.strip()]
            records = [record for record in records if record.strip()]
        if records:
            yield Parcel(file, "json", lines, records)


class _Window:
    """The stretch of a JSON file that is being read, moving on through it."""

    def __init__(self, file: str, blocks: Iterator[bytes]) -> None:
        self.file = file
        self.text = ""
        self.at = 0
        self.line = 1  # of `at`
        self.ended = False
        self._blocks = blocks
        self._decoder = getincrementaldecoder("utf-8")()
        self._scan = json.JSONDecoder().raw_decode

    def refill(self, count: int = 1) -> None:
        block = b"".join(islice(self._blocks, count))
        self.ended = not block
        try:
            more = self._decoder.decode(block, final=self.ended)
        except UnicodeDecodeError as error:
            line = self.line + self.text.count("\n", self.at) + error.object[: error.start].count(b"\n")
            raise UserError(f"{self.file}:{line}: not UTF-8 text ({error.reason}); save it as UTF-8") from None
        self.text = self.text[self.at :] + more
        self.at = 0

    def move(self, to: int) -> None:
        self.line += self.text.count("\n", self.at, to)
        self.at = to

    def sign(self) -> str:
        """The next character that is not a space; none at the end of the file."""
        while True:
            self.move(_JSON_SPACE.match(self.text, self.at).end())  # type: ignore[union-attr]
            if self.at < len(self.text) or self.ended:
                return self.text[self.at : self.at + 1]
            self.refill()

    def value_end(self) -> int:
        """Where the value that starts here ends. Each time it is not whole yet, twice as much is read."""
        count = 1
        while True:
            try:
                end = self._scan(self.text, self.at)[1]
            except json.JSONDecodeError as error:
                cut = error.msg.startswith("Unterminated") or error.pos > len(self.text) - _MARGIN
                if self.ended or not cut:
                    raise self.fault(error.msg, error.pos) from None
            except ValueError as error:
                raise self.fault(str(error), self.at) from None
            except RecursionError:
                raise self.fault("nested too deep", self.at) from None
            else:
                if self.ended or end <= len(self.text) - _MARGIN:
                    return end
            if len(self.text) - self.at > _LONGEST:
                raise self.fault(f"a value of more than {_LONGEST >> 20} MiB; write one record a line", self.at)
            self.refill(count)
            count *= 2

    def run(self) -> Iterator[Numbered]:
        """The elements of a list that lie whole, with their commas, in what has been read: most of them, and fast."""
        text, at, line, scan = self.text, self.at, self.line, self._scan
        safe = len(text) - _MARGIN
        while at < safe:
            try:
                end = scan(text, at)[1]
            except (ValueError, RecursionError):
                break
            comma = _JSON_COMMA.match(text, end)
            if end > safe or comma is None:
                break
            yield line, end - at, text[at:end].encode()
            following = comma.end()
            line += text.count("\n", at, following)
            at = following
        self.at, self.line = at, line

    def fault(self, told: str, at: int) -> UserError:
        rest = self.text[at:]
        if self.ended and (told.startswith("Unterminated") or not rest.strip()):
            line = self.line + self.text.rstrip().count("\n", self.at)
            told = "the file ends in the middle; copy or download it again"
        else:
            line = self.line + self.text.count("\n", self.at, at)
        return UserError(f"{self.file}:{line}: not valid JSON: {told}")


def _json_values(window: _Window, is_list: bool) -> Iterator[Numbered]:
    """The elements of a list, or values one after another."""
    if is_list:
        window.sign()
        window.move(window.at + 1)
        if window.sign() == "]":
            _expect_end(window)
            return
    while window.sign() or is_list:
        if is_list:
            yield from window.run()
            window.sign()
        end = window.value_end()
        yield window.line, end - window.at, window.text[window.at : end].encode()
        window.move(end)
        if not is_list:
            continue
        sign = window.sign()
        if sign == ",":
            window.move(window.at + 1)
        elif sign == "]":
            _expect_end(window)
            return
        else:
            raise window.fault("expected “,” or “]” after a value of the list", window.at)


def _expect_end(window: _Window) -> None:
    window.move(window.at + 1)
    if window.sign():
        raise window.fault("the list has ended, yet more follows; one list a file, or one record a line", window.at)


def _table_rows(file: str, blocks: Iterable[bytes], tabs: bool) -> Iterator[Numbered]:
    csv.field_size_limit(_LONGEST_FIELD)
    header, lines = _header(_text_lines(file, _universal(blocks)))
    ended = False

    def watched() -> Iterator[str]:
        nonlocal ended
        yield from lines
        ended = True

    reader = csv.reader(watched(), delimiter="\t" if tabs else _delimiter(header))
    names: list[str] = []
    start = 1
    try:
        for row in reader:
            if ended:  # the reader looked for more lines in the middle of a row
                raise UserError(f"{file}:{start}: a quote is opened in this row and never closed; close or remove it")
            if len(row) > 1 or (row and row[0].strip()):
                if names:
                    record = dict(zip(names, row, strict=True)) if len(row) == len(names) else row
                    yield start, sum(map(len, row)) + len(row), record
                else:
                    names = _column_names(f"{file}:{start}", row)
            start = reader.line_num + 1
    except csv.Error as error:
        raise UserError(f"{file}:{start}: not a row of a table: {error}; mend or remove it") from None


def _text_lines(file: str, blocks: Iterable[bytes]) -> Iterator[str]:
    for first, block in _whole_lines(file, blocks):
        try:
            text = block.decode()
        except UnicodeDecodeError as error:
            line = first + block.count(b"\n", 0, error.start)
            raise UserError(f"{file}:{line}: not UTF-8 text ({error.reason}); save it as UTF-8") from None
        if "\0" in text:
            line = first + text.count("\n", 0, text.index("\0"))
            raise UserError(f"{file}:{line}: a NUL character, so this is not a text file; save it as UTF-8 text")
        yield from io.StringIO(text, newline="\n")


def _header(lines: Iterator[str]) -> tuple[str, Iterator[str]]:
    """The first line that is not blank, and all lines."""
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
    _refuse_twins(where, names)
    return names


def _refuse_twins(where: str, names: list[str]) -> None:
    twice = next((name for at, name in enumerate(names) if name in names[:at]), None)
    if twice is not None:
        raise UserError(f"{where}: two columns are called “{twice}”; give each a name of its own")


def _read_parquet(path: Path, size: int) -> Iterator[Parcel]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise UserError(f"{path}: reading .parquet needs pyarrow: pip install 'sojourn[train]'") from None
    row = 1
    try:
        with parquet.ParquetFile(path, buffer_size=1 << 18, pre_buffer=False) as table:
            _refuse_twins(str(path), table.schema_arrow.names)
            for batch in table.iter_batches(_rows_at_once(table.metadata, size), use_threads=False):
                pieces = max(1, batch.nbytes // max(size, 1))
                step = max(1, batch.num_rows // pieces)
                for at in range(0, batch.num_rows, step):
                    records = batch.slice(at, step).to_pylist()
                    yield Parcel(str(path), "table", range(row, row + len(records)), records)
                    row += len(records)
    except (pyarrow.ArrowException, OSError, ValueError, KeyError, ArithmeticError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # not to be opened at all
            raise
        told = " ".join(str(error).split())
        raise UserError(f"{path}:{row}: not a sound parquet file from this row on: {told}; write it anew") from None


def _rows_at_once(metadata: Any, size: int) -> int:
    groups = [metadata.row_group(at) for at in range(metadata.num_row_groups)]
    widest = max((group.total_byte_size // max(group.num_rows, 1) for group in groups), default=0)
    return min(1000, max(1, size // max(widest, 1)))


def _documents(blocks: Iterable[bytes]) -> Iterator[Numbered]:
    """Texts that end at <|endoftext|>, before a heading, at a blank line once long enough, or where they get too long.

    A document's end is judged with all the text before it that may belong to it, so blocks leave no trace.
    """
    source = _universal(blocks)
    text, at, line, ended = b"", 0, 1, False
    while True:
        start = _SPACE.match(text, at).end()  # type: ignore[union-attr]
        line += text.count(b"\n", at, start)
        at = start
        if not ended and len(text) - at < _LONGEST_TEXT + len(_END_OF_TEXT):
            more = _at_least(source, _LONGEST_TEXT)
            ended = not more
            text, at = text[at:] + (more or b"\n"), 0
        elif at == len(text):
            return
        else:
            end, after = _document_end(text, at)
            document = text[at:end].rstrip()
            if document:
                yield line, len(document), document
            line += text.count(b"\n", at, after)
            at = after


def _at_least(blocks: Iterator[bytes], size: int) -> bytes:
    parts, held = [], 0
    for block in blocks:
        parts.append(block)
        held += len(block)
        if held >= size:
            break
    return b"".join(parts)


def _document_end(text: bytes, at: int) -> tuple[int, int]:
    """Where the document that starts at `at` ends and where the next may start. Looks no further than it must."""
    span = 2 * _ENOUGH_TEXT
    while True:
        span = min(span, _LONGEST_TEXT)
        end = after = min(at + span, len(text))
        found = text.find(_END_OF_TEXT, at, end + len(_END_OF_TEXT) - 1)
        if found >= 0:
            end, after = found, found + len(_END_OF_TEXT)
        for pattern, first in ((_BLANK_LINE, at + _ENOUGH_TEXT), (_HEADING, at)):
            match = pattern.search(text, first, end)
            if match:
                end = after = found = match.end()
        if found >= 0 or end == len(text):
            return end, after
        if span == _LONGEST_TEXT:
            end = text.rfind(b"\n", at, end) + 1 or _character_start(text, end)
            return end, end
        span *= 2


def _character_start(text: bytes, at: int) -> int:
    """The nearest place at or before `at` that is not within a character, if this is UTF-8."""
    for back in range(4):
        if text[at - back] & 0xC0 != 0x80:
            return at - back
    return at
