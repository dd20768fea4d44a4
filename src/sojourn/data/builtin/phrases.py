"""The prose that built-in data is made of, read from `en/*.toml` and `zh/*.toml`, and how templates are filled in."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import resources
from typing import Any, Literal

from sojourn.data.builtin.stable_random import StableRandom

_toml: Any = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")

Language = Literal["en", "zh"]
LANGUAGES: tuple[Language, ...] = ("en", "zh")
SENTENCE_GAP = {"en": " ", "zh": ""}

Sentence = tuple[str, ...]  # its variants
Template = tuple[Sentence, ...]


@cache
def words(language: Language) -> dict[str, tuple[str, ...]]:
    """The word lists of `words.toml`."""
    lists = {key: tuple(value.split()) for key, value in _read(language, "words").items()}
    return lists if "names" in lists else {**lists, "names": lists["girls"] + lists["boys"]}


@cache
def phrases(language: Language, name: str) -> dict[str, Any]:
    """The contents of one file, with its `[templates]` parsed."""
    contents = _read(language, name)
    templates = contents.pop("templates", {})
    shared = {key: _parse_template(text, {})[0] for key, text in templates.pop("shared", {}).items()}
    for key, value in templates.items():
        many = isinstance(value, list)
        contents[key] = (
            tuple(_parse_template(text, shared) for text in value) if many else _parse_template(value, shared)
        )
    return contents


def _read(language: Language, name: str) -> dict[str, Any]:
    file = resources.files("sojourn.data.builtin").joinpath(f"{language}/{name}.toml")
    contents: dict[str, Any] = _toml.loads(file.read_text(encoding="utf-8"))
    return contents


def _parse_template(text: str, shared: Mapping[str, Sentence]) -> Template:
    blocks = text.strip().split("\n\n")
    return tuple(shared[block[1:]] if block[0] == "@" else _parse_sentence(block) for block in blocks)


def _parse_sentence(block: str) -> Sentence:
    return tuple("" if line == "-" else line.replace(" / ", "\n") for line in block.splitlines())


def fill(random: StableRandom, template: Iterable[Sentence], facts: Mapping[str, object], gap: str) -> str:
    """One variant of each sentence, capitalised, with the facts filled in."""
    known = _FactsWithArticles(facts)
    sentences = []
    for variants in template:
        variant = random.choice(variants)
        if variant:
            sentence = variant.format_map(known)
            sentences.append(sentence[0].upper() + sentence[1:])
    return gap.join(sentences)


class _FactsWithArticles(dict[str, object]):
    """`a_thing` is the fact `thing` with `a` or `an`."""

    def __missing__(self, key: str) -> str:
        if not key.startswith("a_"):
            raise KeyError(key)
        word = str(self[key.removeprefix("a_")])
        return f"an {word}" if word[0] in "aeiou" else f"a {word}"


def join_list(items: list[str], language: Language) -> str:
    """Items as an enumeration: `flour, salt and water`."""
    if language == "zh":
        return "、".join(items)
    return " and ".join((", ".join(items[:-1]), items[-1])) if len(items) > 1 else items[0]
