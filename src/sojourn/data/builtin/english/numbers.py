"""Facts about numbers, told in words; every one of them is true."""

from __future__ import annotations

from sojourn.data.builtin.dice import Dice
from sojourn.data.builtin.weave import plot, weave
from sojourn.data.builtin.words import NAMES, THINGS

_PLOT = plot(
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
    {a} has {length}.
    -

    that is all {name} wanted to say about it.
    {name} checked it with {things}.
    so numbers keep their word.
    -
    """
)


def number_facts(dice: Dice) -> str:
    a, b, c = dice.between(100, 999), dice.between(2, 99), dice.between(2, 12)
    parity = "odd" if a % 2 else "even"
    return weave(
        dice,
        _PLOT,
        {
            "a": a,
            "b": b,
            "c": c,
            "a2": a + 2,
            "next": a + 1,
            "last": a - 1,
            "plus": a + b,
            "minus": a - b,
            "double": 2 * a,
            "times": b * c,
            "parity": parity,
            "digits": sum(int(digit) for digit in str(a)),
            "back": str(a)[::-1],
            "length": f"{len(str(a))} digits",
            "name": dice.pick(NAMES),
            "things": dice.pick(THINGS),
        },
    )
