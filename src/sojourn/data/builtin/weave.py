"""Puts a text together: for each beat of a plot one of its wordings, filled with the facts of this one text."""

from __future__ import annotations

from collections.abc import Mapping

from sojourn.data.builtin.dice import Dice

Beat = tuple[str, ...]
Plot = tuple[Beat, ...]
Facts = Mapping[str, object]


def weave(dice: Dice, plot: Plot, facts: Facts, between: str = " ") -> str:
    """An empty wording leaves its beat out; every beat begins with a capital letter."""
    told = []
    for beat in plot:
        wording = dice.pick(beat)
        if wording:
            sentence = wording.format_map(facts)
            told.append(sentence[0].upper() + sentence[1:])
    return between.join(told)


def article(word: str) -> str:
    """The word with `a` or `an`."""
    return f"an {word}" if word[0] in "aeiou" else f"a {word}"


def listed(words: list[str], last: str = " and ") -> str:
    return last.join((", ".join(words[:-1]), words[-1])) if len(words) > 1 else words[0]
