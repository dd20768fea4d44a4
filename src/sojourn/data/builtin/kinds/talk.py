"""Dialogues: people ask, answer, and come to an end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sojourn.data.builtin.dice import Dice
from sojourn.data.builtin.tongue import Tongue
from sojourn.data.builtin.weave import Beat, Plot, weave


@dataclass(frozen=True)
class Deal:
    """What a dialogue is about: a price and an offer below it, two days, an hour and a later one, two counts."""

    price: int
    offer: int
    day: str
    day2: str
    hour: int
    later: int
    have: int
    more: int
    adj: str = ""


@dataclass(frozen=True)
class TalkWords:
    places: Sequence[str]
    reasons: Sequence[str]
    work: Sequence[str]
    deal: Callable[[Dice], Deal]  # each language draws it in its own order
    opening: Beat
    plots: Sequence[Plot]
    ending: Plot


def talk(dice: Dice, tongue: Tongue, words: TalkWords) -> str:
    told = dice.pick(words.plots)
    a, b, c = dice.distinct(tongue.names, 3)
    thing, other = dice.distinct(tongue.objects, 2)
    deal = words.deal(dice)
    facts = {
        **vars(deal),
        "a": a,
        "b": b,
        "c": c,
        "thing": thing,
        "other": other,
        "then": deal.hour + deal.later,
        "sum": deal.have + deal.more,
        "month": dice.pick(tongue.months),
        "place": dice.pick(words.places),
        "things": dice.pick(tongue.things),
        "reason": dice.pick(words.reasons).format(thing=thing),
        "work": dice.pick(words.work).format(thing=other),
        "n": dice.between(2, 15),
    }
    return weave(dice, (words.opening, *told, *words.ending), facts, "\n")
