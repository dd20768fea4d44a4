"""Reading a DeepSpeed file: JSON errors in one line, fields by dotted names, values parsed."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from sojourn.config.messages import printable
from sojourn.errors import UserError
from sojourn.resolve.ds_fields import IGNORED, REFUSED


def read(path: Path, name: str) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"{name}: no such file; correct parallel.deepspeed, or remove it for ZeRO-2") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{name}: not UTF-8 text (byte {error.start}); save the file as UTF-8") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{name}: cannot be read: {printable(getattr(error, 'strerror', None) or error)}") from None

    def constant(word: str) -> NoReturn:
        raise UserError(f"{name}: {word} is not a JSON number; write a finite one")

    def section(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        for key in keys:
            if keys.count(key) > 1:
                raise UserError(f'{name}: "{printable(key)}" appears twice in the same object; keep one')
        return {key: value for key, value in pairs if value is not None}  # null: as if absent

    try:
        tree = json.loads(text, object_pairs_hook=section, parse_constant=constant)
    except json.JSONDecodeError as error:
        raise UserError(f"{name}:{error.lineno}:{error.colno}: not valid JSON: {_describe_error(error)}") from None
    except (RecursionError, ValueError):
        raise UserError(f"{name}: nested too deeply, or a number of thousands of digits; write it simpler") from None
    if not isinstance(tree, dict):
        raise UserError(f'{name}:1:1: {format_value(tree)} given; a DeepSpeed file is an object, such as {{"bf16": …}}')
    return tree


def _describe_error(error: json.JSONDecodeError) -> str:
    """What is wrong and what to do."""
    before, after = error.doc[: error.pos].rstrip(), error.doc[error.pos :].lstrip()
    if not after:
        return "it ends too early; close every brace and quote" if before else "the file is empty; write at least {}"
    if after.startswith(("//", "/*", "#")):
        return "JSON has no comments; remove it"
    if after.startswith(("}", "]")) and before.endswith(","):
        return f"a comma before {after[0]}; remove the comma"
    if after.startswith(","):
        return "a comma too many; remove it"
    if after.startswith(("'", "True", "False", "None")):
        return 'this is Python; JSON writes "text", true, false and null'
    return f"{error.msg.removesuffix(' at')} before {printable(after, 20)}; correct it there"


def flatten(tree: dict[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Every field by its dotted name; sections that are ignored or refused stay one field."""
    for key, value in tree.items():
        field = above + key
        if isinstance(value, dict) and field not in IGNORED and field not in REFUSED:
            yield from flatten(value, field + ".")
        else:
            yield field, value


def is_off(value: Any) -> bool:
    if isinstance(value, dict):
        return value.get("enabled") is False or all(inner is False for inner in value.values())
    return value is False


def format_value(value: Any) -> str:
    return printable(json.dumps(value, ensure_ascii=False))


def parse_number(at: str, value: Any) -> int | float:
    """2e8 and "1" count as whole numbers."""
    if isinstance(value, int | float | str) and not isinstance(value, bool):
        try:
            number = float(value)
        except (ValueError, OverflowError):
            number = math.nan
        if math.isfinite(number):
            if isinstance(value, int):
                return value
            return int(number) if number.is_integer() else number
    raise UserError(f"{at}: {format_value(value)} given; it takes a number, such as 1 or 2e-5")


def parse_flag(at: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise UserError(f"{at}: {format_value(value)} given; it takes true or false, without quotes")
    return value


def is_equal(at: str, value: Any, ours: Any) -> bool:
    if isinstance(ours, bool):
        return parse_flag(at, value) is ours
    if isinstance(ours, str):
        return bool(value == ours)
    return math.isclose(parse_number(at, value), ours, rel_tol=1e-9)
