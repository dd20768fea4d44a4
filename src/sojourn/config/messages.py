"""Parts of error messages: user input made short and printable, and suggestions for misspelled names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def printable(value: object, most: int = 60) -> str:
    """A value on one line, printable, at most `most` characters."""
    text = " ".join("".join(c if c.isprintable() else "?" if ord(c) > 32 else " " for c in str(value)).split())
    return text if len(text) <= most else text[: most - 1] + "…"


def normalize(word: str) -> str:
    """A name in lower case with `_` for `-`."""
    return word.strip().lower().replace("-", "_")


def closest_match(word: str, known: Iterable[str], cutoff: float = 0.65) -> str | None:
    spelled = {normalize(name): name for name in known}
    found = difflib.get_close_matches(normalize(word)[:100], spelled, n=1, cutoff=cutoff)
    return spelled[found[0]] if found else None


def ask_if_meant(word: str | None) -> str:
    return f"; did you mean {word}?" if word else ""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`; did you mean X?`, or nothing."""
    return ask_if_meant(closest_match(word, known))
