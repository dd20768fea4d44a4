"""Encyclopaedia entries about towns, animals and tools that do not exist; the facts of an entry agree."""

from __future__ import annotations

from sojourn.data.builtin.dice import Dice
from sojourn.data.builtin.weave import article, listed, options, plot, weave
from sojourn.data.builtin.words import MONTHS

_STARTS = options(
    """Al | Bre | Cor | Dun | El | Fal | Gar | Hol | Is | Kel | Lor | Mar | Nor | Ost | Pel | Quin | Ros | Sel |
    Tar | Ul | Ver | Wen | Yar | Zel"""
)
_MIDDLES = options("| a | e | i | o | en | ar | im | or | un")
_ENDS = options("by | dale | field | ford | ham | haven | holm | mere | mouth | stead | ton | vik | wick | worth")
_RIVERS = options(
    "Ane | Brill | Corra | Dell | Esk | Farrow | Gleam | Ister | Lumen | Morva | Pell | Sill | Tamm | Wye"
)
_LANDS = options(
    """on the coast | in the hills | on the plain | at the foot of the mountains | on an island |
    in a wide valley | at the edge of a forest | between two lakes"""
)
_GOODS = options(
    """wool | salt | glass | cheese | paper | boats | bells | clay pots | honey | apples | tea | clocks | rope |
    furniture | smoked fish | candles"""
)
_SIGHTS = options(
    """a stone bridge with {k} arches | a clock tower that is {m} metres high |
    a library with {k} thousand books | a market hall built in {y2} | a garden with {k} kinds of roses |
    a school for {k} hundred pupils | a lighthouse whose light is seen from {k} kilometres |
    a small museum of {goods2}"""
)
_BEASTS = options(
    "heron | lizard | mouse | beetle | fox | owl | otter | toad | deer | finch | crab | bat | hare | newt"
)
_COATS = options("grey | sand-coloured | striped | black | spotted | silver | reddish | pale green | brown | white")
_HOMES = options("reed beds | dry hills | old walls | oak forests | river banks | high meadows | caves | salt marshes")
_FOODS = options("seeds | small fish | beetles | berries | roots | worms | fallen fruit | moss | snails | grass")
_HABITS = options(
    """sleeps through the winter | hunts at dusk | builds a nest of {stuff} | changes colour in autumn |
    lives in groups of about {k} | digs tunnels up to {m} metres long | sings only before rain |
    carries its young on its back | can go without water for {k} days"""
)
_STUFF = options("grass | mud | twigs | feathers | leaves | clay")
_TOOLS = (
    ("press", "to press oil", "farmers"),
    ("saw", "to cut thin boards", "carpenters"),
    ("loom", "to weave blankets", "weavers"),
    ("pump", "to lift water", "gardeners"),
    ("plough", "to turn heavy soil", "farmers"),
    ("lantern", "to light the way at sea", "sailors"),
    ("scale", "to weigh grain", "millers"),
    ("drill", "to make holes in stone", "builders"),
    ("winch", "to pull boats ashore", "fishers"),
    ("sieve", "to clean grain", "bakers"),
    ("compass", "to find the way", "surveyors"),
    ("kiln", "to fire clay pots", "potters"),
)
_MATERIALS = options("oak | iron | copper | bamboo | brass | steel | bronze | ash wood | stone | pine")


def _name(dice: Dice) -> str:
    return dice.pick(_STARTS) + dice.pick(_MIDDLES) + dice.pick(_ENDS)


def _places(dice: Dice) -> dict[str, object]:
    year = dice.between(900, 1900)
    return {
        "town": _name(dice),
        "other": _name(dice),
        "year": year,
        "y2": dice.between(year + 5, 1990),
        "k": dice.between(2, 40),
        "m": dice.between(5, 90),
        "month": dice.pick(MONTHS),
        "cm": dice.between(4, 120),
        "years": dice.between(2, 30),
    }


