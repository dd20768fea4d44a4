"""Larger, smaller, and lists put in order."""

from __future__ import annotations

from sojourn.data.builtin.dice import Dice
from sojourn.data.builtin.words import NOUNS, Language

_LARGER = {
    "en": ("Larger: {a} or {b}?", "Which is larger, {a} or {b}?", "Take the larger of {a} and {b}."),
    "zh": ("较大的数：{a}，{b}", "{a}和{b}哪个大？", "{a}与{b}中较大的是几？"),
}
_SMALLER = {
    "en": ("Smaller: {a} or {b}?", "Which is smaller, {a} or {b}?", "Take the smaller of {a} and {b}."),
    "zh": ("较小的数：{a}，{b}", "{a}和{b}哪个小？", "{a}与{b}中较小的是几？"),
}
_SORT_NUMBERS = {
    "en": ("Sort: {}", "Put in order, smallest first: {}", "From small to large: {}"),
    "zh": ("排序：{}", "从小到大排列：{}", "请按从小到大的顺序写出：{}"),
}
_SORT_WORDS = {
    "en": ("Sort by the alphabet: {}", "Put these words in alphabetical order: {}"),
    "zh": ("按字母顺序排列：{}", "请把这些单词按字母排序：{}"),
}


def compare(dice: Dice, language: Language) -> tuple[str, str, str]:
    """The key is the unordered pair of two-digit numbers."""
    a, b = dice.between(10, 99), dice.between(10, 98)
    b += b >= a
    larger = dice.chance(0.5)
    wording = dice.pick((_LARGER if larger else _SMALLER)[language])
    return f"{min(a, b)},{max(a, b)}", wording.format(a=a, b=b), str(max(a, b) if larger else min(a, b))


def sort(dice: Dice, language: Language) -> tuple[str, str, str]:
    """The key is the sorted list: three or four numbers under a hundred, or three English words."""
    if dice.chance(0.3):
        words = dice.distinct(NOUNS, 3)
        ordered = sorted(words)
        return " ".join(ordered), dice.pick(_SORT_WORDS[language]).format(" ".join(words)), " ".join(ordered)
    numbers = [dice.between(1, 99) for _ in range(dice.between(3, 4))]
    answer = " ".join(str(number) for number in sorted(numbers))
    return answer, dice.pick(_SORT_NUMBERS[language]).format(" ".join(str(number) for number in numbers)), answer
