"""Formats a pydantic error as one line: file and line, key, given value, allowed values."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from sojourn.config.fields import Description
from sojourn.config.keys import suggest_key
from sojourn.config.messages import printable
from sojourn.config.quantities import Count, Duration, Money, Size
from sojourn.config.renamed import KeyPath
from sojourn.config.schema import RunConfig

_BOUNDS = {"ge": "from", "gt": "above", "le": "up to", "lt": "below"}


def describe_error(error: ValidationError, where: Callable[..., str]) -> str:
    """The first problem in one line, and the keys of the others."""
    problems: dict[KeyPath, tuple[tuple[KeyPath, ...], str]] = {}
    for item in error.errors(include_url=False):
        keys, message = _describe_item(item)
        problems.setdefault(keys[0], (keys, message))
    (keys, message), *_ = problems.values()
    others = [dotted(key) for key in problems][1:]
    more = f" (also wrong: {', '.join(others[:4])}{' and more' if len(others) > 4 else ''})" if others else ""
    return f"{where(*keys)}: {dotted(keys[0])}: {message}{more}"


def dotted(key: KeyPath) -> str:
    return ".".join(printable(part) or "“”" for part in key)


def describe_value(value: Any) -> str:
    """A value as the user wrote it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int) and abs(value) >= 10**60:
        return "a number of more than 60 digits"
    if isinstance(value, dict):
        return f"keys below it ({', '.join(printable(key, 20) for key in list(value)[:3])})" if value else "{}"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    return (
        "nothing (null)" if value is None else f"“{printable(value)}”" if isinstance(value, str) else printable(value)
    )


def _describe_item(item: Any) -> tuple[tuple[KeyPath, ...], str]:
    path, annotation, notes = locate(item["loc"])
    value = item["input"]
    if item["type"] == "extra_forbidden":
        return (path,), "no such key" + suggest_key(path, _section(annotation).model_fields)
    if item["type"] == "conflict":
        context = item["ctx"]
        return tuple((*path, *key.split(".")) for key in context["keys"]), context["message"]
    if item["type"] == "missing":
        return (path,), f"not given; add it: {describe_type(annotation, notes)}"
    section = _section(annotation)
    if section is annotation:
        names = ", ".join(section.model_fields)
        if value is None:
            return (path,), f"nothing below it; remove the line, or indent some of its keys below: {names}"
        return (path,), f"{describe_value(value)} given; allowed: its keys, indented below it: {names}"
    hint = ""
    if isinstance(value, str) and len(value) < 30 and _is_number(value) and _takes_number(annotation):
        hint = " (remove the quotes)"
    if isinstance(value, (bool, int, float)) and takes_text_only(annotation):
        hint = " (put it in quotes)"
    return (path,), f"{describe_value(value)} given{hint}; allowed: {describe_type(annotation, notes)}"


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def locate(loc: tuple[Any, ...]) -> tuple[KeyPath, Any, tuple[Any, ...]]:
    """The key path of an error (without pydantic's union branches), the field's type, and its metadata."""
    annotation: Any = RunConfig
    notes: tuple[Any, ...] = ()
    path: KeyPath = ()
    for part in loc:
        inner = _field_type(annotation, part)
        if inner is None:
            if isinstance(part, str) and isinstance(annotation, type) and issubclass(annotation, BaseModel):
                path = (*path, part)
            break
        path, (annotation, notes) = (*path, str(part)), inner
    return path, annotation, notes


def _field_type(annotation: Any, part: Any) -> tuple[Any, tuple[Any, ...]] | None:
    for option in _options(annotation):
        if isinstance(option, type) and issubclass(option, BaseModel) and part in option.model_fields:
            field = option.model_fields[part]
            return field.annotation, tuple(field.metadata)
        if get_origin(option) is list and isinstance(part, int):
            return get_args(option)[0], ()
    return None


def _section(annotation: Any) -> type[BaseModel]:
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else RunConfig


def _options(annotation: Any) -> list[Any]:
    if get_origin(annotation) is Annotated:
        return _options(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return [option for part in get_args(annotation) for option in _options(part)]
    return [annotation]


def _takes_number(annotation: Any) -> bool:
    return any(option in (int, float) for option in _options(annotation))


def takes_text_only(annotation: Any) -> bool:
    """Whether `2024`, given for such a field, is text and not a number."""
    return all(option in (str, type(None)) or get_origin(option) is list for option in _options(annotation))


def describe_type(annotation: Any, notes: tuple[Any, ...] = ()) -> str:
    """The allowed values of a field of this type, in words."""
    origin, args = get_origin(annotation), get_args(annotation)
    for note in notes:
        if isinstance(note, Description):
            return note.text
    if origin is Annotated:
        return describe_type(args[0], (*notes, *args[1:]))
    if origin in (Union, types.UnionType):
        words = [describe_type(part, notes) for part in args if part is not type(None)]
        return ", or ".join([*words, "null"] if type(None) in args else words)
    if origin is Literal:
        return " or ".join(str(value) for value in args)
    if annotation in (Duration, Size, Count, Money):
        bounds = _bounds(notes)
        return f"{annotation.allowed}{',' if bounds else ''}{bounds}"
    if annotation in (int, float):
        return ("a whole number" if annotation is int else "a number") + _bounds(notes)
    return "true or false" if annotation is bool else "text"


def _bounds(notes: tuple[Any, ...]) -> str:
    limits = [limit for note in notes for limit in getattr(note, "metadata", [note])]
    words = [
        f" {word} {getattr(limit, name):{',' if isinstance(getattr(limit, name), int) else 'g'}}"
        for name, word in _BOUNDS.items()
        for limit in limits
        if getattr(limit, name, None) is not None
    ]
    return "".join(words)
