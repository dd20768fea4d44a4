"""The English words for how to do something."""

from __future__ import annotations

from sojourn.data.builtin.kinds.howto import HowToWords
from sojourn.data.builtin.weave import plot

HOW_TO = HowToWords(
    jobs=(
        (
            "bake a plain loaf of bread",
            ("flour", "water", "salt", "yeast"),
            (
                "mix the flour with the salt",
                "stir in the yeast and {n} cups of warm water",
                "knead the dough for {m} minutes",
                "let it rise under a cloth",
                "bake it until it sounds hollow",
            ),
            ("if the dough sticks, add a little flour", "if it does not rise, the room is too cold"),
        ),
        (
            "plant a young tree",
            ("a spade", "a bucket of water", "a strong stick"),
            (
                "dig a hole twice as wide as the roots",
                "loosen the soil at the bottom",
                "set the tree upright",
                "fill the hole and press the soil down",
                "water it every {n} days",
            ),
            ("if the leaves hang, it needs water", "if the wind bends it, tie it to the stick"),
        ),
        (
            "mend a flat bicycle tyre",
            ("a patch", "glue", "a pump", "a bowl of water"),
            (
                "take the wheel off",
                "pull out the tube",
                "find the hole with the help of the water",
                "glue the patch on and wait {m} minutes",
                "put the wheel back and pump it up",
            ),
            ("if air still escapes, look for a second hole", "if the patch comes off, the rubber was wet"),
        ),
        (
            "brew a pot of tea",
            ("tea leaves", "fresh water", "a pot"),
            (
                "boil the water",
                "warm the pot",
                "put in {n} spoons of leaves",
                "pour the water on",
                "wait {n} minutes and pour",
            ),
            ("if it is bitter, wait less next time", "if it is weak, take more leaves"),
        ),
        (
            "write a letter to a friend",
            ("paper", "a pen", "a stamp"),
            (
                "think of the one thing you want to say",
                "write the date at the top",
                "begin with a greeting",
                "tell your news in {n} short parts",
                "sign it and close the envelope",
            ),
            (
                "if you do not know how to begin, begin with the weather",
                "if it grows too long, leave out what your friend knows",
            ),
        ),
        (
            "build a bird house",
            ("a board", "nails", "a hammer", "a saw"),
            (
                "cut the board into {n} pieces",
                "make a round hole in the front",
                "nail the sides together",
                "fix the roof last",
                "hang it {n} metres above the ground",
            ),
            ("if no bird comes, turn it away from the wind", "if the wood splits, drill before you nail"),
        ),
        (
            "back up photos",
            ("a second disk", "a quiet hour"),
            (
                "put all photos into one folder",
                "copy the folder to the second disk",
                "compare the number of files",
                "open {n} of them to see that they are whole",
                "keep the disk in another room",
            ),
            ("if the numbers differ, copy again", "if the disk is full, remove what is there twice"),
        ),
        (
            "train a small language model",
            ("some text", "a computer", "a plan"),
            (
                "count your text and choose the size of the model",
                "cut the text into tokens",
                "train for {n}00 steps and watch the loss",
                "save a checkpoint every {n} minutes",
                "ask it questions that it has not seen",
            ),
            (
                "if the loss jumps, lower the learning rate",
                "if it knows the examples but not the questions, it needs more data",
            ),
        ),
        (
            "rent a computer by the hour",
            ("a budget", "a list of what you need"),
            (
                "prepare everything at home",
                "compare prices for the memory you need",
                "try one minute before you begin",
                "set a limit of {m} coins",
                "bring the results home before you leave",
            ),
            (
                "if the connection breaks, the work must go on without you",
                "if the disk is wiped at the end, copy first",
            ),
        ),
        (
            "read a map",
            ("a map", "a compass"),
            (
                "find the place where you are",
                "turn the map until north is north",
                "choose a goal and measure the way",
                "count {n} landmarks on the way",
                "check after every one of them",
            ),
            ("if a landmark is missing, go back to the last one", "if fog comes, stay on the path"),
        ),
    ),
    orders=(
        ("First", "Then", "After that", "Next", "Finally"),
        ("To begin", "Now", "When that is done", "Then", "At the end"),
    ),
    drawn=("n", "m", "name", "day"),
    opening=plot(
        """
        how to {job}.
        {name} wanted to learn how to {job}.
        anyone can {job}.
        last {day} {name} showed us how to {job}.
        here is how {name} likes to {job}.

        you need {needs}.
        take {needs}.
        have {needs} ready before you start.
        all it takes is {needs}.

        it takes about {m} minutes.
        plan {m} minutes for it.
        the first time it may take {m} minutes.
        -
        """
    ),
    closing=plot(
        """
        {watch}.
        one more thing: {watch}.
        {name} adds: {watch}.

        after {times} times it goes by itself.
        do not hurry.
        {name} has done it {times} times.
        practice on a {day}.
        -
        """
    ),
)
