"""Sums and differences of small numbers."""

from __future__ import annotations

from sojourn.data.builtin.dice import Dice
from sojourn.data.builtin.words import Language

_ADD = {
    "en": ("{a}+{b}=", "{a}+{b}?", "What is {a} plus {b}?", "Add {a} and {b}.", "How much is {a} and {b} together?"),
    "zh": ("{a}+{b}=", "{a}+{b}等于多少？", "{a}加{b}是多少？", "求{a}与{b}的和。"),
}
_SUBTRACT = {
    "en": ("{a}-{b}=", "{a}-{b}?", "What is {a} minus {b}?", "Take {b} from {a}.", "How much is {a} less {b}?"),
    "zh": ("{a}-{b}=", "{a}-{b}等于多少？", "{a}减{b}是多少？", "从{a}中减去{b}，还剩多少？"),
}


def _operand(dice: Dice) -> int:
    """One digit as often as two."""
    return dice.between(0, 9) if dice.chance(0.5) else dice.between(10, 99)


def add(dice: Dice, language: Language) -> tuple[str, str, str]:
    """The key is the unordered pair."""
    a, b = _operand(dice), _operand(dice)
    return f"{min(a, b)},{max(a, b)}", dice.pick(_ADD[language]).format(a=a, b=b), str(a + b)


def subtract(dice: Dice, language: Language) -> tuple[str, str, str]:
    """The key is the pair; the larger comes first, so that no answer is negative."""
    low, high = sorted((_operand(dice), _operand(dice)))
    return f"{high},{low}", dice.pick(_SUBTRACT[language]).format(a=high, b=low), str(high - low)
