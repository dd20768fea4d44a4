"""Facts about numbers, told in words; every one of them is true."""

from __future__ import annotations

from dataclasses import dataclass

from sojourn.data.builtin.dice import Dice
from sojourn.data.builtin.tongue import Tongue
from sojourn.data.builtin.weave import Plot, weave


@dataclass(frozen=True)
class NumberWords:
    even: str
    odd: str
    plot: Plot


def number_facts(dice: Dice, tongue: Tongue, words: NumberWords) -> str:
    a, b, c = dice.between(100, 999), dice.between(2, 99), dice.between(2, 12)
    facts = {
        "a": a,
        "b": b,
        "c": c,
        "a2": a + 2,
        "next": a + 1,
        "last": a - 1,
        "plus": a + b,
        "minus": a - b,
        "double": 2 * a,
        "times": b * c,
        "parity": words.odd if a % 2 else words.even,
        "digits": sum(int(digit) for digit in str(a)),
        "back": str(a)[::-1],
        "length": len(str(a)),
        "name": dice.pick(tongue.names),
        "things": dice.pick(tongue.things),
    }
    return weave(dice, words.plot, facts, tongue.space)
