"""From the raw records of a parcel to documents: decode, parse, recognise, convert; what is damaged is told apart."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from sojourn.data.sources.document import Document
from sojourn.data.sources.formats import Damaged, Empty, mapped, recognise, to_document
from sojourn.data.sources.readers import Parcel
from sojourn.errors import UserError


@dataclass(frozen=True)
class Lot:
    """A parcel with what is known of its source: the columns' meaning, and the format of the file's first record."""

    parcel: Parcel
    columns: dict[str, str] = field(default_factory=dict)
    format: str | None = None
    first: str = ""


def read_lot(lot: Lot) -> tuple[list[Document], int, list[tuple[str, str]]]:
    """The documents, the number of records, and (where, what is wrong) of each damaged one."""
    parcel = lot.parcel
    if parcel.kind == "documents":
        return parcel.records, len(parcel.records), []
    documents: list[Document] = []
    bad: list[tuple[str, str]] = []
    format, first = lot.format, lot.first
    formats: dict[tuple[Any, ...], str] = {}
    for line, raw in zip(parcel.lines, parcel.records, strict=True):
        where = f"{parcel.file}:{line}"
        try:
            if parcel.kind == "text":
                documents.append(to_document({"text": _decoded(raw)}, "text", where))
                continue
            record = mapped(parsed(raw), lot.columns)
            keys = tuple(record)
            name = formats.get(keys) or formats.setdefault(keys, recognise(record))
            if format is None:
                format, first = name, where
            elif name != format:
                raise UserError(f"{where}: format {name}, but {first} is {format}; a file holds one format")
            documents.append(to_document(record, name, where))
        except Empty:
            continue
        except Damaged as error:
            bad.append((where, str(error)))
    return documents, len(parcel.records), bad


def _decoded(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise Damaged(f"not UTF-8 text ({error.reason}); save it as UTF-8") from None


def parsed(raw: Any) -> dict[str, Any]:
    """A record of a table as it is, a line of JSON parsed."""
    if isinstance(raw, bytes):
        try:
            raw = json.loads(_decoded(raw))
        except (ValueError, RecursionError) as error:
            raise Damaged(f"not valid JSON: {error}") from None
    elif isinstance(raw, list):
        raise Damaged(f"{len(raw)} columns, other than the header")
    if not isinstance(raw, dict):
        recognise(raw)
    return raw  # type: ignore[no-any-return]
