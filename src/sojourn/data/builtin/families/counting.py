"""How many there are in a short row."""

from __future__ import annotations

from sojourn.data.builtin.dice import Dice
from sojourn.data.builtin.words import NOUNS, NOUNS_ZH, Language

_WORDS = {
    "en": ("How many words: {}", "Count the words: {}", "{}\nHow many words is that?"),
    "zh": ("有几个词：{}", "数一数，一共几个词：{}", "{}\n这里有几个词？"),
}
_ONE_WORD = {
    "en": ("How often does {1} occur: {0}", "Count {1} in: {0}", "{0}\nHow many times is {1} there?"),
    "zh": ("“{1}”出现了几次：{0}", "数一数有几个“{1}”：{0}", "{0}\n其中“{1}”有几个？"),
}


def count(dice: Dice, language: Language) -> tuple[str, str, str]:
    """The key is the row, and the word asked for if one is: all words of a row, or one word among two kinds."""
    nouns = NOUNS if language == "en" else NOUNS_ZH
    length = dice.between(1, 7)
    if dice.chance(0.5):
        row = " ".join(dice.pick(nouns) for _ in range(length))
        return row, dice.pick(_WORDS[language]).format(row), str(length)
    kinds = dice.distinct(nouns, 2)
    words = [dice.pick(kinds) for _ in range(length)]
    row = " ".join(words)
    return f"{row}/{kinds[0]}", dice.pick(_ONE_WORD[language]).format(row, kinds[0]), str(words.count(kinds[0]))
