"""The columns of a record: the user's names for ours, marks that leave a record out, media, and those nobody reads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sojourn.data.sources.document import Document
from sojourn.data.sources.turns import TURN_KEYS, as_flag, marks_without_effect
from sojourn.data.sources.values import BadRecord, Record, column_names

OPTIONAL = ("input", "system", "history", "tools", "label", "reasoning")
_PLACEHOLDERS = ("<image>", "<audio>", "<video>")
_MEDIA = ("image", "images", "audio", "audios", "video", "videos")
_TURNS = ("messages", "conversations", "conversation", "prompt", "completion", "chosen", "rejected",
          "chosen_messages", "rejected_messages")  # fmt: skip


def rename_columns(record: Record, columns: dict[str, Any]) -> Record:
    """The record with the user's columns under our names; `columns` maps ours to theirs, `tags` those of messages."""
    tags = columns.get("tags") or {}
    named = {ours: theirs for ours, theirs in columns.items() if ours != "tags"}
    if named:
        missing = [theirs for ours, theirs in named.items() if theirs not in record and ours not in OPTIONAL]
        if missing:
            raise BadRecord(f"no column {' and no '.join(missing)} (it has {column_names(record)})")
        record = {ours: record[theirs] for ours, theirs in named.items() if theirs in record}
    return {key: _rename_tags(value, tags) for key, value in record.items()} if tags else record


def _rename_tags(value: Any, tags: dict[str, str]) -> Any:
    """Messages with `role`, `content` and our names of roles."""
    if isinstance(value, list):
        return [_rename_tags(one, tags) for one in value]
    if not isinstance(value, dict):
        return value
    role, content = tags.get("role", "role" if "role" in value else "from"), tags.get("content", "content")
    renamed = {{role: "role", content: "content"}.get(key, key): one for key, one in value.items()}
    names = {theirs: ours for ours, theirs in tags.items() if ours not in ("role", "content")}
    named = renamed.get("role")
    return {**renamed, "role": names.get(named, named)} if isinstance(named, str) else renamed


def row_marks(record: Record, format: str) -> dict[str, bool]:
    """Columns that say whether a record is trained on: KTO's `label` of a chat, `train`, and `weight` 0 or 1."""
    marks = {name: as_flag(record.get(name)) for name in ("label", "train", "weight")}
    if format in ("text", "preference"):
        del marks["label"]  # a class of texts
    weight = record.get("weight")
    if marks["weight"] is None and isinstance(weight, (int, float)):
        tail = "to ignore this column, name those to use (data.columns.…)"
        raise BadRecord(f"weight {str(weight)[:20]}: only 0 and 1 are supported; {tail}")
    return {name: flag for name, flag in marks.items() if flag is not None}


def check_media(record: Record) -> None:
    """Raises BadRecord for a record with images, audio or video."""
    for name in _MEDIA:
        value = record.get(name)
        if value and not (isinstance(value, list) and not any(value)):
            tail = "to train on the text alone, name its columns (data.columns.…)"
            raise BadRecord(f"{name}: media cannot be trained on, only text; {tail}")


def has_placeholder(document: Document) -> bool:
    return any(placeholder in text for text in document.contents() for placeholder in _PLACEHOLDERS)


class ReadRecord(dict[str, Any]):
    """A record that remembers which of its columns were read."""

    def __init__(self, record: Record) -> None:
        super().__init__(record)
        self.read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        return super().get(key, default)


def unread_turn_keys(record: Record) -> Iterator[str]:
    """What messages have beside what is read of them, such as messages.name."""
    for name in _TURNS:
        turns = record.get(name)
        for turn in turns if isinstance(turns, list) else ():
            if isinstance(turn, dict) and len(turn) > 2:
                yield from (f"{name}.{key}" for key in turn if key not in TURN_KEYS and turn[key] is not None)
                yield from (f"{name}.{mark}" for mark in marks_without_effect(turn))
