"""Reads the catalogue's TOML tables, merges the refreshed and the user's own file into them, and turns rows into
dataclasses."""

import dataclasses
import importlib
import os
import sys
import types
import typing
from collections.abc import Callable
from datetime import datetime, timezone
from functools import cache, lru_cache, wraps
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

from sojourn.config.messages import did_you_mean, printable
from sojourn.errors import UserError
from sojourn.expand_user import expand_user

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
_LARGEST = 10**15  # of a number; TOML also has inf, nan and integers of any size
KINDS = {  # each kind, and its plural: the name of our file; a user's file may use either
    "gpu": "gpus",
    "platform": "platforms",
    "price": "prices",
    "currency": "currencies",
    "model": "models",
    "dataset": "datasets",
}


def user_file() -> Path:
    """The user's own catalogue: the same tables as ours, merged into them by name.

    It is `catalog.toml` in SOJOURN_HOME if that file exists, else in the user's configuration folder.
    """
    home = os.environ.get("SOJOURN_HOME")
    if home and (there := expand_user(home) / "catalog.toml").is_file():
        return there
    return _user_folder() / "catalog.toml"


def refreshed_file() -> Path:
    """Rows that `sojourn catalog refresh` wrote: between ours and the user's, where they are newer than ours."""
    home = os.environ.get("SOJOURN_HOME")
    return (expand_user(home) if home else _user_folder()) / "catalog-refreshed.toml"


def _user_folder() -> Path:
    return _user_folder_of(os.environ.get("XDG_CONFIG_HOME"), os.environ.get("HOME"))


@cache
def _user_folder_of(*_: str | None) -> Path:
    """`_`: what decides it. A plan asks hundreds of times."""
    from platformdirs import user_config_dir

    return Path(user_config_dir("sojourn", appauthor=False))


def read_once(read: Callable[[Path | None], RowType]) -> Callable[..., RowType]:
    """Caches what is read from the catalogue until one of its files changes: a plan asks for every GPU."""

    @lru_cache(8)
    def read_version(user: Path | None, _: tuple[object, ...]) -> RowType:
        return read(user)

    @wraps(read)
    def cached(user: Path | None = None) -> RowType:
        return read_version(user, tuple(map(_version, (user or user_file(), refreshed_file()))))

    return cached


def _version(path: Path) -> tuple[str, int, int] | None:
    try:
        facts = path.stat()
    except OSError:
        return None
    return str(path), facts.st_mtime_ns, facts.st_size


@cache
def _packaged(kind: str) -> Table:
    text = resources.files("sojourn.catalog").joinpath(f"{KINDS[kind]}.toml").read_text(encoding="utf-8")
    table: Table = _toml.loads(text)[kind]
    return table


def _user_tables(path: Path) -> Table:
    try:
        return parse_tables(path.read_text(encoding="utf-8"), str(path))
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error})") from error


def parse_tables(text: str, path: str) -> Table:
    """The tables of a catalogue file by kind; `path` is for messages."""
    try:
        content: Table = _toml.loads(text)
    except (_toml.TOMLDecodeError, RecursionError) as error:
        raise UserError(f"{path}: not valid TOML: {error}") from error
    singular = {plural: kind for kind, plural in KINDS.items()}
    tables: Table = {}
    for word, table in content.items():
        kind = singular.get(word, word)
        if kind not in KINDS:
            raise UserError(f"{path}: unknown table [{word}]{did_you_mean(word, KINDS)}")
        if not isinstance(table, dict):
            raise UserError(f"{path}: {word} must be a table, like [{word}.NAME]")
        if kind in tables:
            raise UserError(f"{path}: [{kind}] and [{KINDS[kind]}] are the same table; keep one of them")
        tables[kind] = table
    return tables


def load_rows(kind: str, user: Path | None = None) -> dict[str, tuple[Table, str]]:
    """Every row of one kind by name, with the file it came from; the user's keys override ours."""
    ours = f"{KINDS[kind]}.toml"
    merged = {name: (dict(row), ours) for name, row in flat_rows(kind, _packaged(kind), ours).items()}
    when = date_key(kind)
    newer = refreshed_file()
    for name, row, base in _overrides(kind, merged, newer):
        if str(row.get(when, "")) >= str(base.get(when, "")):
            merged[name] = ({**base, **row}, str(newer))
    path = user or user_file()
    for name, row, base in _overrides(kind, merged, path):
        written = datetime.fromtimestamp(path.stat().st_mtime, timezone.utc).strftime("%Y-%m-%d")
        # A value from the user's file does not keep our source and date.
        merged[name] = ({**base, "source": str(path), when: written, **row, **_our_names(kind, base)}, str(path))
    return merged


