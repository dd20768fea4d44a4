"""What the user calls a source, as a stream of parcels with their format: files, hub data sets, built-in data."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sojourn.catalog.facts import datasets
from sojourn.config.data import Columns, Source
from sojourn.config.words import closest
from sojourn.data import builtin
from sojourn.data.sources.chunks import Lot, parsed
from sojourn.data.sources.document import Document, Message
from sojourn.data.sources.files import find_files, place_of, suffix_of
from sojourn.data.sources.formats import Damaged, mapped, recognise
from sojourn.data.sources.readers import Parcel, gather, read_file
from sojourn.data.sources.texts import documents
from sojourn.errors import UserError
from sojourn.storage.files import read_json, sha256, write_json

if TYPE_CHECKING:
    from sojourn.data.sources.hub import HubTable

_BUILTINS = ("builtin:text", "builtin:instructions")
_DEFAULT_TEXT_BYTES = 10_000_000
_DEFAULT_TASKS = 20_000
_TASK_BYTES = 100
_ROW_BYTES = 1000
_UNPACKED = 4  # how much larger text is than its compressed file, roughly


@dataclass(frozen=True)
class Part:
    """One file, data set or built-in set of a source: its name for people, and how to read it."""

    name: str
    read: Callable[[], Iterator[Parcel]]


@dataclass(frozen=True)
class Opened:
    """A source that has been found: its parts, roughly how many bytes they have, and which columns hold what."""

    source: Source
    parts: list[Part]
    size: int
    columns: dict[str, str]
    digest: Callable[[Digests], str]

    def identity(self, digests: Digests) -> dict[str, Any]:
        """All that decides what it yields: the bytes, not the place they are at."""
        keys = {key: getattr(self.source, key) for key in ("weight", "take", "size")}
        return {"content": self.digest(digests), "columns": self.columns, **keys}

    def lots(self) -> Iterator[Lot]:
        return (lot for part in self.parts for lot in read_lots(part, self.columns))


def open_source(source: Source, columns: Columns, evaluation: bool, say: Callable[[str], None]) -> Opened:
    """Finds what `source` names; a file goes before a data set's name."""
    path = source.path
    named: dict[str, str] = (source.columns or columns).model_dump(exclude_none=True)
    if path.startswith("builtin:"):
        kind, parts = _builtin_parts(source)
        count = int(source.take or _DEFAULT_TASKS)
        size = int(source.size or _DEFAULT_TEXT_BYTES) if kind == "text" else count * _TASK_BYTES
        made = f"{builtin.VERSION} {kind} {parts} {size}"
        return Opened(source, [Part(path, lambda: _read_builtin(source))], size, named, lambda _: made)
    if not place_of(path, "data.sources").exists() and _is_hub_name(path):
        table = _open_table(source, evaluation, say)
        part = Part(table.name, lambda: _table_parcels(table))
        return Opened(source, [part], table.rows * _ROW_BYTES, named or table.mapping, lambda _: table.fingerprint)
    if path.isidentifier() and not place_of(path, "data.sources").exists():
        hint = closest(path, [row.name for row in datasets()])
        raise UserError(f"data.sources: {path}: no such file or folder, and no data set of that name{hint}")
    files = find_files(path)
    size = sum(file.stat().st_size * (_UNPACKED if _is_packed(file) else 1) for file in files)
    read = [Part(str(file), partial(read_file, file)) for file in files]
    return Opened(source, read, size, named, lambda digests: _digest_of_files(files, digests))


def _open_table(source: Source, evaluation: bool, say: Callable[[str], None]) -> HubTable:
    from sojourn.data.sources.hub import open_table

    try:
        return open_table(source, evaluation, say)
    except UserError as error:
        missed = "no such file or folder here; as a data set: " if "/" in source.path else ""
        raise type(error)(f"data.sources: {source.path}: {missed}{error}") from None


def read_lots(part: Part, columns: dict[str, str]) -> Iterator[Lot]:
    """Parcels with the format of their file, which its first records decide."""
    name, first = None, ""
    for parcel in part.read():
        if name is None and parcel.kind in ("json", "table"):
            name, first = _format_of(parcel, columns)
        yield Lot(parcel, columns, name, first)


