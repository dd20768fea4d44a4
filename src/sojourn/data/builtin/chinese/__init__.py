"""The Chinese words for all kinds of text."""

from __future__ import annotations

from sojourn.data.builtin.chinese.entries import ENTRIES
from sojourn.data.builtin.chinese.howto import HOW_TO
from sojourn.data.builtin.chinese.numbers import NUMBERS
from sojourn.data.builtin.chinese.stories import STORIES
from sojourn.data.builtin.chinese.talk import TALK
from sojourn.data.builtin.chinese.training import TRAINING
from sojourn.data.builtin.kinds import Book
from sojourn.data.builtin.tongue import Tongue
from sojourn.data.builtin.words import MONTHS_ZH, NAMES_ZH, OBJECTS_ZH, THINGS_ZH, WEEKDAYS_ZH

_TONGUE = Tongue(
    names=NAMES_ZH,
    weekdays=WEEKDAYS_ZH,
    months=MONTHS_ZH,
    objects=OBJECTS_ZH,
    things=THINGS_ZH,
    listed="、".join,
    space="",
    comma="，",
    stop="。",
)
BOOK = Book(_TONGUE, STORIES, ENTRIES, HOW_TO, TALK, NUMBERS, TRAINING)
