"""A stream of little texts for pretraining, as long as it is asked to be."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sojourn.data.builtin import chinese, english
from sojourn.data.builtin.dice import Dice
from sojourn.data.builtin.kinds import KINDS
from sojourn.data.builtin.words import LANGUAGES, Language
from sojourn.data.sources.document import Document

_BOOKS = {"en": english.BOOK, "zh": chinese.BOOK}
_TWO_IN_ONE = 0.3  # so many documents hold two texts of a kind, so that lengths vary


def text(bytes_wanted: int, seed: int = 0, languages: Sequence[Language] = LANGUAGES) -> Iterator[Document]:
    """Documents until their UTF-8 bytes reach `bytes_wanted`; a longer stream begins with the shorter one."""
    dice = Dice(seed, "text")
    made = number = 0
    while made < bytes_wanted:
        number += 1
        language = dice.pick(languages)
        kind, write = dice.pick(tuple(KINDS.items()))
        words = write(dice, _BOOKS[language])
        if dice.chance(_TWO_IN_ONE):
            words = f"{words}\n\n{write(dice, _BOOKS[language])}"
        made += len(words.encode())
        yield Document(f"builtin:text:{number} ({language}, {kind})", text=words)
