"""The English words for little stories."""

from __future__ import annotations

from sojourn.data.builtin.dice import Dice
from sojourn.data.builtin.kinds.stories import StoryWords
from sojourn.data.builtin.weave import beat, options, plots
from sojourn.data.builtin.words import BOYS, GIRLS, QUALITIES, WEEKDAYS

_JOBS = options(
    """baker | sailor | teacher | gardener | carpenter | shepherd | tailor | painter | miller | doctor |
    engineer | fisher | librarian | beekeeper | potter"""
)


def _people(dice: Dice) -> dict[str, str]:
    heroine = dice.chance(0.5)
    hero, friend = dice.pick(GIRLS if heroine else BOYS), dice.pick(BOYS if heroine else GIRLS)
    he, him, his = ("she", "her", "her") if heroine else ("he", "him", "his")
    return {"hero": hero, "friend": friend, "he": he, "him": him, "his": his}


STORIES = StoryWords(
    weather=(
        ("it was raining", "the path was muddy", "put on boots"),
        ("it was snowing", "the steps were slippery", "walked slowly"),
        ("the sun was hot", "the well was nearly dry", "carried extra water"),
        ("a strong wind blew", "the boats could not leave", "waited behind a wall"),
        ("there was thick fog", "nobody could see the road signs", "followed the fence"),
        ("the night had been cold", "the pond was frozen", "took a warm scarf"),
        ("clouds hung low over the fields", "the laundry would not dry", "brought a lamp"),
        ("the morning was clear and mild", "half the village was outside", "left early"),
    ),
    places=options(
        """the harbor | the mill | the old bridge | the market | the lighthouse | the school | the lake |
        the station | the orchard | the library | the north gate | the bakery | the clock tower | the river bank |
        the top of the hill"""
    ),
    details={
        "adj": QUALITIES,
        "adj2": QUALITIES,
        "job": _JOBS,
        "built": options(
            """a wooden stage | a new gate | a raft | a long table | a stone oven | a swing | a footbridge |
            a kite as wide as a house | a small tower | a sledge | a fountain | a merry-go-round"""
        ),
        "job2": _JOBS,
        "day": WEEKDAYS,
        "lesson": options(
            """a small step each day goes further than one long jump |
            it is wise to look at the price before paying it | what is written down is not lost |
            two people carry a heavy box better than one | a good plan leaves room for bad weather |
            asking early is cheaper than mending late | nobody is too old to learn a new road |
            the one who checks twice walks only once"""
        ),
        "feeling": options(
            "glad | proud | tired but content | relieved | surprised | a little ashamed | calm again | curious"
        ),
        "sound": options(
            "a bell | a dog | somebody singing | footsteps | a cart on the stones | an owl | a whistle | thunder"
        ),
    },
    people=_people,
    opening=beat(
        """
        one {day}, {hero} set out for {place}.
        {hero} was {a_job2} who lived near {place}.
        on {day} morning {hero} woke up and heard {sound}.
        {hero} and {friend} had been friends for {n} years.
        there was once {a_job2} called {hero}, who was {age} years old.
        nobody near {place} knew more about {adj} things than {hero}.
        """
    ),
    plots=plots(
        """
        @sky

        {he} was looking for {a_thing} that {he} had lost near {other_place}.
        {his} {thing} was gone, and {he} had looked everywhere.

        {he} asked {friend}, but {friend} had seen only {a_other}.
        "Have you seen my {thing}?" {he} asked. "No," said {friend}, "but I found {a_other}."

        together they searched {other_place} for {n} hours.
        they looked under every {adj} stone.

        at last the {thing} turned up behind the {other}, where the wind had carried it.
        in the end it lay where {hero} had sat on {day}: {he} had forgotten it there.
        ===
        {he} wanted to buy {a_thing} for {friend}.
        at the market there was {a_adj2} {thing}, and {hero} wanted it.

        it cost {price} coins, but {he} had only {paid}.
        the price was {price} coins, and in {his} pocket were {paid}.

        so {rest} coins were missing.
        that left {rest} coins to find.
        {he} needed {rest} more.

        @sky

        {he} helped {a_job2} at {place} for {n} days and earned them.
        {friend} lent {him} {rest} coins and asked for nothing but the truth.
        the seller smiled and took {a_other} for the rest.

        then the {thing} was {his}.
        so the {thing} came home on {day}.
        ===
        @sky

        on the way {he} heard {sound} near {other_place}.
        when {he} came to {other_place}, {he} heard {sound}.

        it was {friend}, who had hurt a foot and could not walk.
        {friend} stood there with {a_thing} that was too heavy.

        {hero} did not wait.
        "Wait, I will help you," said {hero}.
        first {hero} was afraid, but then {he} came closer.

        {he} made a seat out of {a_thing} and a rope.
        {he} fetched {a_other} from {place}, and with it the work was easy.

        after {n} minutes they could go on.
        before the clock struck {n}, they were home.
        ===
        every year the people built {built} for the feast.
        the {job} had promised to build {built} by {day}.

        this time {hero} was to lead the work.
        {hero} had never done it before.

        {he} made a list with {n} points and began with the hardest one.
        {he} drew it on paper first, then counted the nails.

        @sky

        on the third day it fell over, because the ground was soft.
        then a beam broke, because nobody had measured it.

        {hero} did not start from nothing: {he} had kept the parts that were good.
        since every finished part was stored in {place}, only one day was lost.
        {friend} brought a stronger beam, and they began again from where they had stopped.

        on {day} it stood.
        when {day} came, it was ready.
        ===
        {friend} said that {a_thing} is always more useful than {a_other}.
        they could not agree on who should carry the {thing}.

        {hero} said the opposite.
        {hero} shook {his} head.
        "Not always," answered {hero}.

        so they went to {place} and asked {a_job2}.
        in the end they asked the {job}, who was {age} and had seen much.

        @sky

        "It depends," was the answer: "at {place} you want the {thing}, on the road the {other}."
        "Try both for {n} days," was the answer, "and count."

        both laughed, because both had been right.
        {friend} thought about it for {n} minutes and nodded.
        """,
        sky=beat(
            """
            {weather}, so {trouble}, and {he} {answer}.
            because {weather}, {trouble}.
            {weather}. That was why {he} {answer}.
            -
            """
        ),
    ),
    ending=beat(
        """
        {hero} went home {feeling}.
        in the evening {hero} wrote in {his} notebook: {lesson}.
        "You see," said {friend}, "{lesson}."
        since that day {hero} has gone to {place} every {day}.
        they ate soup together, and {hero} was {feeling}.
        {hero} learned that {lesson}.
        """
    ),
)
