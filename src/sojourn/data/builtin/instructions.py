"""A stream of tasks of chosen families, on one side of the split."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from sojourn.data.builtin.dice import Dice
from sojourn.data.builtin.families import FAMILIES
from sojourn.data.builtin.task import Split, Task, split_of
from sojourn.data.builtin.words import LANGUAGES, Language


def instructions(
    count: int | None = None,
    seed: int = 0,
    families: Mapping[str, float] | Sequence[str] | None = None,
    split: Split = "train",
    languages: Sequence[Language] = LANGUAGES,
) -> Iterator[Task]:
    """`count` tasks (without end if None); `families` are names, or names with their weights, or all of them."""
    weights = dict(families) if isinstance(families, Mapping) else dict.fromkeys(families or FAMILIES, 1.0)
    unknown = [name for name in weights if name not in FAMILIES]
    if unknown or not weights or min(weights.values()) < 0 or sum(weights.values()) <= 0:
        raise ValueError(f"families: {unknown or weights}; allowed: {', '.join(FAMILIES)}, with weights above 0")
    return _draw(count, Dice(seed, f"instructions/{split}"), weights, split, tuple(languages))


def _draw(
    count: int | None, dice: Dice, weights: dict[str, float], split: Split, languages: tuple[Language, ...]
) -> Iterator[Task]:
    names, totals = tuple(weights), tuple(accumulate(weights.values()))
    drawn = 0
    while count is None or drawn < count:
        family = names[dice.weighted(totals)]
        # Keys are drawn until one is on this side, so that the split does not shift the weights of the families.
        while True:
            language = dice.pick(languages)
            key, prompt, answer = FAMILIES[family](dice, language)
            if split_of(family, key) == split:
                break
        yield Task(family, language, key, prompt, answer)
        drawn += 1
