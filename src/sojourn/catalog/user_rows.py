"""Rows as TOML text, and the user's catalog.toml with one row added or changed; everything else in it stays."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sojourn.catalog.datasets import datasets
from sojourn.catalog.gpus import find_gpu, gpus
from sojourn.catalog.models import models
from sojourn.catalog.platforms import find_platform, platforms
from sojourn.catalog.prices import currencies, prices
from sojourn.catalog.tables import KINDS, Table, flat_rows, name_key, parse_tables, user_file
from sojourn.config.messages import did_you_mean, printable
from sojourn.config.quantities import Money
from sojourn.errors import UserError

READERS: dict[str, Callable[..., object]] = {
    "gpu": gpus, "platform": platforms, "price": prices, "currency": currencies, "model": models, "dataset": datasets
}  # fmt: skip
_BARE = re.compile(r"[A-Za-z0-9_-]+")


def row_text(kind: str, name: str, row: Table) -> str:
    """One row as TOML; a price is named PLATFORM/GPU."""
    parts = name.split("/", 1) if kind == "price" else [name]
    head = ".".join([kind, *(part if _BARE.fullmatch(part) else _value(part) for part in parts)])
    lines = [f"{key} = {_value(value)}" for key, value in row.items() if value is not None]
    return "\n".join([f"[{head}]", *lines, ""])


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{key} = {_value(one)}' for key, one in value.items())} }}"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def kind_of(word: str) -> str:
    """`gpu` of `gpu` and `gpus`."""
    typed = word.strip().lower()
    found = next((kind for kind, plural in KINDS.items() if typed in (kind, plural)), None)
    if found is None:
        raise UserError(f"no kind called “{printable(word)}”{did_you_mean(typed, KINDS)} (of {', '.join(KINDS)})")
    return found


def parse_row(kind: str, words: list[str]) -> tuple[str, Table]:
    """Name and keys of a row as typed: NAME key=value…; of a price PLATFORM GPU and an amount such as ¥1.98."""
    plain = [word for word in words if not re.match(r"[a-z_0-9]+=", word)]
    row = {key: _parsed(value) for key, _, value in (w.partition("=") for w in words if w not in plain)}
    if kind != "price":
        if len(plain) != 1:
            raise UserError(f"give one name and its keys, such as: sojourn catalog add {kind} NAME {_EXAMPLES[kind]}")
        return plain[0], row
    if len(plain) == 3:
        row |= _amount(plain[2])
    elif len(plain) != 2 or not row:
        raise UserError('give platform, GPU and price, such as: sojourn catalog add price autodl "RTX 4090" ¥1.98')
    return f"{find_platform(plain[0]).name}/{find_gpu(plain[1]).name}", row


_EXAMPLES = {
    "gpu": "memory_gib=48 bandwidth_gbs=1008 bf16_tflops=165.2",
    "platform": "session_hours=24",
    "currency": "cny=6.8",
    "model": "hidden=4096 layers=32 heads=32 ffn=14336 vocab=64000 positions=8192",
    "dataset": "hub=ORG/NAME",
}


def _amount(word: str) -> Table:
    try:
        money = Money.parse(word)
    except ValueError as error:
        raise UserError(f"“{printable(word)}”: {error}") from None
    return {"per_hour": float(money.amount), "currency": money.currency or "CNY"}


def _parsed(value: str) -> Any:
    for read in (int, float):
        try:
            return read(value)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(value.lower(), value)


def add_row(kind: str, name: str, row: Table) -> tuple[Path, bool]:
    """Writes it into the user's catalog.toml, checked together with all other rows; whether it changed one there."""
    path = user_file()
    try:
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error})") from None
    own = flat_rows(kind, parse_tables(text, str(path)).get(kind, {}), str(path))
    there = next((typed for typed in own if name_key(typed) == name_key(name)), None)
    if there is None:
        text = "\n".join([*([text.rstrip("\n"), ""] if text.strip() else []), row_text(kind, name, row)])
    else:
        kept = {key: value for key, value in own[there].items() if kind != "price" or key not in ("platform", "gpu")}
        text = _replaced(text, kind, there, row_text(kind, there, {**_still_valid(kept, row), **row}), path)
    write_checked(path, text)
    return path, there is not None


def _still_valid(old: Table, new: Table) -> Table:
    """A price in one currency takes the place of one in another."""
    amounts = ("per_hour", "currency", "cny_per_hour")
    return {key: value for key, value in old.items() if not (key in amounts and set(new) & set(amounts))}


def _replaced(text: str, kind: str, name: str, block: str, path: Path) -> str:
    lines = text.splitlines()
    for start, line in enumerate(lines):
        if line.strip().startswith("[") and _names(line, kind, name):
            rest = (i for i in range(start + 1, len(lines)) if lines[i].lstrip().startswith("["))
            end = next(rest, len(lines))
            return "\n".join([*lines[:start], *block.splitlines(), "", *lines[end:]]) + "\n"
    raise UserError(f"{path} has {kind}.{name} already, in a form that only you can edit")


def _names(line: str, kind: str, name: str) -> bool:
    """Whether a line is the head of that row's table."""
    try:
        found = parse_tables(line, "")
        return any(name_key(typed) == name_key(name) for typed in flat_rows(kind, found.get(kind, {}), ""))
    except UserError:
        return False


def write_checked(path: Path, text: str) -> None:
    """Puts the file in place if the catalogue can be read with it; else nothing changes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_name(f".{path.name}.{os.getpid()}.toml")
    try:
        written.write_text(text, encoding="utf-8")
        for read in READERS.values():
            read(written)
        written.replace(path)
    except UserError as error:
        raise UserError(str(error).replace(str(written), str(path))) from None
    finally:
        written.unlink(missing_ok=True)
