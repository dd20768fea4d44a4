"""All configuration keys, and suggestions for unknown ones."""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import BaseModel

from sojourn.config.messages import ask_if_meant, closest_match, normalize
from sojourn.config.other_trainers import meant_setting
from sojourn.config.renamed import KeyPath
from sojourn.config.schema import RunConfig


def all_keys(section: type[BaseModel] = RunConfig, at: KeyPath = ()) -> list[KeyPath]:
    """Every key, each section before its own keys."""
    keys: list[KeyPath] = []
    for name, field in section.model_fields.items():
        keys.append((*at, name))
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            keys.extend(all_keys(inner, (*at, name)))
    return keys


def suggest_key(path: KeyPath, siblings: Iterable[str]) -> str:
    """For an unknown key: the likely one, else the allowed ones."""
    word, siblings, keys = normalize(path[-1]), list(siblings), all_keys()
    beside = ".".join(path[:-1])
    if word == "extends":
        return "; extends goes at the top of a YAML file and names a preset or another file"
    if tuple(path[-1].split(".")) in keys and "." in path[-1]:
        section, _, key = path[-1].partition(".")
        return f"; write it in two lines: {section}: and, indented below, {key}: …"
    related = [name for name in siblings if name.startswith(f"{word}_") or name.endswith(f"_{word}")]
    near = closest_match(word, siblings, 0.8) or next(iter(related), None)
    if near:
        return ask_if_meant(f"{beside}.{near}" if beside else near)
    same = [".".join(key) for key in keys if key[-1] == word]
    meant = next(iter(same), None) or meant_setting(word)
    if meant:
        return ask_if_meant(meant)
    near = closest_match(word, siblings)
    if near:
        return ask_if_meant(f"{beside}.{near}" if beside else near)
    far = closest_match(word, [key[-1] for key in keys], 0.8)
    if far:
        return ask_if_meant(".".join(next(key for key in keys if key[-1] == far)))
    return f"; allowed: {', '.join(siblings)}"
