"""Reads the catalogue's TOML tables, merges the user's own file into them, and turns rows into dataclasses."""

import dataclasses
import importlib
import os
import sys
from datetime import datetime, timezone
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import PydanticCustomError

from sojourn.config.words import closest, shown
from sojourn.errors import UserError

# tomllib came with 3.11; before that it is the tomli package, which has the same functions.
_toml: Any = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")

# When a user's row has this key (or is of this kind), these keys of our row no longer hold.
_STALE = {
    "model": ("published",),
    "memory_gib": ("usable_gib",),
    "per_hour": ("cny_per_hour",),
    "cny_per_hour": ("per_hour", "currency"),
}

RowType = TypeVar("RowType")
Table = dict[str, Any]
KINDS = {  # each kind, and its plural: the name of our file; a user's file may use either
    "gpu": "gpus",
    "platform": "platforms",
    "price": "prices",
    "currency": "currencies",
    "model": "models",
    "dataset": "datasets",
}


def _version(value: Any) -> tuple[int, int]:
    major, _, minor = value.partition(".") if isinstance(value, str) else ("", "", "")
    if not (major.isdigit() and minor.isdigit()):
        raise PydanticCustomError("version", "{expected}", {"expected": 'a version in quotes, like "8.9"'})
    return int(major), int(minor)


Number = Annotated[float, Field(strict=True, ge=0, lt=1e15, allow_inf_nan=False)]
Whole = Annotated[int, Field(strict=True, gt=0, lt=10**15)]
Flag = Annotated[bool, Field(strict=True)]
Version = Annotated[tuple[int, int], BeforeValidator(_version)]


class Row:
    """The base of every kind of row."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")


def user_file() -> Path:
    """The user's own catalogue: the same tables as ours, merged into them by name.

    It is `catalog.toml` in SOJOURN_HOME if that file exists, else in the user's configuration folder.
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


def _user_tables(path: Path) -> Table:
    try:
        content: Table = _toml.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error})") from error
    except _toml.TOMLDecodeError as error:
        raise UserError(f"{path}: not valid TOML: {error}") from error
    singular = {plural: kind for kind, plural in KINDS.items()}
    tables: Table = {}
    for word, table in content.items():
        kind = singular.get(word, word)
        if kind not in KINDS:
            raise UserError(f"{path}: unknown table [{word}]{closest(word, KINDS)}")
        if not isinstance(table, dict):
            raise UserError(f"{path}: {word} must be a table, like [{word}.NAME]")
        if kind in tables:
            raise UserError(f"{path}: [{kind}] and [{KINDS[kind]}] are the same table; keep one of them")
        tables[kind] = table
    return tables


def load_rows(kind: str, user: Path | None = None) -> dict[str, tuple[Table, str]]:
    """Every row of one kind by name, with the file it came from; the user's keys override ours."""
    ours = f"{KINDS[kind]}.toml"
    merged = {name: (dict(row), ours) for name, row in _flat(kind, _packaged(kind), ours).items()}
    path = user or user_file()
    own = _user_tables(path).get(kind, {})
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
        # A value from the user's file does not keep our source and date.
        merged[name] = ({**base, "source": str(path), when: written, **row, **_our_names(kind, base)}, str(path))
    return merged


def _key(name: str) -> str:
    return "".join(name.casefold().split())


def _our_names(kind: str, base: Table) -> Table:
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


def to_row(cls: type[RowType], row: Table, where: str, kind: str) -> RowType:
    """One table as a frozen dataclass; an unknown, missing or wrongly typed key is a UserError that names it."""
    try:
        found: RowType = _validator(cls).validate_python(row)  # type: ignore[arg-type]
        return found
    except ValidationError as error:
        raise UserError(f"{where}: {_describe(error, cls, kind)}") from None


@cache
def _validator(cls: Any) -> TypeAdapter[Any]:
    return TypeAdapter(cls)


_EXPECTED = {
    "float_type": "a number",
    "finite_number": "a number",
    "less_than": "a smaller number",
    "int_type": "a whole number above 0",
    "greater_than": "a whole number above 0",
    "bool_type": "true or false",
    "string_type": "a text in quotes",
    "tuple_type": "a list",
    "dict_type": 'a table of texts, like { prompt = "question" }',
    "dataclass_type": "a table",
}


def _describe(error: ValidationError, cls: type, kind: str) -> str:
    """The first problem in one line."""
    item = error.errors(include_url=False)[0]
    path, reason = item["loc"], item["type"]
    key = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")
    if reason == "unexpected_keyword_argument":
        known = [field.name for field in dataclasses.fields(cls)] if len(path) == 1 else []
        return f"unknown key `{key}`{closest(str(path[-1]), known)}"
    if reason == "missing":
        return f"`{key}` is missing; every {kind} needs it"
    given = f"`{key}` is {shown(repr(item['input']))}"
    if reason == "greater_than_equal":
        return f"{given}: it cannot be negative"
    return f"{given}: it must be {_EXPECTED.get(reason) or item['ctx']['expected']}"
