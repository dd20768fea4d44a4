"""An excerpt of a source: as many of its records, from all over it, as show what they are like and how many there are.

Lines and plain text are read in windows spread over the file, parquet in some of its row groups, everything else (lists
in JSON, tables, compressed files) from the beginning. What is not read is extrapolated by its bytes.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from sojourn.data.sources.chunks import Chunk
from sojourn.data.sources.document import Document
from sojourn.data.sources.files import suffix_of
from sojourn.data.sources.json_values import json_layout
from sojourn.data.sources.source import OpenedSource, SourcePart
from sojourn.data.sources.texts import split_documents
from sojourn.errors import UserError

_MAX_PARTS = 8
_WINDOWS = 16
_MAX_LINE = 4 << 20  # of a window: a line that is longer is left out
_COUNTED_BYTES = 64 << 20  # of lines: more are not counted, but extrapolated
_BUILTIN_BYTES = 300_000
_PACKED_BYTES = 1 << 19  # of a compressed file, from which its ratio is measured
_MAX_UNPACKED = 1 << 26
_SHORTEST_RECORD = 4  # bytes of a line: fewer hold no example
_ROW_GROUPS, _ROWS = 4, 500


@dataclass(frozen=True)
class Excerpt:
    """`records`: of the whole source; `share`: of its bytes that `chunks` hold. Both are exact where `share` is 1.

    sizes  bytes of each of the records: of those in `chunks`, or of all where they were counted
    """

    chunks: list[Chunk]
    records: float
    share: float
    sizes: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))

    def thinned(self, size: int) -> list[Chunk]:
        """Every n-th record, of about `size` bytes in all."""
        total = sum(chunk_size(chunk) for chunk in self.chunks)
        step = max(1, -(-total // max(1, size)))
        taken, skipped = list[Chunk](), 0
        for chunk in self.chunks:
            first = (-skipped) % step
            skipped += len(chunk.records)
            if first < len(chunk.records):
                taken.append(replace(chunk, records=chunk.records[first::step], lines=chunk.lines[first::step]))
        return taken


def chunk_size(chunk: Chunk) -> int:
    return sum(map(record_size, chunk.records))


def record_size(record: Any) -> int:
    if isinstance(record, bytes):
        return len(record) + 1
    if isinstance(record, Document):
        return record.size
    values = record.values() if isinstance(record, dict) else record
    return sum(len(value) if isinstance(value, str) else len(str(value)) for value in values) + len(record)


def read_excerpt(opened: OpenedSource, size: int) -> Excerpt:
    """About `size` bytes of a source that is on this machine."""
    if opened.is_builtin:
        return _builtin_excerpt(opened)
    step = -(-len(opened.parts) // _MAX_PARTS)
    parts = opened.parts[::step]
    whole = sum(Path(part.name).stat().st_size for part in opened.parts)
    chunks, sizes, records, covered, read_of = list[Chunk](), list[np.ndarray](), 0.0, 0.0, 0
    for part in parts:
        packed = Path(part.name).stat().st_size
        found = _file_excerpt(part, size // len(parts))
        fed = SourcePart(part.name, lambda found=found: iter(found.chunks))  # type: ignore[misc]
        chunks += opened.part_chunks(fed)
        sizes.append(found.sizes if len(found.sizes) else _sizes(found.chunks))
        records, covered, read_of = records + found.records, covered + found.share * packed, read_of + packed
    if not whole or not chunks:
        return Excerpt(chunks, 0.0, 1.0)
    share = 1.0 if covered == whole else covered / whole
    return Excerpt(chunks, records * whole / max(1, read_of), share, np.concatenate(sizes))


def _sizes(chunks: list[Chunk]) -> np.ndarray:
    return np.array([record_size(record) for chunk in chunks for record in chunk.records], np.int64)


def _builtin_excerpt(opened: OpenedSource) -> Excerpt:
    chunks, ended = _beginning(opened.chunks(), _BUILTIN_BYTES)
    records, size = sum(len(chunk.records) for chunk in chunks), sum(map(chunk_size, chunks))
    if ended:
        return Excerpt(chunks, records, 1.0, _sizes(chunks))
    if opened.source.path.startswith("builtin:text"):
        return Excerpt(chunks, records * opened.size / size, size / opened.size, _sizes(chunks))
    count = opened.builtin_questions
    return Excerpt(chunks, count, records / count, _sizes(chunks))


def _file_excerpt(part: SourcePart, size: int) -> Excerpt:
    path = Path(part.name)
    suffix, packed = suffix_of(path), path.stat().st_size
    if packed > size and suffix is not None and not suffix.compression and not part.needs_conversion():
        if suffix.inner == ".parquet":
            return _parquet_excerpt(path)
        if suffix.inner in (".txt", ".md"):
            return _text_windows(path, packed, size)
        if suffix.inner not in (".csv", ".tsv") and _has_lines(path, suffix.inner != ".json"):
            found = _line_windows(path, packed, size)
            if found is not None:
                return found
    chunks, ended = _beginning(part.read(), size)
    records, read = sum(len(chunk.records) for chunk in chunks), sum(map(chunk_size, chunks))
    if ended or not read:
        return Excerpt(chunks, records, 1.0)
    share = min(1.0, read / _unpacked_size(path))
    return Excerpt(chunks, records / share, share)


def _beginning(chunks: Iterator[Chunk], size: int) -> tuple[list[Chunk], bool]:
    """The first chunks, of `size` bytes or a little more; whether that is all."""
    read, total = list[Chunk](), 0
    for chunk in chunks:
        read.append(chunk)
        total += chunk_size(chunk)
        if total > size:
            return read, False
    return read, True


def _has_lines(path: Path, lines: bool) -> bool:
    with path.open("rb") as file:
        head = file.read(1 << 16).removeprefix(b"\xef\xbb\xbf")
    return json_layout(iter([head]), lines)[0] == "lines"


def _line_windows(path: Path, packed: int, size: int) -> Excerpt | None:
    """The lines that begin in any of some windows: each line is as likely as any other, long or short. None where no
    line is short enough."""
    width, records = size // _WINDOWS, list[bytes]()
    with path.open("rb") as file:
        for number in range(_WINDOWS):
            start = number * (packed - width) // (_WINDOWS - 1)
            file.seek(max(0, start - 1))
            if start and not _ends(file.readline(_MAX_LINE)):
                continue
            left = start + width - file.tell()
            if left <= 0:
                continue
            block = file.read(left)
            block += b"" if _ends(block) else file.readline(_MAX_LINE)
            whole = block if _ends(block) or file.tell() == packed else block[: block.rfind(b"\n") + 1]
            records += [line for line in whole.split(b"\n") if line.strip()]
        sizes = _line_sizes(path) if packed <= _COUNTED_BYTES else np.zeros(0, np.int64)
    if not records:
        return None
    share = min(1.0, sum(len(line) + 1 for line in records) / packed)
    chunk = Chunk(str(path), "json", range(1, len(records) + 1), records)
    return Excerpt([chunk], len(sizes) or len(records) / share, share, sizes)


def _ends(block: bytes) -> bool:
    return block.endswith(b"\n")


def _line_sizes(path: Path) -> np.ndarray:
    """Of every line that is not empty, its end counted."""
    ends, at = [np.array([-1])], 0
    with path.open("rb") as file:
        for block in iter(lambda: file.read(1 << 22), b""):
            ends.append(np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n")) + at)
            at += len(block)
    sizes = np.diff(np.concatenate([*ends, [at]]))
    return sizes[sizes > _SHORTEST_RECORD]


def _text_windows(path: Path, packed: int, size: int) -> Excerpt:
    """Documents of some windows; the first and the last of a window may be only a part of one."""
    width, documents = size // (_WINDOWS // 4), list[bytes]()
    with path.open("rb") as file:
        for number in range(_WINDOWS // 4):
            file.seek(number * (packed - width) // (_WINDOWS // 4 - 1))
            block = file.read(width)
            first = 0 if number == 0 else block.find(b"\n") + 1
            found = [text for _, _, text in split_documents([block[first : block.rfind(b"\n") + 1 or None]])]
            documents += found[:-1] or found
    read = sum(len(text) + 1 for text in documents)
    if not read:
        return Excerpt([], 0.0, 1.0)
    chunk = Chunk(str(path), "text", range(1, len(documents) + 1), list(documents))
    return Excerpt([chunk], len(documents) * packed / read, min(1.0, read / packed))


def _parquet_excerpt(path: Path) -> Excerpt:
    """Some rows of some row groups; how many there are is in the file's metadata."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise UserError(f"{path}: reading .parquet needs pyarrow: pip install 'sojourn[train]'") from None
    records = list[Any]()
    try:
        with parquet.ParquetFile(path) as table:
            rows, groups = table.metadata.num_rows, table.metadata.num_row_groups
            for group in range(0, groups, -(-groups // _ROW_GROUPS) or 1):
                batch = next(table.iter_batches(_ROWS, row_groups=[group], use_threads=False), None)
                records += batch.to_pylist() if batch is not None else []
    except (pyarrow.ArrowException, OSError, ValueError, KeyError, ArithmeticError) as error:
        raise UserError(f"{path}: not a parquet file that can be read ({' '.join(str(error).split())[:120]})") from None
    if not records:
        return Excerpt([], 0.0, 1.0)
    return Excerpt([Chunk(str(path), "table", range(1, len(records) + 1), records)], rows, len(records) / rows)


def _unpacked_size(path: Path) -> float:
    """Bytes of a file's text; of a compressed one by the ratio of its beginning."""
    suffix, packed = suffix_of(path), path.stat().st_size
    if suffix is None or not suffix.compression:
        return packed
    with path.open("rb") as file:
        raw = file.read(_PACKED_BYTES)
        file.seek(max(0, packed - 4))
        end = file.read(4)
    size = _gzip_size(raw) if suffix.compression == ".gz" else _zstd_size(raw)
    estimate = packed * size / max(1, len(raw))
    written = int.from_bytes(end, "little")  # of gzip: the size, where the file is one stream of less than 4 GiB
    return written if suffix.compression == ".gz" and 0.5 < written / max(1.0, estimate) < 2 else estimate


def _gzip_size(raw: bytes) -> int:
    size = 0
    with suppress(zlib.error):
        while raw:
            stream = zlib.decompressobj(wbits=31)
            size += len(stream.decompress(raw, _MAX_UNPACKED))
            raw = stream.unused_data
    return size


def _zstd_size(raw: bytes) -> int:
    import pyarrow

    size = 0
    stream = pyarrow.CompressedInputStream(pyarrow.BufferReader(raw), "zstd")
    with suppress(pyarrow.ArrowException, OSError):  # the last block of `raw` is incomplete
        while size < _MAX_UNPACKED and (block := stream.read(1 << 16)):
            size += len(block)
    return size
