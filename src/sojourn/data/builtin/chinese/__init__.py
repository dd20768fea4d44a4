"""The Chinese texts: the same kinds as the English ones."""

from __future__ import annotations

from collections.abc import Callable

from sojourn.data.builtin.chinese import entries, howto, numbers, stories, talk, training
from sojourn.data.builtin.dice import Dice

KINDS: dict[str, Callable[[Dice], str]] = {
    "story": stories.story,
    "entry": entries.entry,
    "how_to": howto.how_to,
    "talk": talk.talk,
    "numbers": numbers.number_facts,
    "training": training.training,
}
