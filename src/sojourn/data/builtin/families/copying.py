"""Say it back: numbers and phrases. The simplest thing that needs the prompt to be read."""

from __future__ import annotations

from sojourn.data.builtin.dice import Dice
from sojourn.data.builtin.words import ADJECTIVES, ADJECTIVES_ZH, NOUNS, NOUNS_ZH, Language

# What is to be copied stands on its own line: there a tokenizer sees it as it will stand in the answer.
_NUMBER = {
    "en": ("Repeat:\n{}", "Echo:\n{}", "Say this number:\n{}", "Copy the number:\n{}", "Write it again:\n{}"),
    "zh": ("重复：\n{}", "请说出这个数：\n{}", "照抄：\n{}", "再写一遍：\n{}"),
}
_PHRASE = {
    "en": ("Repeat:\n{}", "Echo:\n{}", "Say these words:\n{}", "Copy the words:\n{}", "Write it again:\n{}"),
    "zh": ("重复：\n{}", "请说出这句话：\n{}", "照抄：\n{}", "再写一遍：\n{}"),
}


def echo_number(dice: Dice, language: Language) -> tuple[str, str, str]:
    """The key is the number: two to four digits."""
    digits = dice.between(2, 4)
    number = str(dice.between(10 ** (digits - 1), 10**digits - 1))
    return number, dice.pick(_NUMBER[language]).format(number), number


def echo_phrase(dice: Dice, language: Language) -> tuple[str, str, str]:
    """The key is the phrase: a thing with one or two qualities."""
    if language == "zh":
        phrase = "的".join((dice.pick(ADJECTIVES_ZH), dice.pick(NOUNS_ZH)))
    else:
        phrase = " ".join((*dice.distinct(ADJECTIVES, dice.between(1, 2)), dice.pick(NOUNS)))
    return phrase, dice.pick(_PHRASE[language]).format(phrase), phrase
