"""The English words for dialogues."""

from __future__ import annotations

from sojourn.data.builtin.dice import Dice
from sojourn.data.builtin.kinds.talk import Deal, TalkWords
from sojourn.data.builtin.weave import beat, options, plot, plots
from sojourn.data.builtin.words import QUALITIES, WEEKDAYS


def _deal(dice: Dice) -> Deal:
    price = dice.between(4, 60)
    offer = price - dice.between(1, price - 2)
    hour, later = dice.between(1, 9), dice.between(2, 3)
    day, day2 = dice.distinct(WEEKDAYS, 2)
    have, more = dice.between(2, 40), dice.between(1, 30)
    return Deal(price, offer, day, day2, hour, later, have, more, adj=dice.pick(QUALITIES))


TALK = TalkWords(
    places=options(
        """at the harbor | by the lake | in the library | at the station | behind the mill | near the school |
        in the old town | at the market | on the hill | at home"""
    ),
    reasons=options(
        """my train was late | I had to help my sister | the shop was closed | I could not find my {thing} |
        it rained the whole day | I read until midnight | the bridge was closed | I met an old friend"""
    ),
    work=options(
        """mending a {thing} | learning to cook | painting the door | reading about the sea | training a small model |
        building a shelf | writing a song | counting birds | cleaning the {thing} | planning a trip"""
    ),
    deal=_deal,
    opening=beat(
        """
        {a}: Good morning, {b}! / {b}: Good morning! I have been {work}.
        {a}: Hello {b}, how are you? / {b}: Well, thank you. I am {work}.
        {a}: There you are, {b}. / {b}: Hello {a}! Have you waited long?
        {a}: {b}, do you have a minute? / {b}: Yes, of course.
        {a}: What are you doing, {b}? / {b}: I am {work}.
        """
    ),
    plots=plots(
        """
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
        ===
        {a}: When do we meet on {day}?
        {a}: You said you would come on {day}. When?

        {b}: At {hour}, {place}.
        {b}: I thought at {hour} o'clock, {place}.

        {a}: Could it be {later} hours later?
        {a}: I have to work. Can we say {later} hours later?

        {b}: Then at {then}. Bring your {thing}.
        {b}: At {then}, then. {c} comes too.
        ===
        {a}: How many {things} do you have?
        {a}: Are there any {things} left?

        {b}: I had {have}, and {c} gave me {more}.
        {b}: {have} in the box and {more} on the table.

        {a}: So you have {sum}.
        {a}: That makes {sum}.

        {b}: Yes, {sum}. Do you want some?
        {b}: Right. I need only {n} of them.
        {b}: {sum}, you count well.
        ===
        {a}: Why were you not {place} on {day}?
        {a}: We waited for you on {day}.

        {b}: I am sorry, {reason}.
        {b}: You will not believe it: {reason}.

        {a}: That happens.
        {a}: We waited for {n} minutes and then we left.
        {a}: Next time call {c}.

        {b}: I will come on {day2}, and I bring {a_thing}.
        {b}: It will not happen again.
        """
    ),
    ending=plot(
        """
        {a}: Thank you, {b}.
        {a}: See you on {day2}!
        {a}: Good, then I will tell {c}.
        {a}: I will write it down.

        {b}: You are welcome.
        {b}: Greetings to {c}!
        {b}: Until then!
        -
        """
    ),
)
