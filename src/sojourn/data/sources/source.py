"""Opens an entry of `data.sources`: files, a hub data set or built-in data; yields chunks with their format."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sojourn.catalog.datasets import datasets
from sojourn.config.data import COMPRESSION_RATIO, Columns, Source
from sojourn.config.messages import did_you_mean
from sojourn.data import builtin
from sojourn.data.sources.chunks import Chunk, Sample, parse_record
from sojourn.data.sources.columns import rename_columns
from sojourn.data.sources.document import Document, Message
from sojourn.data.sources.files import find_files, is_compressed, needs_conversion, suffix_of, user_path
from sojourn.data.sources.formats import detect_format
from sojourn.data.sources.readers import group_records, read_file
from sojourn.data.sources.texts import split_documents
from sojourn.data.sources.values import BadRecord
from sojourn.errors import UserError
from sojourn.storage.file_digests import FileDigests

if TYPE_CHECKING:
    from sojourn.data.sources.hub import HubTable

_BUILTINS = ("builtin:text", "builtin:instructions")
_DEFAULT_TEXT_BYTES = 10_000_000
_DEFAULT_QUESTIONS = 20_000
_QUESTION_BYTES = 100
_ROW_BYTES = 1000


@dataclass(frozen=True)
class SourcePart:
    """One file, hub data set or built-in data set: its name in messages, and how to read it."""

    name: str
    read: Callable[[], Iterator[Chunk]]
    needs_conversion: Callable[[], bool] = lambda: False


@dataclass(frozen=True)
class OpenedSource:
    """An entry of `data.sources`: its parts, their approximate size in bytes, and which columns hold what."""

    source: Source
    parts: list[SourcePart]
    size: int
    columns: dict[str, Any]
    digest: Callable[[FileDigests], str]
    sample: Sample | None = None

    def identity(self, digests: FileDigests) -> dict[str, Any]:
        """What the artefact's hash covers of this source: content and settings, not the path."""
        keys = {key: getattr(self.source, key) for key in ("weight", "take", "size")}
        return {"content": self.digest(digests), "columns": self.columns, **keys}

    def chunks(self) -> Iterator[Chunk]:
        return (chunk for part in self.parts for chunk in self.part_chunks(part))

    def part_chunks(self, part: SourcePart) -> Iterator[Chunk]:
        return (replace(chunk, sample=self.sample) for chunk in _read_chunks(part, self.columns))

    @property
    def is_builtin(self) -> bool:
        return self.source.path.startswith("builtin:")

    @property
    def builtin_questions(self) -> int:
        """How many `builtin:instructions` makes."""
        return int(self.source.take or _DEFAULT_QUESTIONS)

    @property
    def limits(self) -> Source:
        """The source's `weight`, `take` and `size`; built-in data is made as long as they say."""
        return self.source.model_copy(update={"take": None, "size": None}) if self.is_builtin else self.source

    @property
    def is_limited(self) -> bool:
        return self.limits.take is not None or self.limits.size is not None


def open_source(
    source: Source, columns: Columns, evaluation: bool, say: Callable[[str], None], encoding: str = "utf-8"
) -> OpenedSource:
    """A path that exists takes precedence over a data set of the same name."""
    path = source.path
    given: dict[str, Any] = (source.columns or columns).model_dump(exclude_none=True)
    if path.startswith("builtin:"):
        kind, parts = _builtin_parts(source)
        count = int(source.take or _DEFAULT_QUESTIONS)
        size = int(source.size or _DEFAULT_TEXT_BYTES) if kind == "text" else count * _QUESTION_BYTES
        identity = f"{builtin.VERSION} {kind} {parts} {size}"
        return OpenedSource(source, [SourcePart(path, lambda: _read_builtin(source))], size, given, lambda _: identity)
    if not user_path(path, "data.sources").exists() and _is_hub_name(path):
        table = _open_table(source, evaluation, say)
        part = SourcePart(table.name, lambda: _table_chunks(table))
        size = table.rows * _ROW_BYTES
        return OpenedSource(source, [part], size, given or table.columns_map, lambda _: table.fingerprint)
    if path.isidentifier() and not user_path(path, "data.sources").exists():
        hint = did_you_mean(path, [row.name for row in datasets()])
        raise UserError(f"data.sources: {path}: no such file or folder, and no data set of that name{hint}")
    files = find_files(path)
    size = sum(file.stat().st_size * (COMPRESSION_RATIO if is_compressed(file) else 1) for file in files)
    read = [
        SourcePart(str(file), partial(read_file, file, encoding=encoding), partial(needs_conversion, file, encoding))
        for file in files
    ]
    converted = "" if encoding == "utf-8" else f" {encoding}"
    return OpenedSource(source, read, size, given, lambda digests: _digest_of_files(files, digests) + converted)


