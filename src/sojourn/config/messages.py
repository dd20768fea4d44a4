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


def closest_typo(word: str, known: Iterable[str]) -> str | None:
    """The name that `word` is a slip of the fingers from: one letter wrong, missing, too many or swapped; two in a long
    name. A name that merely looks alike means something else."""
    word = normalize(word)[:100]
    most = 2 if len(word) >= 12 else 1
    near = [(_slips(word, name), name) for name in known if abs(len(name) - len(word)) <= most]
    return min(((slips, name) for slips, name in near if slips <= most), default=(0, None))[1]


def _slips(one: str, other: str) -> int:
    """Edit distance (optimal string alignment): letters inserted, deleted, changed, or swapped with the next."""
    before, row = list[int](), list(range(len(other) + 1))
    for i, letter in enumerate(one, 1):
        last, before, row = before, row, [i]
        for j, wanted in enumerate(other, 1):
            cost = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (letter != wanted))
            if i > 1 and j > 1 and letter == other[j - 2] and one[i - 2] == wanted:
                cost = min(cost, last[j - 2] + 1)
            row.append(cost)
    return row[-1]


def ask_if_meant(word: str | None) -> str:
    return f"; did you mean {word}?" if word else ""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`; did you mean X?`, or nothing."""
    return ask_if_meant(closest_match(word, known))
