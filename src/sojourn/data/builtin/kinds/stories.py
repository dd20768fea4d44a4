"""Little stories: somebody wants something, something is in the way, and there is a reason for how it ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from sojourn.data.builtin.dice import Dice
from sojourn.data.builtin.tongue import Tongue
from sojourn.data.builtin.weave import Beat, Plot, weave


@dataclass(frozen=True)
class StoryWords:
    """`details` are in the order in which the language draws them: another order would be other texts."""

    weather: Sequence[tuple[str, str, str]]  # with the trouble it makes, and what the hero does about it
    places: Sequence[str]
    details: Mapping[str, Sequence[str]]
    people: Callable[[Dice], dict[str, str]]  # the hero, the friend, and how the language speaks of them
    opening: Beat
    plots: Sequence[Plot]
    ending: Beat


def story(dice: Dice, tongue: Tongue, words: StoryWords) -> str:
    told = dice.pick(words.plots)
    people = words.people(dice)
    weather, trouble, answer = dice.pick(words.weather)
    place, other_place = dice.distinct(words.places, 2)
    thing, other = dice.distinct(tongue.objects, 2)
    price = dice.between(3, 40)
    paid = dice.between(1, price - 1)
    facts = {
        **people,
        "weather": weather,
        "trouble": trouble,
        "answer": answer,
        "place": place,
        "other_place": other_place,
        "thing": thing,
        "other": other,
        "price": price,
        "paid": paid,
        "rest": price - paid,
        **{name: dice.pick(options) for name, options in words.details.items()},
        "n": dice.between(2, 12),
        "age": dice.between(7, 80),
    }
    return weave(dice, (words.opening, *told, words.ending), facts, tongue.space)