def _format_of(parcel: Parcel, columns: dict[str, str]) -> tuple[str | None, str]:
    """The format of the first record that has one, and where that is."""
    for line, raw in zip(parcel.lines, parcel.records, strict=True):
        where = f"{parcel.file}:{line}"
        with suppress(Damaged):
            return recognise(mapped(parsed(raw), columns)), where
    return None, ""


def _is_hub_name(path: str) -> bool:
    from sojourn.data.sources.hub import is_hub_name

    return is_hub_name(path)


def _is_packed(file: Path) -> bool:
    suffix = suffix_of(file)
    return suffix is not None and (bool(suffix.packing) or suffix.inner == ".parquet")


def _table_parcels(table: HubTable) -> Iterator[Parcel]:
    if table.lines:
        rows = (str(row["text"] or "").removesuffix("\n") for batch in table.batches() for row in batch)
        yield from gather(table.name, "text", documents(f"{row}\n".encode() for row in rows), 1 << 20)
        return
    row = 1
    for records in table.batches():
        yield Parcel(table.name, "table", range(row, row + len(records)), records)
        row += len(records)


def _builtin_parts(source: Source) -> tuple[str, tuple[str, ...]]:
    """`builtin:text`, `builtin:instructions`, or one language or family of them: `builtin:instructions/compare`."""
    kind, _, part = source.path.removeprefix("builtin:").partition("/")
    parts = {"text": tuple(builtin.LANGUAGES), "instructions": tuple(builtin.FAMILIES)}.get(kind)
    if parts is None:
        raise UserError(f"data.sources: {source.path}: no such built-in data; there are {' and '.join(_BUILTINS)}")
    if part and part not in parts:
        hint = closest(part, parts)
        raise UserError(f"data.sources: {source.path}: no “{part}”{hint} (there are: {', '.join(parts)})")
    return kind, tuple(one for one in parts if part in ("", one))


def _read_builtin(source: Source) -> Iterator[Parcel]:
    documents, row = _builtin_documents(source), 1
    while records := list(islice(documents, 1000)):
        yield Parcel(source.path, "documents", range(row, row + len(records)), records)
        row += len(records)


def _builtin_documents(source: Source) -> Iterator[Document]:
    kind, parts = _builtin_parts(source)
    if kind == "text":
        size = int(source.size or _DEFAULT_TEXT_BYTES)
        yield from builtin.text(size, languages=[one for one in builtin.LANGUAGES if one in parts])
    else:
        for number, task in enumerate(builtin.instructions(source.take or _DEFAULT_TASKS, families=list(parts)), 1):
            messages = (Message("user", task.prompt), Message("assistant", task.answer))
            yield Document(f"{source.path}:{number}", messages=messages)


def _digest_of_files(files: list[Path], digests: Digests) -> str:
    whole = hashlib.sha256()
    for file in files:
        suffix = suffix_of(file)
        whole.update(f"{suffix.inner if suffix else ''} {digests.of(file)}\n".encode())
    return whole.hexdigest()


class Digests:
    """SHA-256 of files, remembered by path, size and time of change, so that unchanged gigabytes are not read again."""

    def __init__(self, memory: Path) -> None:
        self._memory = memory
        known = read_json(memory)
        self._known: dict[str, Any] = known if isinstance(known, dict) else {}
        self._changed = False
        self._used: dict[Path, list[int]] = {}

    def of(self, file: Path) -> str:
        path = file.resolve()
        try:
            facts = path.stat()
            self._used[path] = stamp = [facts.st_size, facts.st_mtime_ns, facts.st_ino]
            known = self._known.get(str(path))
            if isinstance(known, list) and known[:3] == stamp:
                return str(known[3])
            began = time.time_ns()
            digest = sha256(path)
        except OSError as error:
            raise UserError(f"data.sources: {file}: cannot be read: {error.strerror or error}") from None
        if facts.st_mtime_ns < began - 2_000_000_000:  # else it may change again within the clock's grain, unseen
            self._known[str(path)] = [*stamp, digest]
            self._changed = True
        return digest

    def check(self) -> None:
        """Nothing may have changed while it was read: the hash would be of other bytes."""
        for path, stamp in self._used.items():
            facts = path.stat()
            if [facts.st_size, facts.st_mtime_ns, facts.st_ino] != stamp:
                raise UserError(f"data.sources: {path}: it changed while it was read; run the command again")

    def keep(self) -> None:
        if self._changed:
            write_json(self._memory, self._known)
