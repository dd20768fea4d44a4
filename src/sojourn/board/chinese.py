"""Messages in Chinese, for pages in Chinese.

Messages are written in English where they arise, as f-strings, and recorded so in a run's files. `zh/` has a catalogue
for each package: the template of a message, its values as {0}, {1}, …, and beside it the Chinese one. A message is
matched with the templates, and its values, which may be messages themselves, are translated in turn. What no template
matches stays English, as do keys, commands, paths and names.
"""

from __future__ import annotations

import functools
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_CATALOGUES = Path(__file__).with_name("zh")
_PLACEHOLDER = re.compile(r"\{(\d+)\}")
_WORD = re.compile(r"(?<![\w./=:@$“`'\"-])[A-Za-z]?[a-z]+(?![\w./=@_-]*[\w/=@_])")  # of prose: not of a path, a key or a name
_JOINS = {"{0}; {1}": "{0}；{1}", "{0}: {1}": "{0}：{1}", "{0}, {1}": "{0}，{1}", "{0}. {1}": "{0}。{1}",
          "{0} ({1})": "{0}（{1}）"}  # fmt: skip
_MOST_CANDIDATES = 12
_MOST_CHARACTERS = 2000  # of a line; longer ones are data
_HAN = "\u2e80-\u9fff\uf900-\ufaff"
_CLOSE = "，。；：！？、（）“”《》"


@dataclass(frozen=True)
class _Template:
    """`literals`: the English text around the placeholders; the first and the last are empty where one is at an end."""

    literals: tuple[str, ...]
    chinese: str
    weight: int
    key: str  # the longest literal

    def find(self, text: str) -> tuple[int, list[str], int] | None:
        """Where it begins in the text, its values, and where it ends."""
        first, *others = self.literals
        start = text.find(first)
        while start > 0 and first[0].isalnum() and text[start - 1].isalnum():
            start = text.find(first, start + 1)
        if start < 0 or (not others and not self._ends(text, start + len(first))):
            return None
        at, values = start + len(first), list[str]()
        for i, literal in enumerate(others):
            is_last = i == len(others) - 1
            following = len(text) if is_last and not literal else text.find(literal, at)
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
    return _Template(literals, chinese, sum(map(len, literals)), max(literals, key=len))


@functools.cache
def catalogues() -> dict[str, dict[str, str]]:
    """By package."""
    files = sorted(_CATALOGUES.glob("*.json"))
    return {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in files}


@functools.cache
def _templates() -> list[_Template]:
    """The longest first."""
    found = {english: chinese for one in catalogues().values() for english, chinese in one.items()}
    return sorted((_template(*one) for one in (found | _JOINS).items()), key=lambda one: -one.weight)


@functools.lru_cache(maxsize=16384)
def _best(text: str) -> tuple[int, str]:
    """The number of English words that are left, and the translation."""
    left, found = len(_WORD.findall(text)), text
    if not any(character.isalpha() for character in text):
        return 0, text
    candidates = 0
    for template in _templates():
        if template.key not in text or (match := template.find(text)) is None:
            continue
        if template.weight <= 2 and not all(map(str.strip, match[1])):
            continue
        start, values, end = match
        parts = [_best(value) for value in (*values, text[:start], text[end:])]
        if (words := sum(one for one, _ in parts)) < left:
            *filled, before, after = (one for _, one in parts)
            left, found = words, _joined(before, _filled(template.chinese, filled), after)
        candidates += 1
        if left == 0 or candidates == _MOST_CANDIDATES:
            break
    return left, found


def _filled(chinese: str, values: list[str]) -> str:
    parts = _PLACEHOLDER.split(chinese)
    return _joined(*(values[int(part)] if i % 2 else part for i, part in enumerate(parts)))


def _joined(*parts: str) -> str:
    """Without a space between two Chinese characters or beside Chinese punctuation."""
    found = ""
    for part in parts:
        ours, theirs = found.rstrip(" "), part.lstrip(" ")
        if ours and theirs and (len(ours) < len(found) or len(theirs) < len(part)):
            both = re.match(f"[{_HAN}{_CLOSE}]", ours[-1]) and re.match(f"[{_HAN}{_CLOSE}]", theirs[0])
            if both or ours[-1] in _CLOSE or theirs[0] in _CLOSE:
                found, part = ours, theirs
        elif ours and theirs and re.match(f"[{_HAN}]", ours[-1] + "") and re.match(r"[A-Za-z0-9]", theirs[0]):
            found += " "
        found += part
    return found


@functools.lru_cache(maxsize=4096)
def _line(text: str) -> str:
    if len(text) > _MOST_CHARACTERS:
        return text
    left, found = _best(text)
    return found if left * 2 <= len(_WORD.findall(text)) else text


def in_chinese(message: str) -> str:
    """Line by line; a line of which most would stay English is left as it is."""
    return "\n".join(_line(line) for line in message.split("\n"))


def localized(message: str, language: str) -> str:
    """`language`: as in the header Accept-Language."""
    return in_chinese(message) if language.lower().startswith("zh") else message


def localized_values(values: Any, keys: frozenset[str], language: str) -> Any:
    """The texts below these keys, at any depth, in the language; everything else as it is."""
    if not language.lower().startswith("zh"):
        return values
    return _localized(values, keys, False)


def _localized(values: Any, keys: frozenset[str], chosen: bool) -> Any:
    if isinstance(values, dict):
        return {key: _localized(value, keys, chosen or key in keys) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return [_localized(value, keys, chosen) for value in values]
    return in_chinese(values) if chosen and isinstance(values, str) else values