def _read_chunks(part: SourcePart, columns: dict[str, Any]) -> Iterator[Chunk]:
    """Chunks with the format of their file, which its first valid record decides."""
    format, first = None, ""
    for chunk in part.read():
        if format is None and chunk.kind in ("json", "table"):
            format, first = _detect_chunk_format(chunk, columns)
        yield replace(chunk, columns=columns, format=format, first=first)


def _detect_chunk_format(chunk: Chunk, columns: dict[str, Any]) -> tuple[str | None, str]:
    """The format of the first record that has one, and where that record is."""
    for line, raw in zip(chunk.lines, chunk.records, strict=True):
        where = f"{chunk.file}:{line}"
        with suppress(BadRecord):
            return detect_format(rename_columns(parse_record(raw), columns)), where
    return None, ""


def _open_table(source: Source, evaluation: bool, say: Callable[[str], None]) -> HubTable:
    from sojourn.data.sources.hub import open_table

    try:
        return open_table(source, evaluation, say)
    except UserError as error:
        missing = "no such file or folder here; as a data set: " if "/" in source.path else ""
        raise type(error)(f"data.sources: {source.path}: {missing}{error}") from None


def _is_hub_name(path: str) -> bool:
    from sojourn.data.sources.hub import is_hub_name

    return is_hub_name(path)


def _table_chunks(table: HubTable) -> Iterator[Chunk]:
    if table.is_lines:
        rows = (str(row["text"] or "").removesuffix("\n") for batch in table.batches() for row in batch)
        yield from group_records(table.name, "text", split_documents(f"{row}\n".encode() for row in rows), 1 << 20)
        return
    row = 1
    for records in table.batches():
        yield Chunk(table.name, "table", range(row, row + len(records)), records)
        row += len(records)


def _builtin_parts(source: Source) -> tuple[str, tuple[str, ...]]:
    """`builtin:text`, `builtin:instructions`, or one language or family of them: `builtin:instructions/compare`."""
    kind, _, part = source.path.removeprefix("builtin:").partition("/")
    parts = {"text": tuple(builtin.LANGUAGES), "instructions": tuple(builtin.FAMILIES)}.get(kind)
    if parts is None:
        raise UserError(f"data.sources: {source.path}: no such built-in data; there are {' and '.join(_BUILTINS)}")
    if part and part not in parts:
        hint = did_you_mean(part, parts)
        raise UserError(f"data.sources: {source.path}: no “{part}”{hint} (there are: {', '.join(parts)})")
    return kind, tuple(one for one in parts if part in ("", one))


def _read_builtin(source: Source) -> Iterator[Chunk]:
    documents, row = _builtin_documents(source), 1
    while records := list(islice(documents, 1000)):
        yield Chunk(source.path, "documents", range(row, row + len(records)), records)
        row += len(records)


def _builtin_documents(source: Source) -> Iterator[Document]:
    kind, parts = _builtin_parts(source)
    if kind == "text":
        size = int(source.size or _DEFAULT_TEXT_BYTES)
        yield from builtin.text(size, languages=[one for one in builtin.LANGUAGES if one in parts])
    else:
        questions = builtin.instructions(source.take or _DEFAULT_QUESTIONS, families=list(parts))
        for number, question in enumerate(questions, 1):
            messages = (Message("user", question.prompt), Message("assistant", question.answer))
            yield Document(f"{source.path}:{number}", messages=messages)


def _digest_of_files(files: list[Path], digests: FileDigests) -> str:
    whole = hashlib.sha256()
    for file in files:
        suffix = suffix_of(file)
        whole.update(f"{suffix.inner if suffix else ''} {digests.of(file)}\n".encode())
    return whole.hexdigest()
