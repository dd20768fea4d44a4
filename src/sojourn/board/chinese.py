"""Messages in Chinese, for pages in Chinese.

Messages are written in English where they arise, as f-strings, and recorded so in a run's files. `zh/` has a catalogue
for each package: the template of a message, its values as {0}, {1}, …, and beside it the Chinese one. A message is
matched with the templates, and its values, which may be messages themselves, are translated in turn. What no template
matches stays English, as do keys, commands, paths and names.
"""

from __future__ import annotations

import functools
import json
import operator
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, cast

_Values = TypeVar("_Values")

_CATALOGUES = Path(__file__).with_name("zh")
_PLACEHOLDER = re.compile(r"\{(\d+)\}")
_WORD = re.compile(
    r"(?<![\w./=:@$“`'\"-])[A-Za-z]?[a-z]+(?![\w./=@_-]*[\w/=@_])"
)  # of prose: not of a path, a key or a name
_JOINS = {"{0}; {1}": "{0}；{1}", "{0}: {1}": "{0}：{1}", "{0}, {1}": "{0}，{1}", "{0}. {1}": "{0}。{1}",
          "{0} ({1})": "{0}（{1}）"}  # fmt: skip
_JOINED = re.compile(r"[;:,.] | \(")
_HINT = re.compile(r"; | \(|, ")
_SEPARATOR = " · "  # of facts in a line
_ANY_WORD = re.compile(r"[A-Za-z]+")
_WHOLE_WORD = re.compile(r"(?<![A-Za-z}])[A-Za-z]+(?![A-Za-z{])")  # not a part of one, beside a placeholder
_EXAMPLE = re.compile(r"\s+\S+:\d+ .*‹")  # of the data, as `prepare` prints it
_MOST_CANDIDATES = 12
_LEAST_WEIGHT = 5  # characters of a template without which a text is not taken for a message
_FUNCTION_WORDS = {"a", "an", "and", "at", "by", "for", "from", "in", "is", "it", "of", "on", "or", "the", "to", "with"}
_SENTENCE, _ENOUGH_WORDS = 12, 4  # characters of a template, words of several: the rest may be a list of names
_MOST_CHARACTERS, _MOST_PARTS = 1000, 60  # of a line; longer ones are data
_HAN = "\u3400-\u9fff\uf900-\ufaff"
_CLOSE = "，、。；：！？（）“”《》"
_BOTH_HAN = re.compile(f"[{_HAN}]{{2}}")
_MIXED = re.compile(f"[{_HAN}][A-Za-z0-9]|[A-Za-z0-9%][{_HAN}]")


@dataclass(frozen=True)
class _Template:
    """`literals`: the English text around the placeholders; the first and the last are empty where one is at an end.
    `words`: those that a text must have."""

    literals: tuple[str, ...]
    chinese: str
    weight: int
    words: frozenset[str]

    def find(self, text: str) -> tuple[int, list[str], int] | None:
        """Where it begins in the text, its values, and where it ends."""
        first, *others = self.literals
        if not others and " " not in first and text.strip() != first:
            return None  # a single word is translated alone only
        start = text.find(first)
        while start > 0 and first[0].isalnum() and text[start - 1].isalnum():
            start = text.find(first, start + 1)
        if start < 0 or (not others and not self._ends(text, start + len(first))):
            return None
        at, values = start + len(first), list[str]()
        for i, literal in enumerate(others):
            is_last = i == len(others) - 1
            if literal or is_last:
                following = text.find(literal, at) if literal else len(text)
            else:  # of two values side by side the second begins as a hint does, or is empty
                end = text.find(others[i + 1], at) if others[i + 1] else len(text)
                hint = _HINT.search(text, at, max(at, end))
                following = hint.start() if hint else end
            if following < 0:
                return None
            values.append(text[at:following])
            at = following + len(literal)
        return (start, values, at) if self._ends(text, at) else None

    def _ends(self, text: str, at: int) -> bool:
        last = self.literals[-1]
        return not (last and last[-1].isalnum() and at < len(text) and text[at].isalnum())


def _template(english: str, chinese: str) -> _Template:
    literals = tuple(_PLACEHOLDER.split(english)[::2])
    words = frozenset(_WHOLE_WORD.findall("{}".join(literals)))
    return _Template(literals, chinese, sum(map(len, literals)), words)


def _facts_of(english: str, chinese: str) -> list[tuple[str, str]]:
    """The parts of a template that a separator divides: a line may have some of them."""
    pairs = zip(english.split(_SEPARATOR), chinese.split(_SEPARATOR), strict=True)
    return [(_renumbered(one, one), _renumbered(other, one)) for one, other in pairs if one]


def _renumbered(text: str, english: str) -> str:
    """With {0} for the first value of `english`, and so on."""
    numbers = {number: f"{{{i}}}" for i, number in enumerate(_PLACEHOLDER.findall(english))}
    return _PLACEHOLDER.sub(lambda found: numbers[found[1]], text)


@functools.cache
def catalogues() -> dict[str, dict[str, str]]:
    """By package."""
    files = sorted(_CATALOGUES.glob("*.json"))
    return {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in files}


