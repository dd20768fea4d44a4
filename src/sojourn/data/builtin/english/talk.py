"""Dialogues: people ask, answer, and come to an end."""

from __future__ import annotations

from sojourn.data.builtin.dice import Dice
from sojourn.data.builtin.weave import article, beat, options, plots, weave
from sojourn.data.builtin.words import MONTHS, NAMES, OBJECTS, QUALITIES, THINGS, WEEKDAYS

_PLACES = options(
    """at the harbor | by the lake | in the library | at the station | behind the mill | near the school |
    in the old town | at the market | on the hill | at home"""
)
_REASONS = options(
    """my train was late | I had to help my sister | the shop was closed | I could not find my {thing} |
    it rained the whole day | I read until midnight | the bridge was closed | I met an old friend"""
)
_WORK = options(
    """mending a {thing} | learning to cook | painting the door | reading about the sea | training a small model |
    building a shelf | writing a song | counting birds | cleaning the {thing} | planning a trip"""
)


def _facts(dice: Dice) -> dict[str, object]:
    a, b, c = dice.distinct(NAMES, 3)
    thing, other = dice.distinct(OBJECTS, 2)
    price = dice.between(4, 60)
    less = dice.between(1, price - 2)
    hour = dice.between(1, 9)
    later = dice.between(2, 3)
    day, day2 = dice.distinct(WEEKDAYS, 2)
    have, more = dice.between(2, 40), dice.between(1, 30)
    return {
        "a": a,
        "b": b,
        "c": c,
        "thing": thing,
        "a_thing": article(thing),
        "other": other,
        "a_other": article(other),
        "adj": dice.pick(QUALITIES),
        "price": price,
        "offer": price - less,
        "hour": hour,
        "then": hour + later,
        "later": later,
        "day": day,
        "day2": day2,
        "month": dice.pick(MONTHS),
        "place": dice.pick(_PLACES),
        "things": dice.pick(THINGS),
        "have": have,
        "more": more,
        "sum": have + more,
        "reason": dice.pick(_REASONS).format(thing=thing),
        "work": dice.pick(_WORK).format(thing=other),
        "n": dice.between(2, 15),
    }


_HELLO = beat(
    """
    {a}: Good morning, {b}! / {b}: Good morning! I have been {work}.
    {a}: Hello {b}, how are you? / {b}: Well, thank you. I am {work}.
    {a}: There you are, {b}. / {b}: Hello {a}! Have you waited long?
    {a}: {b}, do you have a minute? / {b}: Yes, of course.
    {a}: What are you doing, {b}? / {b}: I am {work}.
    """
)
_BYE = beat(
    """
    {a}: Thank you, {b}.
    {a}: See you on {day2}!
    {a}: Good, then I will tell {c}.
    {a}: I will write it down.
    """
)
_BYE_BACK = beat(
    """
    {b}: You are welcome.
    {b}: Greetings to {c}!
    {b}: Until then!
    -
    """
)
_TALKS = plots(
    """
    @hello

    {a}: How much is the {adj} {thing}?
    {a}: What do you want for that {thing}?

    {b}: {price} coins.
    {b}: For you, {price} coins.
    {b}: It cost {price} coins in {month}, and it costs that today.

    {a}: I can give you {offer}.
    {a}: That is too much. Would you take {offer}?

    {b}: {offer} and your {other}, then it is yours.
    {b}: For {offer} I have {a_other}, but no {thing}.
    {b}: Well, it is {day}. Take it for {offer}.

    @bye

    @bye_back
    ===
    @hello

    {a}: When do we meet on {day}?
    {a}: You said you would come on {day}. When?

    {b}: At {hour}, {place}.
    {b}: I thought at {hour} o'clock, {place}.

    {a}: Could it be {later} hours later?
    {a}: I have to work. Can we say {later} hours later?

    {b}: Then at {then}. Bring your {thing}.
    {b}: At {then}, then. {c} comes too.

    @bye

    @bye_back
    ===
    @hello

    {a}: How many {things} do you have?
    {a}: Are there any {things} left?

    {b}: I had {have}, and {c} gave me {more}.
    {b}: {have} in the box and {more} on the table.

    {a}: So you have {sum}.
    {a}: That makes {sum}.

    {b}: Yes, {sum}. Do you want some?
    {b}: Right. I need only {n} of them.
    {b}: {sum}, you count well.

    @bye

    @bye_back
    ===
    @hello

    {a}: Why were you not {place} on {day}?
    {a}: We waited for you on {day}.

    {b}: I am sorry, {reason}.
    {b}: You will not believe it: {reason}.

    {a}: That happens.
    {a}: We waited for {n} minutes and then we left.
    {a}: Next time call {c}.

    {b}: I will come on {day2}, and I bring {a_thing}.
    {b}: It will not happen again.

    @bye

    @bye_back
    """,
    hello=_HELLO,
    bye=_BYE,
    bye_back=_BYE_BACK,
)


def talk(dice: Dice) -> str:
    return weave(dice, dice.pick(_TALKS), _facts(dice), "\n")