def date_key(kind: str) -> str:
    return "month" if kind == "price" else "date"


def _overrides(
    kind: str, merged: dict[str, tuple[Table, str]], path: Path
) -> typing.Iterator[tuple[str, Table, Table]]:
    """Each row of a file: our spelling of its name, its keys, and those of our row that still hold."""
    spelled = {name_key(name): name for name in merged}
    for typed, row in flat_rows(kind, _user_tables(path).get(kind, {}), str(path)).items():
        name = spelled.get(name_key(typed), typed)
        base = merged.get(name, ({}, ""))[0]
        stale = {key for changed in (kind, *row) for key in _STALE.get(changed, ())}
        yield name, row, {key: value for key, value in base.items() if key not in stale}


def name_key(name: str) -> str:
    """Names that differ in case and spaces only are one."""
    return "".join(name.casefold().split())


def _our_names(kind: str, base: Table) -> Table:
    """A price keeps our spelling of its platform and GPU, so that rows still find each other by name."""
    return {key: base[key] for key in ("platform", "gpu") if key in base} if kind == "price" else {}


def flat_rows(kind: str, table: Table, where: str) -> dict[str, Table]:
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
    """One table as a frozen dataclass; an unknown, missing or wrongly typed key is a UserError that names it.

    By hand, since pydantic is no shorter here and its import makes finding the run folder take 220 ms instead of 95.
    """
    fields, hints = _schema(cls)  # type: ignore[arg-type]
    values: Table = {}
    for key, value in row.items():
        if key not in fields:
            raise UserError(f"{where}: unknown key `{key}`{did_you_mean(key, fields)}")
        values[key] = _checked(value, hints[key], f"{where}: `{key}`")
    for name, field in fields.items():
        if name not in values and field.default is field.default_factory is dataclasses.MISSING:
            raise UserError(f"{where}: `{name}` is missing; every {kind} needs it")
    return cls(**values)


@cache
def _schema(cls: type) -> tuple[dict[str, dataclasses.Field[Any]], dict[str, Any]]:
    """Fields and types by name. A catalogue has hundreds of rows; to evaluate the types of a class takes a while."""
    return {field.name: field for field in dataclasses.fields(cls)}, typing.get_type_hints(cls)


def _checked(value: Any, hint: Any, where: str) -> Any:
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    expected = next(o for o in options if o is not type(None))
    if expected is float and isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < _LARGEST:
        if value < 0:
            raise UserError(f"{where} is {value}: it cannot be negative")
        return float(value)
    if expected is int and isinstance(value, int) and not isinstance(value, bool) and 0 < value < _LARGEST:
        return value
    if expected is bool and isinstance(value, bool):
        return value
    if expected is str and isinstance(value, str):
        return value
    if expected == tuple[str, ...] and isinstance(value, list) and all(isinstance(v, str) for v in value):
        return tuple(value)
    if expected == dict[str, str] and isinstance(value, dict) and all(isinstance(v, str) for v in value.values()):
        return value
    if dataclasses.is_dataclass(part := _element_type(expected)) and isinstance(value, list):
        return tuple(_nested(part, row, where.removesuffix("`") + f"[{index}]`") for index, row in enumerate(value))
    if expected == tuple[int, int] and isinstance(value, str):
        major, dot, minor = value.partition(".")
        if dot and major.isdigit() and minor.isdigit():
            return int(major), int(minor)
    raise UserError(
        f"{where} is {printable(repr(value))}: it must be {_DESCRIPTIONS.get(expected, 'a list of tables')}"
    )


def _element_type(hint: Any) -> Any:
    """`T` of `tuple[T, ...]`."""
    arguments = typing.get_args(hint)
    return arguments[0] if typing.get_origin(hint) is tuple and arguments[1:] == (...,) else None


def _nested(cls: Any, row: Any, where: str) -> Any:
    if not isinstance(row, dict):
        raise UserError(f"{where} is {printable(repr(row))}: it must be a table")
    return to_row(cls, row, where, "entry")


_DESCRIPTIONS: dict[Any, str] = {
    float: "a number",
    int: "a whole number above 0",
    bool: "true or false",
    str: "a text in quotes",
    tuple[str, ...]: 'a list of texts, like ["/data"]',
    dict[str, str]: 'a table of texts, like { prompt = "question" }',
    tuple[int, int]: 'a version in quotes, like "8.9"',
}
