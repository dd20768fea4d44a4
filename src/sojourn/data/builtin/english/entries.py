"""The English words for encyclopaedia entries."""

from __future__ import annotations

from sojourn.data.builtin.kinds.entries import EntryWords
from sojourn.data.builtin.weave import options, plot

ENTRIES = EntryWords(
    name_parts=(
        options(
            """Al | Bre | Cor | Dun | El | Fal | Gar | Hol | Is | Kel | Lor | Mar | Nor | Ost | Pel | Quin | Ros | Sel |
            Tar | Ul | Ver | Wen | Yar | Zel"""
        ),
        options("| a | e | i | o | en | ar | im | or | un"),
        options("by | dale | field | ford | ham | haven | holm | mere | mouth | stead | ton | vik | wick | worth"),
    ),
    rivers=options(
        "Ane | Brill | Corra | Dell | Esk | Farrow | Gleam | Ister | Lumen | Morva | Pell | Sill | Tamm | Wye"
    ),
    lands=options(
        """on the coast | in the hills | on the plain | at the foot of the mountains | on an island |
        in a wide valley | at the edge of a forest | between two lakes"""
    ),
    sides=("north", "south", "east", "west"),
    goods=options(
        """wool | salt | glass | cheese | paper | boats | bells | clay pots | honey | apples | tea | clocks | rope |
        furniture | smoked fish | candles"""
    ),
    sights=options(
        """a stone bridge with {k} arches | a clock tower that is {m} metres high |
        a library with {k} thousand books | a market hall built in {y2} | a garden with {k} kinds of roses |
        a school for {k} hundred pupils | a lighthouse whose light is seen from {k} kilometres |
        a small museum of {goods2}"""
    ),
    animal_facts={
        "coat": options(
            "grey | sand-coloured | striped | black | spotted | silver | reddish | pale green | brown | white"
        ),
        "beast": options(
            "heron | lizard | mouse | beetle | fox | owl | otter | toad | deer | finch | crab | bat | hare | newt"
        ),
        "home": options(
            "reed beds | dry hills | old walls | oak forests | river banks | high meadows | caves | salt marshes"
        ),
        "food": options(
            "seeds | small fish | beetles | berries | roots | worms | fallen fruit | moss | snails | grass"
        ),
        "stuff": options("grass | mud | twigs | feathers | leaves | clay"),
    },
    habits=options(
        """sleeps through the winter | hunts at dusk | builds a nest of {stuff} | changes colour in autumn |
        lives in groups of about {k} | digs tunnels up to {m} metres long | sings only before rain |
        carries its young on its back | can go without water for {k} days"""
    ),
    tools=(
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
    ),
    materials=options("oak | iron | copper | bamboo | brass | steel | bronze | ash wood | stone | pine"),
    town=plot(
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
    ),
    animal=plot(
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
    ),
    tool=plot(
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
    ),
)
