"""Values of a record, checked: every fault is a BadRecord, one line that says what is wrong."""

from __future__ import annotations

import json
from typing import Any

Record = dict[str, Any]

_LONE_SURROGATE = "half a character (a lone surrogate) in the text"
_NONCHARACTER = "a noncharacter (U+FDD0 to U+FDD3) in the text"


class BadRecord(Exception):
    """What is wrong with one record."""


class EmptyRecord(Exception):
    """A record with no text: skipped, not counted as bad."""


def kind_name(value: Any) -> str:
    names = {
        "dict": "an object",
        "list": "a list",
        "str": "text",
        "NoneType": "nothing (null)",
        "bool": "true or false",
    }
    return names.get(type(value).__name__, "a number" if isinstance(value, (int, float)) else type(value).__name__)


def check_text(value: Any, key: str) -> str:
    if not isinstance(value, str):
        raise BadRecord(f"{key}: expected text, found {kind_name(value)}")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise BadRecord(f"{key}: {_LONE_SURROGATE}") from None
        if any(mark in value for mark in "\ufdd0\ufdd1\ufdd2\ufdd3"):
            raise BadRecord(f"{key}: {_NONCHARACTER}")
    return value


def first_present(record: Record, *keys: str) -> tuple[str, Any]:
    """The first of `keys` that the record has, and its value; or the first name with None."""
    return next(((key, record[key]) for key in keys if record.get(key) is not None), (keys[0], None))


def parse_json(value: str, key: str) -> Any:
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise BadRecord(f"{key}: not valid JSON: {value[:60]}") from None


def check_json(value: Any, key: str) -> Any:
    """`value`, after checking that all text in it can be encoded."""
    try:
        check_text(json.dumps(value, ensure_ascii=False), key)
    except (RecursionError, TypeError, ValueError) as error:
        nested = isinstance(error, RecursionError)
        raise BadRecord(f"{key}: {'nested too deeply' if nested else 'not a JSON value'}") from None
    return value


def column_names(record: Record) -> str:
    return ", ".join(str(key)[:40] for key in list(record)[:6]) or "no keys"