@functools.cache
def _templates() -> dict[str, list[tuple[int, _Template]]]:
    """By the rarest of their words, and in order: the longest first."""
    found = {english: chinese for one in catalogues().values() for english, chinese in one.items()}
    facts = [fact for one in found.items() for fact in _facts_of(*one)]
    made = sorted((_template(*one) for one in dict(facts).items()), key=lambda one: (-one.weight, len(one.literals)))
    common = Counter(word for one in made for word in one.words)
    by_word: dict[str, list[tuple[int, _Template]]] = {}
    for i, one in enumerate(made):
        by_word.setdefault(min(one.words, key=lambda word: (common[word], word), default=""), []).append((i, one))
    return by_word


@functools.lru_cache(maxsize=256)
def _candidates(text: str) -> list[_Template]:
    by_word, words = _templates(), {*_ANY_WORD.findall(text), ""}
    found = [entry for word in words & by_word.keys() for entry in by_word[word] if entry[1].words <= words]
    found.sort(key=_place)
    return [one for _, one in found] + _joins


_place = operator.itemgetter(0)


_joins = [_template(*one) for one in _JOINS.items()]


@functools.lru_cache(maxsize=16384)
def _best(text: str) -> tuple[int, int, str]:
    """The number of English words that are left, how many values hold several parts of a sentence, and the
    translation with the fewest of both."""
    left, coarse, found = len(_WORD.findall(text)), 0, text
    if not any(character.isalpha() for character in text):
        return 0, 0, text
    candidates = 0
    for template in _candidates(text):
        is_join = template.weight <= 2
        if candidates >= _MOST_CANDIDATES and not is_join:
            continue
        if (match := template.find(text)) is None or (is_join and not all(map(str.strip, match[1]))):
            continue
        candidates += 1
        start, values, end = match
        given = (*values, text[:start], text[end:])
        parts = [_best(value) for value in given]
        if is_join and all(one == value for (_, _, one), value in zip(parts, given, strict=True)):
            continue
        words = sum(one for one, _, _ in parts)
        joined = sum(one for _, one, _ in parts)
        if not is_join:
            joined += sum(1 for value in values if _JOINED.search(value.strip())) + bool(text[:start] or text[end:])
        if (words, joined) < (left, coarse if found != text else len(text)):
            *filled, before, after = (one for _, _, one in parts)
            left, coarse, found = words, joined, _joined(before, _filled(template.chinese, filled), after)
        if (left, coarse) == (0, 0) and found != text:
            break
    return left, coarse, found


def _filled(chinese: str, values: list[str]) -> str:
    parts = _PLACEHOLDER.split(chinese)
    return _joined(*(values[int(part)] if i % 2 else part for i, part in enumerate(parts)))


def _joined(*parts: str) -> str:
    """Without a space between two Chinese characters or beside Chinese punctuation."""
    found = ""
    for part in parts:
        ours, theirs = found.rstrip(" "), part.lstrip(" ")
        if not ours or not theirs:
            found += part
        elif (ours, theirs) == (found, part):
            found += f" {part}" if _MIXED.match(ours[-1] + theirs[0]) else part
        else:
            is_close = ours[-1] in _CLOSE or theirs[0] in _CLOSE or _BOTH_HAN.match(ours[-1] + theirs[0])
            found = ours + theirs if is_close else found + part
    return found


@functools.lru_cache(maxsize=4096)
def _fact(text: str) -> str:
    matches = [(one.weight, one.find(text)) for one in _candidates(text) if one.weight >= _LEAST_WEIGHT]
    found = [(weight, match) for weight, match in matches if match is not None]
    if not found:
        return text
    is_whole = any(weight >= _SENTENCE and match[::2] == (0, len(text)) for weight, match in found)
    (left, _, chinese), words = _best(text), len(_WORD.findall(text))
    is_ours = is_whole or left * 2 <= words or _content_words(text) - _content_words(chinese) >= _ENOUGH_WORDS
    return chinese if is_ours else text


def _content_words(text: str) -> int:
    return sum(1 for word in _WORD.findall(text) if word not in _FUNCTION_WORDS)


def _line(text: str) -> str:
    if len(text) > _MOST_CHARACTERS or len(_JOINED.findall(text)) > _MOST_PARTS or _EXAMPLE.match(text):
        return text
    return _SEPARATOR.join(map(_fact, text.split(_SEPARATOR)))


def in_chinese(message: str) -> str:
    """Line by line; a line of which most would stay English is left as it is."""
    return "\n".join(_line(line) for line in message.split("\n"))


def localized(message: str, language: str) -> str:
    """`language`: as in the header Accept-Language."""
    return in_chinese(message) if language.lower().startswith("zh") else message


def localized_values(values: _Values, keys: frozenset[str], language: str) -> _Values:
    """The texts below these keys, at any depth, in the language; everything else as it is."""
    if not language.lower().startswith("zh"):
        return values
    return cast("_Values", _localized(values, keys, False))


def _localized(values: object, keys: frozenset[str], is_chosen: bool) -> object:
    if isinstance(values, dict):
        return {key: _localized(value, keys, is_chosen or key in keys) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return [_localized(value, keys, is_chosen) for value in values]
    return in_chinese(values) if is_chosen and isinstance(values, str) else values
