"""Little stories: somebody wants something, something is in the way, and there is a reason for how it ends."""

from __future__ import annotations

from sojourn.data.builtin.dice import Dice
from sojourn.data.builtin.weave import article, beat, options, plots, weave
from sojourn.data.builtin.words import BOYS, GIRLS, OBJECTS, QUALITIES, WEEKDAYS

_PLACES = options(
    """the harbor | the mill | the old bridge | the market | the lighthouse | the school | the lake |
    the station | the orchard | the library | the north gate | the bakery | the clock tower | the river bank |
    the top of the hill"""
)
_WEATHER = (
    ("it was raining", "the path was muddy", "put on boots"),
    ("it was snowing", "the steps were slippery", "walked slowly"),
    ("the sun was hot", "the well was nearly dry", "carried extra water"),
    ("a strong wind blew", "the boats could not leave", "waited behind a wall"),
    ("there was thick fog", "nobody could see the road signs", "followed the fence"),
    ("the night had been cold", "the pond was frozen", "took a warm scarf"),
    ("clouds hung low over the fields", "the laundry would not dry", "brought a lamp"),
    ("the morning was clear and mild", "half the village was outside", "left early"),
)
_JOBS = options(
    """baker | sailor | teacher | gardener | carpenter | shepherd | tailor | painter | miller | doctor |
    engineer | fisher | librarian | beekeeper | potter"""
)
_LESSONS = options(
    """a small step each day goes further than one long jump | it is wise to look at the price before paying it |
    what is written down is not lost | two people carry a heavy box better than one |
    a good plan leaves room for bad weather | asking early is cheaper than mending late |
    nobody is too old to learn a new road | the one who checks twice walks only once"""
)
_BUILT = options(
    """a wooden stage | a new gate | a raft | a long table | a stone oven | a swing | a footbridge |
    a kite as wide as a house | a small tower | a sledge | a fountain | a merry-go-round"""
)
_FEELINGS = options("glad | proud | tired but content | relieved | surprised | a little ashamed | calm again | curious")
_SOUNDS = options("a bell | a dog | somebody singing | footsteps | a cart on the stones | an owl | a whistle | thunder")


def _facts(dice: Dice) -> dict[str, object]:
    heroine = dice.chance(0.5)
    hero = dice.pick(GIRLS if heroine else BOYS)
    friend = dice.pick(BOYS if heroine else GIRLS)
    he, him, his = ("she", "her", "her") if heroine else ("he", "him", "his")
    weather, trouble, answer = dice.pick(_WEATHER)
    place, other_place = dice.distinct(_PLACES, 2)
    thing, other_thing = dice.distinct(OBJECTS, 2)
    price = dice.between(3, 40)
    paid = dice.between(1, price - 1)
    return {
        "hero": hero,
        "friend": friend,
        "he": he,
        "him": him,
        "his": his,
        "weather": weather,
        "trouble": trouble,
        "answer": answer,
        "place": place,
        "other_place": other_place,
        "thing": thing,
        "a_thing": article(thing),
        "other_thing": other_thing,
        "a_other": article(other_thing),
        "adj": dice.pick(QUALITIES),
        "a_adj": article(dice.pick(QUALITIES)),
        "job": dice.pick(_JOBS),
        "built": dice.pick(_BUILT),
        "a_job": article(dice.pick(_JOBS)),
        "day": dice.pick(WEEKDAYS),
        "lesson": dice.pick(_LESSONS),
        "feeling": dice.pick(_FEELINGS),
        "sound": dice.pick(_SOUNDS),
        "n": dice.between(2, 12),
        "price": price,
        "paid": paid,
        "rest": price - paid,
        "age": dice.between(7, 80),
    }


_OPENING = beat(
    """
    one {day}, {hero} set out for {place}.
    {hero} was {a_job} who lived near {place}.
    on {day} morning {hero} woke up and heard {sound}.
    {hero} and {friend} had been friends for {n} years.
    there was once {a_job} called {hero}, who was {age} years old.
    nobody near {place} knew more about {adj} things than {hero}.
    """
)
_SKY = beat(
    """
    {weather}, so {trouble}, and {he} {answer}.
    because {weather}, {trouble}.
    {weather}. That was why {he} {answer}.
    -
    """
)
_ENDING = beat(
    """
    {hero} went home {feeling}.
    in the evening {hero} wrote in {his} notebook: {lesson}.
    "You see," said {friend}, "{lesson}."
    since that day {hero} has gone to {place} every {day}.
    they ate soup together, and {hero} was {feeling}.
    {hero} learned that {lesson}.
    """
)
_PLOTS = plots(
    """
    @opening

    @sky

    {he} was looking for {a_thing} that {he} had lost near {other_place}.
    {his} {thing} was gone, and {he} had looked everywhere.

    {he} asked {friend}, but {friend} had seen only {a_other}.
    "Have you seen my {thing}?" {he} asked. "No," said {friend}, "but I found {a_other}."

    together they searched {other_place} for {n} hours.
    they looked under every {adj} stone.

    at last the {thing} turned up behind the {other_thing}, where the wind had carried it.
    in the end it lay where {hero} had sat on {day}: {he} had forgotten it there.

    @ending
    ===
    @opening

    {he} wanted to buy {a_thing} for {friend}.
    at the market there was {a_adj} {thing}, and {hero} wanted it.

    it cost {price} coins, but {he} had only {paid}.
    the price was {price} coins, and in {his} pocket were {paid}.

    so {rest} coins were missing.
    that left {rest} coins to find.
    {he} needed {rest} more.

    @sky

    {he} helped {a_job} at {place} for {n} days and earned them.
    {friend} lent {him} {rest} coins and asked for nothing but the truth.
    the seller smiled and took {a_other} for the rest.

    then the {thing} was {his}.
    so the {thing} came home on {day}.

    @ending
    ===
    @opening

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

    @ending
    ===
    @opening

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

    @ending
    ===
    @opening

    {friend} said that {a_thing} is always more useful than {a_other}.
    they could not agree on who should carry the {thing}.

    {hero} said the opposite.
    {hero} shook {his} head.
    "Not always," answered {hero}.

    so they went to {place} and asked {a_job}.
    in the end they asked the {job}, who was {age} and had seen much.

    @sky

    "It depends," was the answer: "at {place} you want the {thing}, on the road the {other_thing}."
    "Try both for {n} days," was the answer, "and count."

    both laughed, because both had been right.
    {friend} thought about it for {n} minutes and nodded.

    @ending
    """,
    opening=_OPENING,
    sky=_SKY,
    ending=_ENDING,
)


def story(dice: Dice) -> str:
    return weave(dice, dice.pick(_PLOTS), _facts(dice))
