"""How to do something: what is needed, the steps in order, what to watch for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sojourn.data.builtin.dice import Dice
from sojourn.data.builtin.tongue import Tongue
from sojourn.data.builtin.weave import Plot, weave

# A job: its name, what it needs, its steps in their order, what can go wrong and what then helps.
Job = tuple[str, tuple[str, ...], tuple[str, ...], tuple[str, ...]]
_NUMBERED = ("1.", "2.", "3.", "4.", "5.")


@dataclass(frozen=True)
class HowToWords:
    """`drawn` is the order in which the language draws these facts: another order would be other texts."""

    jobs: Sequence[Job]
    orders: tuple[tuple[str, ...], tuple[str, ...]]  # what the five steps begin with
    drawn: tuple[str, str, str, str]
    opening: Plot
    closing: Plot


def how_to(dice: Dice, tongue: Tongue, words: HowToWords) -> str:
    job, needs, steps, watch = dice.pick(words.jobs)
    options: dict[str, Sequence[object]] = {
        "name": tongue.names,
        "day": tongue.weekdays,
        "m": range(5, 61),
        "n": range(2, 10),
    }
    facts = {name: dice.pick(options[name]) for name in words.drawn} | {
        "job": job,
        "needs": tongue.listed(needs),
        "times": dice.between(2, 20),
        "watch": dice.pick(watch),
    }
    opening = weave(dice, words.opening, facts, tongue.space)
    order = dice.pick((words.orders[0], _NUMBERED, words.orders[1]))
    if order is _NUMBERED:
        gap, told = "\n", [f"{word} {step[0].upper()}{step[1:]}" for word, step in zip(order, steps, strict=True)]
    else:
        gap, told = tongue.space, [word + tongue.comma + step for word, step in zip(order, steps, strict=True)]
    body = [step.format_map(facts) + tongue.stop for step in told]
    return gap.join((opening, *body, weave(dice, words.closing, facts, tongue.space)))
