"""Puts a text together: for each beat of a plot one of its wordings, filled with the facts of this one text."""

from __future__ import annotations

from collections.abc import Mapping

from sojourn.data.builtin.dice import Dice

Beat = tuple[str, ...]
Plot = tuple[Beat, ...]


def options(words: str) -> Beat:
    """Separated by `|`; line breaks count as spaces."""
    return tuple(" ".join(option.split()) for option in words.split("|"))


def beat(words: str) -> Beat:
    """A wording a line; `-` says nothing, ` / ` breaks the line."""
    wordings = (line.strip() for line in words.strip().splitlines())
    return tuple("" if wording == "-" else wording.replace(" / ", "\n") for wording in wordings)


def plot(words: str, **shared: Beat) -> Plot:
    """Beats with a blank line between them; `@name` stands for a beat that several plots share."""
    blocks = [block.strip() for block in words.strip().split("\n\n")]
    return tuple(shared[block[1:]] if block.startswith("@") else beat(block) for block in blocks)


def plots(words: str, **shared: Beat) -> tuple[Plot, ...]:
    """Plots with a line `===` between them."""
    return tuple(plot(part, **shared) for part in words.split("==="))


def weave(dice: Dice, told: Plot, facts: Mapping[str, object], between: str) -> str:
    """Every beat begins with a capital letter; `{a_thing}` is the fact `thing` with `a` or `an`."""
    known = _WithArticles(facts)
    sentences = []
    for wordings in told:
        wording = dice.pick(wordings)
        if wording:
            sentence = wording.format_map(known)
            sentences.append(sentence[0].upper() + sentence[1:])
    return between.join(sentences)


class _WithArticles(dict[str, object]):
    def __missing__(self, key: str) -> str:
        if not key.startswith("a_"):
            raise KeyError(key)
        word = str(self[key.removeprefix("a_")])
        return f"an {word}" if word[0] in "aeiou" else f"a {word}"