def _town(dice: Dice) -> dict[str, object]:
    facts = _places(dice)
    facts |= {
        "third": _name(dice),
        "river": dice.pick(_RIVERS),
        "land": dice.pick(_LANDS),
        "people": dice.between(4, 990) * 100,
        "km": dice.between(4, 180),
        "side": dice.pick(("north", "south", "east", "west")),
        "goods": listed(dice.distinct(_GOODS, dice.between(2, 3))),
        "goods2": dice.pick(_GOODS),
    }
    facts["sight"], facts["sight2"] = (sight.format_map(facts) for sight in dice.distinct(_SIGHTS, 2))
    return facts


def _animal(dice: Dice) -> dict[str, object]:
    facts = _places(dice)
    coat = dice.pick(_COATS)
    facts |= {
        "beast": dice.pick(_BEASTS),
        "coat": coat,
        "a_coat": article(coat),
        "home": dice.pick(_HOMES),
        "food": listed(dice.distinct(_FOODS, dice.between(2, 3))),
        "stuff": dice.pick(_STUFF),
        "young": dice.between(2, 9),
    }
    facts["habit"], facts["habit2"] = (habit.format_map(facts) for habit in dice.distinct(_HABITS, 2))
    return facts


def _tool(dice: Dice) -> dict[str, object]:
    material, other_material = dice.distinct(_MATERIALS, 2)
    tool, use, trade = dice.pick(_TOOLS)
    return _places(dice) | {
        "tool": tool,
        "material": material,
        "material2": other_material,
        "use": use,
        "trade": trade,
        "parts": dice.between(3, 19),
        "kg": dice.between(2, 60),
    }


_TOWN = plot(
    """
    {town} is a town {land}, {km} kilometres {side} of {other}.
    {town} lies {land}, about {km} kilometres from {other}.
    the town of {town} stands {land}.

    about {people} people live there.
    it has {people} inhabitants.
    in the last count it had {people} inhabitants.

    it was founded in {year}.
    its name is first written in a letter of {year}.
    the oldest house dates from {year}.

    the river {river} runs through it.
    it stands on the river {river}, which floods in {month}.
    -

    the town is known for its {goods}.
    people there live from {goods}.
    its markets sell {goods}.

    it has {sight} and {sight2}.
    visitors come to see {sight}.
    among its sights is {sight}; there is also {sight2}.

    a feast is held every {month}.
    each {month} there is a fair to which people from {third} come.
    -

    {other}, the nearest town, is {km} kilometres away.
    a road of {km} kilometres leads to {other}.
    -
    """
)
_ANIMAL = plot(
    """
    the {town} {beast} is {a_coat} animal about {cm} centimetres long.
    the {coat} {beast} of {town} lives in {home}.
    the {coat} {beast} is found in the {home} around {town}.

    it eats {food}.
    its food is {food}.
    it lives on {food}, and in {month} on little else.

    it {habit}.
    it {habit}, which few of its kind do.
    the animal {habit} and {habit2}.

    in {month} the female has {young} young.
    its young, {young} in a good year, are born in {month}.
    -

    it grows to {cm} centimetres and may reach an age of {years} years.
    few live longer than {years} years.
    -

    because it needs {home}, it has become rare near {other}.
    since {y2} it is protected in {other}.
    people in {other} say that it brings luck.
    -
    """
)
_TOOL = plot(
    """
    the {town} {tool} is a tool made of {material}.
    the {town} {tool} is used {use}.
    the {tool} of {town} is built from {material} and {material2}.

    it is used by {trade} {use}.
    {trade} use it {use}.
    since {year}, {trade} have used it {use}.

    it has {parts} parts and weighs {kg} kilograms.
    it weighs about {kg} kilograms.
    its {parts} parts are held together without nails.

    it was first built in {year} in {town}, and is still made there.
    the oldest one, made in {year}, is kept in {other}.
    -

    because {material} wears out, it is renewed every {years} years.
    with care it lasts {years} years.
    two people can work with it for a day without a rest.
    -

    in {other} a smaller form is common, only {cm} centimetres long.
    today machines have replaced it nearly everywhere but in {other}.
    -
    """
)


_KINDS = ((_town, _TOWN), (_animal, _ANIMAL), (_tool, _TOOL))


def entry(dice: Dice) -> str:
    facts, told = dice.pick(_KINDS)
    return weave(dice, told, facts(dice))
