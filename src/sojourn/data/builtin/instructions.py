"""`builtin:instructions`: questions with one verifiable answer each, either all trained on or all held out."""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from sojourn.data.builtin.families import FAMILIES
from sojourn.data.builtin.phrases import LANGUAGES, Language
from sojourn.data.builtin.stable_random import StableRandom

Split = Literal["train", "held_out"]
_HELD_OUT_OF_256 = 26  # one key in ten


@dataclass(frozen=True)
class Question:
    """`key` is what the question is about: all questions of one key are in one split."""

    family: str
    language: Language
    key: str
    prompt: str
    answer: str

    @property
    def split(self) -> Split:
        return split_of(self.family, self.key)


def split_of(family: str, key: str) -> Split:
    digest = hashlib.blake2b(f"{family}:{key}".encode(), digest_size=8).digest()
    return "held_out" if digest[0] < _HELD_OUT_OF_256 else "train"


def is_correct(question: Question, reply: str) -> bool:
    """Exact match, up to whitespace, one final full stop, and full-width digits and signs."""
    return _normalize(reply) == _normalize(question.answer)


def _normalize(text: str) -> str:
    joined = " ".join(unicodedata.normalize("NFKC", text).split())
    return joined[:-1].rstrip() if joined.endswith((".", "。")) else joined


def instructions(
    count: int | None = None,
    seed: int = 0,
    families: Mapping[str, float] | Sequence[str] | None = None,
    split: Split = "train",
    languages: Sequence[Language] = LANGUAGES,
) -> Iterator[Question]:
    """`count` questions (endless if None) of `families`: names, names with weights, or None for all."""
    weights = dict(families) if isinstance(families, Mapping) else dict.fromkeys(families or FAMILIES, 1.0)
    unknown = [name for name in weights if name not in FAMILIES]
    if unknown or not weights or min(weights.values()) < 0 or sum(weights.values()) <= 0:
        raise ValueError(f"families: {unknown or weights}; allowed: {', '.join(FAMILIES)}, with weights above 0")
    return _draw(count, StableRandom(seed, f"instructions/{split}"), weights, split, tuple(languages))


def _draw(
    count: int | None, random: StableRandom, weights: dict[str, float], split: Split, languages: tuple[Language, ...]
) -> Iterator[Question]:
    names, totals = tuple(weights), tuple(accumulate(weights.values()))
    drawn = 0
    while count is None or drawn < count:
        family = names[random.weighted_index(totals)]
        # Draw again within the family until the key is in this split, so that the split does not shift the weights.
        while True:
            language = random.choice(languages)
            key, prompt, answer = FAMILIES[family](random, language)
            if split_of(family, key) == split:
                break
        yield Question(family, language, key, prompt, answer)
        drawn += 1
