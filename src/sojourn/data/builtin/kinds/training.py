"""What Sojourn does, and the ideas of training, explained with an example."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sojourn.data.builtin.dice import Dice
from sojourn.data.builtin.tongue import Tongue
from sojourn.data.builtin.weave import Beat, Plot, weave

_GUESS = {512: "6.2", 1024: "6.9", 2048: "7.6", 4096: "8.3", 8192: "9.0", 32768: "10.4"}


@dataclass(frozen=True)
class TrainingWords:
    opening: Beat
    ideas: Sequence[Plot]
    journeys: Sequence[Plot]
    ending: Beat


def training(dice: Dice, tongue: Tongue, words: TrainingWords) -> str:
    every = dice.pick((20, 25, 40, 50, 100, 200, 250, 500))
    kept = every * dice.between(1, 90)
    vocab = dice.pick(tuple(_GUESS))
    name, friend = dice.distinct(tongue.names, 2)
    told = dice.pick(words.ideas if dice.chance(0.6) else words.journeys)
    facts = {
        "name": name,
        "friend": friend,
        "day": dice.pick(tongue.weekdays),
        "k": every,
        "kept": kept,
        "step": kept + dice.between(1, every - 1),
        "lr": f"0.00{dice.between(1, 99):02d}",
        "warm": dice.between(2, 50) * 10,
        "m": dice.between(1, 900),
        "batch": 2 ** dice.between(2, 9),
        "vocab": vocab,
        "guess": _GUESS[vocab],
        "page": dice.between(300, 900),
        "loss": f"{dice.between(1, 5)}.{dice.between(0, 99):02d}",
        "gb": dice.pick((8, 12, 16, 24, 32, 48, 80)),
        "hours": dice.between(2, 60),
        "price": dice.between(5, 300),
    }
    return weave(dice, (words.opening, *told, words.ending), facts, tongue.space)
