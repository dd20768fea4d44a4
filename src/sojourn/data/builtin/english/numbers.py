"""The English words for facts about numbers."""

from __future__ import annotations

from sojourn.data.builtin.kinds.numbers import NumberWords
from sojourn.data.builtin.weave import plot

NUMBERS = NumberWords(
    even="even",
    odd="odd",
    plot=plot(
        """
        take the number {a}.
        {name} likes the number {a}.
        {name} wrote {a} on the board.
        think of {a}.

        it is {parity}.
        {a} is {parity}, and so is {a2}.
        after {a} comes {next}, before it comes {last}.

        {a} plus {b} is {plus}.
        if you add {b}, you get {plus}.
        with {b} {things} more, {a} become {plus}.

        {a} minus {b} is {minus}.
        from {b} to {a} it is {minus}.
        -

        twice {a} is {double}.
        {a} and {a} make {double}.
        half of {double} is {a}.
        -

        {a} is larger than {b}.
        {b} is smaller than {a}.
        {b} times {c} is {times}.
        {times} divided by {b} is {c}.
        {c} rows of {b} {things} are {times} {things}.

        in {a} the digits add up to {digits}.
        written backwards, {a} reads {back}.
        {a} has {length} digits.
        -

        that is all {name} wanted to say about it.
        {name} checked it with {things}.
        so numbers keep their word.
        -
        """
    ),
)
