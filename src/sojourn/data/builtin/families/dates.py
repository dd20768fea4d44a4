"""Days, weeks and months, in a year of 365 days."""

from __future__ import annotations

from collections.abc import Sequence

from sojourn.data.builtin.dice import Dice
from sojourn.data.builtin.words import MONTH_LENGTHS, MONTHS, MONTHS_ZH, WEEKDAYS, WEEKDAYS_ZH, Language

_NEXT_DATE = {
    "en": ("The day after {}?", "Which date comes after {}?", "Today is {}. What is the date tomorrow?"),
    "zh": ("{}的后一天是？", "{}的第二天是几月几日？", "今天是{}，明天是几月几日？"),
}
_LAST_DATE = {
    "en": ("The day before {}?", "Which date comes before {}?", "Today is {}. What was the date yesterday?"),
    "zh": ("{}的前一天是？", "{}的前一天是几月几日？", "今天是{}，昨天是几月几日？"),
}
_WEEKDAY_AFTER = {
    "en": (
        "{n} days after {start}?",
        "Today is {start}. Which day is it in {n} days?",
        "Which day comes {n} days after {start}?",
    ),
    "zh": ("{start}之后{n}天是？", "今天是{start}，{n}天后是星期几？", "从{start}往后数{n}天，是星期几？"),
}
_WEEKDAY_BEFORE = {
    "en": (
        "{n} days before {start}?",
        "Today is {start}. Which day was it {n} days ago?",
        "Which day is {n} days before {start}?",
    ),
    "zh": ("{start}之前{n}天是？", "今天是{start}，{n}天前是星期几？", "从{start}往前数{n}天，是星期几？"),
}
_MONTH_AFTER = {
    "en": ("{n} months after {start}?", "It is {start}. Which month is it in {n} months?"),
    "zh": ("{start}之后{n}个月是？", "现在是{start}，{n}个月后是几月？"),
}
_MONTH_BEFORE = {
    "en": ("{n} months before {start}?", "It is {start}. Which month was it {n} months ago?"),
    "zh": ("{start}之前{n}个月是？", "现在是{start}，{n}个月前是几月？"),
}


def date(dice: Dice, language: Language) -> tuple[str, str, str]:
    """The key is the date and the direction; the day is drawn first so that the turns of months are not rare."""
    month = dice.below(12)
    last = MONTH_LENGTHS[month]
    day = dice.pick((1, last)) if dice.chance(0.2) else dice.between(1, last)
    if dice.chance(0.5):
        answer = (month, day + 1) if day < last else ((month + 1) % 12, 1)
        wordings, key = _NEXT_DATE, f"{month + 1}-{day}+1"
    else:
        before = (month - 1) % 12
        answer = (month, day - 1) if day > 1 else (before, MONTH_LENGTHS[before])
        wordings, key = _LAST_DATE, f"{month + 1}-{day}-1"
    return key, dice.pick(wordings[language]).format(_say(month, day, language)), _say(*answer, language)


def _say(month: int, day: int, language: Language) -> str:
    return f"{day} {MONTHS[month]}" if language == "en" else f"{month + 1}月{day}日"


def weekday(dice: Dice, language: Language) -> tuple[str, str, str]:
    """The key is the day, the number of days (2 to 30) and the direction."""
    names = WEEKDAYS if language == "en" else WEEKDAYS_ZH
    return _shifted(dice, names, 30, _WEEKDAY_AFTER[language], _WEEKDAY_BEFORE[language])


def month(dice: Dice, language: Language) -> tuple[str, str, str]:
    """The key is the month, the number of months (2 to 24) and the direction."""
    names = MONTHS if language == "en" else MONTHS_ZH
    return _shifted(dice, names, 24, _MONTH_AFTER[language], _MONTH_BEFORE[language])


def _shifted(
    dice: Dice, names: Sequence[str], most: int, after: Sequence[str], before: Sequence[str]
) -> tuple[str, str, str]:
    """So many names on, or back, in a circle."""
    start, n, ahead = dice.below(len(names)), dice.between(2, most), dice.chance(0.5)
    wording = dice.pick(after if ahead else before)
    key = f"{start}{'+' if ahead else '-'}{n}"
    return key, wording.format(n=n, start=names[start]), names[(start + (n if ahead else -n)) % len(names)]
