"""The kinds of text: each stands once, and takes its words from the book of a language."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sojourn.data.builtin.dice import Dice
from sojourn.data.builtin.kinds.entries import EntryWords, entry
from sojourn.data.builtin.kinds.howto import HowToWords, how_to
from sojourn.data.builtin.kinds.numbers import NumberWords, number_facts
from sojourn.data.builtin.kinds.stories import StoryWords, story
from sojourn.data.builtin.kinds.talk import TalkWords, talk
from sojourn.data.builtin.kinds.training import TrainingWords, training
from sojourn.data.builtin.tongue import Tongue


@dataclass(frozen=True)
class Book:
    """All the words of a language."""

    tongue: Tongue
    stories: StoryWords
    entries: EntryWords
    howto: HowToWords
    talk: TalkWords
    numbers: NumberWords
    training: TrainingWords


KINDS: dict[str, Callable[[Dice, Book], str]] = {
    "story": lambda dice, book: story(dice, book.tongue, book.stories),
    "entry": lambda dice, book: entry(dice, book.tongue, book.entries),
    "how_to": lambda dice, book: how_to(dice, book.tongue, book.howto),
    "talk": lambda dice, book: talk(dice, book.tongue, book.talk),
    "numbers": lambda dice, book: number_facts(dice, book.tongue, book.numbers),
    "training": lambda dice, book: training(dice, book.tongue, book.training),
}
