"""The English words for all kinds of text."""

from __future__ import annotations

from collections.abc import Sequence

from sojourn.data.builtin.english.entries import ENTRIES
from sojourn.data.builtin.english.howto import HOW_TO
from sojourn.data.builtin.english.numbers import NUMBERS
from sojourn.data.builtin.english.stories import STORIES
from sojourn.data.builtin.english.talk import TALK
from sojourn.data.builtin.english.training import TRAINING
from sojourn.data.builtin.kinds import Book
from sojourn.data.builtin.tongue import Tongue
from sojourn.data.builtin.words import MONTHS, NAMES, OBJECTS, THINGS, WEEKDAYS


def _listed(words: Sequence[str]) -> str:
    return " and ".join((", ".join(words[:-1]), words[-1])) if len(words) > 1 else words[0]


_TONGUE = Tongue(
    names=NAMES,
    weekdays=WEEKDAYS,
    months=MONTHS,
    objects=OBJECTS,
    things=THINGS,
    listed=_listed,
    space=" ",
    comma=", ",
    stop=".",
)
BOOK = Book(_TONGUE, STORIES, ENTRIES, HOW_TO, TALK, NUMBERS, TRAINING)
