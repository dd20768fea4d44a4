"""Reads sources one document at a time: `builtin:NAME`, text files, JSON and JSON lines."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from sojourn.config.schema import Source
from sojourn.config.words import closest
from sojourn.data import builtin
from sojourn.data.document import Document, Message
from sojourn.data.formats import recognise, to_document
from sojourn.errors import UserError

_TEXT_FILES = (".txt", ".md")
_RECORD_FILES = (".jsonl", ".ndjson", ".json")
_BUILTINS = ("builtin:text", "builtin:instructions")
_DEFAULT_TEXT_BYTES = 10_000_000
_DEFAULT_TASKS = 20_000


def read_sources(sources: list[Source], take: int | None = None) -> Iterator[Document]:
    """All documents of all sources in order, at most `take` of them."""
    return islice((document for source in sources for document in _weighted(source)), take)


def _weighted(source: Source) -> Iterator[Document]:
    """A weight of 2.3 gives every document twice and three tenths of them once more."""
    copies, part = divmod(source.weight, 1.0)
    for document in islice(_read(source), source.take):
        again = part > 0 and document.fingerprint() / 2**64 < part
        for _ in range(int(copies) + again):
            yield document


def _read(source: Source) -> Iterator[Document]:
    if source.path.startswith("builtin:"):
        yield from _read_builtin(source)
        return
    left = None if source.size is None else int(source.size)
    for path in find_files(source.path):
        for document in _read_text(path) if path.suffix in _TEXT_FILES else _read_records(path):
            if left is not None:
                left -= document.size
                if left < 0:
                    return
            yield document


def find_files(path: str) -> list[Path]:
    """The files a source names: one file, a folder's files, or a glob's."""
    place = Path(path).expanduser()
    try:
        if place.is_file():
            found = [place]
        elif place.is_dir():
            found = sorted(p for p in place.rglob("*") if p.suffix in (*_TEXT_FILES, *_RECORD_FILES) and p.is_file())
        elif any(mark in path for mark in "*?["):
            found = sorted(
                p for p in Path(place.anchor or ".").glob(str(place.relative_to(place.anchor))) if p.is_file()
            )
        else:
            known = f"files and built-in data ({', '.join(_BUILTINS)}), not a hub's data sets"
            raise UserError(f"data.sources: {path}: no such file or folder; this version reads {known}")
    except (OSError, ValueError) as error:
        raise UserError(f"data.sources: {path}: cannot be read: {error}") from None
    if not found:
        raise UserError(f"data.sources: {path}: no {', '.join((*_TEXT_FILES, *_RECORD_FILES))} file there")
    for file in found:
        if file.suffix not in (*_TEXT_FILES, *_RECORD_FILES):
            raise UserError(
                f"data.sources: {file}: files of kind “{file.suffix}” cannot be read; "
                f"use {', '.join((*_TEXT_FILES, *_RECORD_FILES))}"
            )
    return found


def _read_text(path: Path) -> Iterator[Document]:
    """Paragraphs separated by blank lines, joined up to a few thousand characters: a document each."""
    part: list[str] = []
    start, size = 1, 0
    try:
        with path.open(encoding="utf-8-sig") as file:
            for number, line in enumerate(file, 1):
                if size > 4000 and not line.strip():
                    yield Document(f"{path}:{start}", text="".join(part).strip())
                    part, start, size = [], number + 1, 0
                    continue
                part.append(line)
                size += len(line)
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text ({error.reason} near byte {error.start}); save it as UTF-8") from None
    if "".join(part).strip():
        yield Document(f"{path}:{start}", text="".join(part).strip())


def _read_records(path: Path) -> Iterator[Document]:
    first: tuple[str, str] | None = None
    for number, line in _json_values(path):
        where = f"{path}:{number}"
        try:
            record = json.loads(line) if isinstance(line, str) else line
        except ValueError as error:
            raise UserError(f"{where}: not valid JSON: {error}") from None
        name = recognise(record, where)
        if first is None:
            first = (name, where)
        elif name != first[0]:
            raise UserError(f"{where}: format {name}, but {first[1]} is {first[0]}; a file holds one format")
        yield to_document(record, name, where)


def _json_values(path: Path) -> Iterator[tuple[int, Any]]:
    try:
        if path.suffix == ".json":
            values = json.loads(path.read_text(encoding="utf-8-sig"))
            yield from enumerate(values if isinstance(values, list) else [values], 1)
            return
        with path.open(encoding="utf-8-sig") as file:
            yield from ((number, line) for number, line in enumerate(file, 1) if line.strip())
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text ({error.reason} near byte {error.start}); save it as UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not valid JSON: {error}") from None


def _read_builtin(source: Source) -> Iterator[Document]:
    """`builtin:text`, `builtin:instructions`, or one language or family of them: `builtin:instructions/compare`."""
    kind, _, part = source.path.removeprefix("builtin:").partition("/")
    parts = {"text": builtin.LANGUAGES, "instructions": tuple(builtin.FAMILIES)}.get(kind)
    if parts is None:
        raise UserError(f"data.sources: {source.path}: no such built-in data; there are {' and '.join(_BUILTINS)}")
    if part and part not in parts:
        hint = closest(part, parts)
        raise UserError(f"data.sources: {source.path}: no “{part}”{hint} (there are: {', '.join(parts)})")
    chosen = [one for one in parts if part in ("", one)]
    if kind == "text":
        size = int(source.size or _DEFAULT_TEXT_BYTES)
        yield from builtin.text(size, languages=[one for one in builtin.LANGUAGES if one in chosen])
    else:
        for number, task in enumerate(builtin.instructions(source.take or _DEFAULT_TASKS, families=chosen), 1):
            messages = (Message("user", task.prompt), Message("assistant", task.answer))
            yield Document(f"{source.path}:{number}", messages=messages)


def fingerprint(source: Source) -> str:
    """Changes whenever what the source yields may change."""
    digest = hashlib.sha256(source.model_dump_json().encode())
    if source.path.startswith("builtin:"):
        digest.update(str(builtin.VERSION).encode())
    else:
        for path in find_files(source.path):
            digest.update(path.suffix.encode())
            with path.open("rb") as file:
                while block := file.read(1 << 20):
                    digest.update(block)
    return digest.hexdigest()
