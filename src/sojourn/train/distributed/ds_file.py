"""A DeepSpeed file as it is written: read with every mistake told in one line, laid flat, its values understood."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from sojourn.config.words import shown
from sojourn.errors import UserError
from sojourn.train.distributed.ds_fields import DROPPED, REFUSED


def read(path: Path, name: str) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"{name}: no such file; correct parallel.deepspeed, or remove it for ZeRO-2") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{name}: not UTF-8 text (byte {error.start}); save the file as UTF-8") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{name}: cannot be read: {shown(getattr(error, 'strerror', None) or error)}") from None

    def constant(word: str) -> NoReturn:
        raise UserError(f"{name}: {word} is no number that JSON knows; write a finite one")

    def section(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        for key in keys:
            if keys.count(key) > 1:
                raise UserError(f'{name}: "{shown(key)}" stands twice in the same braces; keep one')
        return {key: value for key, value in pairs if value is not None}  # null: as if it were not there

    try:
        tree = json.loads(text, object_pairs_hook=section, parse_constant=constant)
    except json.JSONDecodeError as error:
        raise UserError(f"{name}:{error.lineno}:{error.colno}: not valid JSON: {_mistake(error)}") from None
    except (RecursionError, ValueError):
        raise UserError(f"{name}: nested too deeply, or a number of thousands of digits; write it simpler") from None
    if not isinstance(tree, dict):
        raise UserError(f'{name}:1:1: {said(tree)} given; a DeepSpeed file is an object, such as {{"bf16": …}}')
    return tree


def _mistake(error: json.JSONDecodeError) -> str:
    """The parser's complaint, in words that say what to do."""
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
    return f"{error.msg.removesuffix(' at')} before {shown(after, 20)}; correct it there"


def flat(tree: dict[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Every field by its dotted name; sections that are left out or refused stay whole."""
    for key, value in tree.items():
        field = above + key
        if isinstance(value, dict) and field not in DROPPED and field not in REFUSED:
            yield from flat(value, field + ".")
        else:
            yield field, value


def is_off(value: Any) -> bool:
    if isinstance(value, dict):
        return value.get("enabled") is False or all(inner is False for inner in value.values())
    return value is False


def said(value: Any) -> str:
    return shown(json.dumps(value, ensure_ascii=False))


def number_of(at: str, value: Any) -> int | float:
    """Whichever way it is written: 2e8 is a whole number, and "1" is one too."""
    if isinstance(value, int | float | str) and not isinstance(value, bool):
        try:
            number = float(value)
        except (ValueError, OverflowError):
            number = math.nan
        if math.isfinite(number):
            if isinstance(value, int):
                return value
            return int(number) if number.is_integer() else number
    raise UserError(f"{at}: {said(value)} given; it takes a number, such as 1 or 2e-5")


def flag_of(at: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise UserError(f"{at}: {said(value)} given; it takes true or false, without quotes")
    return value


def is_equal(at: str, value: Any, ours: Any) -> bool:
    if isinstance(ours, bool):
        return flag_of(at, value) is ours
    if isinstance(ours, str):
        return bool(value == ours)
    return math.isclose(number_of(at, value), ours, rel_tol=1e-9)
