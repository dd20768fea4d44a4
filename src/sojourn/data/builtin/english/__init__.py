"""The English texts: each kind is a function from chance to a text."""

from __future__ import annotations

from collections.abc import Callable

from sojourn.data.builtin.dice import Dice
from sojourn.data.builtin.english import entries, howto, numbers, stories, talk, training

KINDS: dict[str, Callable[[Dice], str]] = {
    "story": stories.story,
    "entry": entries.entry,
    "how_to": howto.how_to,
    "talk": talk.talk,
    "numbers": numbers.number_facts,
    "training": training.training,
}
