"""Turns a validation error into one line: where, which key, what was given, what is allowed."""

from __future__ import annotations

import difflib
import types
from collections.abc import Callable, Iterable
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, ValidationError

from sojourn.config.quantities import Count, Duration, Money, Size
from sojourn.config.schema import RunConfig

KeyPath = tuple[str, ...]


def explain(error: ValidationError, where: Callable[[KeyPath], str]) -> str:
    """One line for the first problem, and the keys of the others."""
    problems: dict[KeyPath, str] = {}
    for item in error.errors(include_url=False):
        key, message = _problem(item)
        problems.setdefault(key, message)
    (first, message), *others = problems.items()
    more = f" (also wrong: {', '.join('.'.join(key) for key, _ in others[:5])})" if others else ""
    return f"{where(first)}: {'.'.join(first)}: {message}{more}"


def given(value: Any) -> str:
    """A value as the user would recognise it, on one line and short."""
    try:
        text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    except ValueError:  # an integer of thousands of digits
        text = "a number of thousands of digits"
    text = " ".join("".join(c if c.isprintable() else "?" for c in text).split())
    text = text if len(text) <= 60 else text[:57] + "…"
    return f"“{text}”" if isinstance(value, str) else text


def closest(word: str, known: Iterable[str]) -> str:
    """`; did you mean X?`, or nothing."""
    found = difflib.get_close_matches(word.lower().replace("-", "_"), list(known), n=1, cutoff=0.6)
    return f"; did you mean {found[0]}?" if found else ""


def _problem(item: Any) -> tuple[KeyPath, str]:
    path, annotation = _locate(item["loc"])
    if item["type"] == "extra_forbidden":
        return path, "no such key" + _suggest(path)
    if item["type"] == "clash":
        context = item["ctx"]
        return (*path, *context["key"].split(".")), context["message"]
    return path, f"{given(item['input'])} given; allowed: {allowed(annotation)}"


def _locate(loc: tuple[Any, ...]) -> tuple[KeyPath, Any]:
    """The key path of an error, without the branches of unions that pydantic adds, and the type that stands there."""
    annotation: Any = RunConfig
    path: KeyPath = ()
    for part in loc:
        inner = _inside(annotation, part)
        if inner is None:
            if isinstance(annotation, type) and issubclass(annotation, BaseModel) and isinstance(part, str):
                path = (*path, part)
            break
        path, annotation = (*path, str(part)), inner
    return path, annotation


def _inside(annotation: Any, part: Any) -> Any:
    for option in _options(annotation):
        if isinstance(option, type) and issubclass(option, BaseModel) and part in option.model_fields:
            field = option.model_fields[part]
            return Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation  # type: ignore[return-value]
        if get_origin(option) is list and isinstance(part, int):
            return get_args(option)[0]
    return None


def _options(annotation: Any) -> list[Any]:
    if get_origin(annotation) is Annotated:
        return _options(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return [option for part in get_args(annotation) for option in _options(part)]
    return [annotation]


def allowed(annotation: Any, bounds: tuple[Any, ...] = ()) -> str:
    """What may be written for a field of this type, in words."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return allowed(args[0], (*bounds, *args[1:]))
    if origin in (Union, types.UnionType):
        words = [allowed(part, bounds) for part in args if part is not type(None)]
        return " or ".join([*words, "null"] if type(None) in args else words)
    if origin is Literal:
        return " or ".join(str(value) for value in args)
    if origin is list:
        return f"a list, each {allowed(args[0])}"
    if annotation in (Duration, Size, Count, Money):
        return str(annotation.allowed)
    if annotation is bool:
        return "true or false"
    if annotation in (int, float):
        return ("a whole number" if annotation is int else "a number") + _range(bounds)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "keys " + ", ".join(annotation.model_fields)
    return "a name of letters, digits, -, _ and ." if any(hasattr(b, "pattern") and b.pattern for b in bounds) else "text"


def _range(metadata: tuple[Any, ...]) -> str:
    limits = [limit for item in metadata for limit in getattr(item, "metadata", [item])]
    words = []
    for limit in limits:
        for kind, name, word in ((Ge, "ge", "from"), (Gt, "gt", "above"), (Le, "le", "up to"), (Lt, "lt", "below")):
            if isinstance(limit, kind):
                words.append(f"{word} {getattr(limit, name):,}".replace(",", "") if kind in (Ge, Gt) else
                             f"{word} {getattr(limit, name)}")
    return " " + " ".join(words) if words else ""


def every_key(section: type[BaseModel] = RunConfig, at: KeyPath = ()) -> list[KeyPath]:
    """All the keys there are, sections first."""
    keys: list[KeyPath] = []
    for name, field in section.model_fields.items():
        keys.append((*at, name))
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            keys.extend(every_key(inner, (*at, name)))
    return keys


def _suggest(path: KeyPath) -> str:
    keys = every_key()
    siblings = {key[-1] for key in keys if key[:-1] == path[:-1]}
    if path[:-2] == ("data", "sources"):
        siblings = {"path", "weight", "take", "size"}
    near = closest(path[-1], siblings)
    if near:
        return near
    elsewhere = [key for key in keys if key[-1] == path[-1].lower().replace("-", "_")]
    if elsewhere:
        return f"; did you mean {'.'.join(elsewhere[0])}?"
    far = difflib.get_close_matches(path[-1].lower(), [key[-1] for key in keys], n=1, cutoff=0.75)
    if far:
        return f"; did you mean {'.'.join(next(key for key in keys if key[-1] == far[0]))}?"
    return f"; allowed: {', '.join(sorted(siblings))}"
