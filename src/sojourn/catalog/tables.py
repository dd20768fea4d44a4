"""Reads the catalogue's TOML tables, lays the user's own file over them, and turns rows into dataclasses."""

import dataclasses
import importlib
import os
import sys
import types
import typing
from datetime import datetime, timezone
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

from sojourn.config.words import closest, shown
from sojourn.errors import UserError

# tomllib came with 3.11; before that it is the tomli package, which has the same functions.
_toml: Any = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")

# What a key of the user's, or any, makes worthless in the row of ours that it changes.
_STALE = {
    "model": ("published",),
    "memory_gib": ("usable_gib",),
    "per_hour": ("cny_per_hour",),
    "cny_per_hour": ("per_hour", "currency"),
}

Row = TypeVar("Row")
Table = dict[str, Any]
_LARGEST = 10**15  # of a figure; TOML also has inf and nan, and whole numbers without end
KINDS = {  # each kind, and the word for many: the name of its file, and as good a name for a table of the user's
    "gpu": "gpus",
    "platform": "platforms",
    "price": "prices",
    "currency": "currencies",
    "model": "models",
    "dataset": "datasets",
}


def user_file() -> Path:
    """Where a person keeps their own rows: the same tables as ours, laid over them by name.

    A file in SOJOURN_HOME travels with the runs; without one there it is the user's configuration folder.
    """
    from platformdirs import user_config_dir

    home = os.environ.get("SOJOURN_HOME")
    if home and (there := Path(home).expanduser() / "catalog.toml").is_file():
        return there
    return Path(user_config_dir("sojourn", appauthor=False)) / "catalog.toml"


@cache
def _packaged(kind: str) -> Table:
    text = resources.files("sojourn.catalog").joinpath(f"{KINDS[kind]}.toml").read_text(encoding="utf-8")
    table: Table = _toml.loads(text)[kind]
    return table


def _own(path: Path) -> Table:
    try:
        content: Table = _toml.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error})") from error
    except _toml.TOMLDecodeError as error:
        raise UserError(f"{path}: not valid TOML: {error}") from error
    one = {many: kind for kind, many in KINDS.items()}
    tables: Table = {}
    for word, table in content.items():
        kind = one.get(word, word)
        if kind not in KINDS:
            raise UserError(f"{path}: unknown table [{word}]{closest(word, KINDS)}")
        if not isinstance(table, dict):
            raise UserError(f"{path}: {word} must be a table, like [{word}.NAME]")
        if kind in tables:
            raise UserError(f"{path}: [{kind}] and [{KINDS[kind]}] are the same table; keep one of them")
        tables[kind] = table
    return tables


def rows(kind: str, user: Path | None = None) -> dict[str, tuple[Table, str]]:
    """Every row of one kind by name, with where it came from; the user's keys win over ours, row by row."""
    ours = f"{KINDS[kind]}.toml"
    merged = {name: (dict(row), ours) for name, row in _flat(kind, _packaged(kind), ours).items()}
    path = user or user_file()
    own = _own(path).get(kind, {})
    if not own:
        return merged
    written = datetime.fromtimestamp(path.stat().st_mtime, timezone.utc).strftime("%Y-%m")
    when = "month" if kind == "price" else "date"
    spelled = {_key(name): name for name in merged}
    for typed, row in _flat(kind, own, str(path)).items():
        name = spelled.get(_key(typed), typed)
        base = merged.get(name, ({}, ""))[0]
        stale = {key for changed in (kind, *row) for key in _STALE.get(changed, ())}
        base = {key: value for key, value in base.items() if key not in stale}
        # A figure the user typed is theirs: it does not keep our source and date.
        merged[name] = ({**base, "source": str(path), when: written, **row, **_called(kind, base)}, str(path))
    return merged


def _key(name: str) -> str:
    return "".join(name.casefold().split())


def _called(kind: str, base: Table) -> Table:
    """A price keeps our spelling of its platform and GPU, so that rows still find each other by name."""
    return {key: base[key] for key in ("platform", "gpu") if key in base} if kind == "price" else {}


def _flat(kind: str, table: Table, where: str) -> dict[str, Table]:
    """Prices are nested as [price.PLATFORM."GPU"]; their name is "PLATFORM/GPU"."""
    flat: dict[str, Table] = {}
    for name, row in table.items():
        if not isinstance(row, dict):
            raise UserError(f"{where}: {kind}.{name} must be a table, like [{kind}.{name}]")
        if kind != "price":
            flat[name] = row
            continue
        for gpu, price in row.items():
            if not isinstance(price, dict):
                raise UserError(f'{where}: {kind}.{name}.{gpu} must be a table, like [price.{name}."RTX 4090"]')
            flat[f"{name}/{gpu}"] = {"platform": name, "gpu": gpu, **price}
    return flat


def to_row(cls: type[Row], row: Table, where: str, kind: str) -> Row:
    """One table as a frozen dataclass; an unknown, missing or wrongly typed key is the user's error, named."""
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    hints = typing.get_type_hints(cls)
    values: Table = {}
    for key, value in row.items():
        if key not in fields:
            raise UserError(f"{where}: unknown key `{key}`{closest(key, fields)}")
        values[key] = _typed(value, hints[key], f"{where}: `{key}`")
    for name, field in fields.items():
        if name not in values and field.default is field.default_factory is dataclasses.MISSING:
            raise UserError(f"{where}: `{name}` is missing; every {kind} needs it")
    return cls(**values)


def _typed(value: Any, hint: Any, where: str) -> Any:
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    want = next(o for o in options if o is not type(None))
    if want is float and isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < _LARGEST:
        if value < 0:
            raise UserError(f"{where} is {value}: it cannot be negative")
        return float(value)
    if want is int and isinstance(value, int) and not isinstance(value, bool) and 0 < value < _LARGEST:
        return value
    if want is bool and isinstance(value, bool):
        return value
    if want is str and isinstance(value, str):
        return value
    if want == tuple[str, ...] and isinstance(value, list) and all(isinstance(v, str) for v in value):
        return tuple(value)
    if want == dict[str, str] and isinstance(value, dict) and all(isinstance(v, str) for v in value.values()):
        return value
    if dataclasses.is_dataclass(part := _of_many(want)) and isinstance(value, list):
        return tuple(_part(part, row, where, place) for place, row in enumerate(value, 1))
    if want == tuple[int, int] and isinstance(value, str):
        major, dot, minor = value.partition(".")
        if dot and major.isdigit() and minor.isdigit():
            return int(major), int(minor)
    raise UserError(f"{where} is {shown(repr(value))}: it must be {_SPOKEN.get(want, 'a list of tables')}")


def _of_many(hint: Any) -> Any:
    """What a tuple of any length is made of."""
    made_of = typing.get_args(hint)
    return made_of[0] if typing.get_origin(hint) is tuple and made_of[1:] == (...,) else None


def _part(cls: Any, row: Any, where: str, place: int) -> Any:
    if not isinstance(row, dict):
        raise UserError(f"{where} is {shown(repr(row))} at place {place}: it must be a table")
    return to_row(cls, row, f"{where} at place {place}", "entry")


_SPOKEN: dict[Any, str] = {
    float: "a number",
    int: "a whole number above 0",
    bool: "true or false",
    str: "a text in quotes",
    tuple[str, ...]: 'a list of texts, like ["/data"]',
    dict[str, str]: 'a table of texts, like { prompt = "question" }',
    tuple[int, int]: 'a version in quotes, like "8.9"',
}
