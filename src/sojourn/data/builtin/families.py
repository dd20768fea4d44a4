"""The question families of `builtin:instructions`. Each draws a key, a prompt and the one right answer.

The key is what the question is about, whatever its wording: questions of one key are all trained on or all held out.
"""

from __future__ import annotations

from collections.abc import Callable

from sojourn.data.builtin.phrases import Language, phrases, words
from sojourn.data.builtin.stable_random import StableRandom

KeyPromptAnswer = tuple[str, str, str]

_MONTH_LENGTHS = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)


def _wording(random: StableRandom, language: Language, name: str) -> str:
    wording: str = random.choice(phrases(language, "questions")[name])
    return wording


def echo_number(random: StableRandom, language: Language) -> KeyPromptAnswer:
    """Repeat a number of two to four digits. It stands on its own line, so that prompt and answer tokenize alike."""
    digits = random.between(2, 4)
    number = str(random.between(10 ** (digits - 1), 10**digits - 1))
    return number, _wording(random, language, "echo_number").format(number), number


def echo_phrase(random: StableRandom, language: Language) -> KeyPromptAnswer:
    """Repeat a noun with one or two adjectives."""
    adjectives, nouns = words(language)["adjectives"], words(language)["nouns"]
    if language == "zh":
        phrase = "的".join((random.choice(adjectives), random.choice(nouns)))
    else:
        phrase = " ".join((*random.sample(adjectives, random.between(1, 2)), random.choice(nouns)))
    return phrase, _wording(random, language, "echo_phrase").format(phrase), phrase


def compare(random: StableRandom, language: Language) -> KeyPromptAnswer:
    """The key is the unordered pair of two-digit numbers."""
    a, b = random.between(10, 99), random.between(10, 98)
    b += b >= a
    larger = random.chance(0.5)
    wording = _wording(random, language, "larger" if larger else "smaller")
    return f"{min(a, b)},{max(a, b)}", wording.format(a=a, b=b), str(max(a, b) if larger else min(a, b))


def _operand(random: StableRandom) -> int:
    """One digit as often as two."""
    return random.between(0, 9) if random.chance(0.5) else random.between(10, 99)


def add(random: StableRandom, language: Language) -> KeyPromptAnswer:
    """The key is the unordered pair."""
    a, b = _operand(random), _operand(random)
    return f"{min(a, b)},{max(a, b)}", _wording(random, language, "add").format(a=a, b=b), str(a + b)


def subtract(random: StableRandom, language: Language) -> KeyPromptAnswer:
    """The larger number comes first, so that no answer is negative."""
    low, high = sorted((_operand(random), _operand(random)))
    return f"{high},{low}", _wording(random, language, "subtract").format(a=high, b=low), str(high - low)


def sort(random: StableRandom, language: Language) -> KeyPromptAnswer:
    """Three or four numbers under a hundred, or three English words; the key is the sorted list."""
    if random.chance(0.3):
        items = random.sample(words("en")["nouns"], 3)
        answer = " ".join(sorted(items))
        return answer, _wording(random, language, "sort_words").format(" ".join(items)), answer
    numbers = [random.between(1, 99) for _ in range(random.between(3, 4))]
    answer = " ".join(map(str, sorted(numbers)))
    return answer, _wording(random, language, "sort_numbers").format(" ".join(map(str, numbers))), answer


def count(random: StableRandom, language: Language) -> KeyPromptAnswer:
    """How many words a list has, or how often one of two words occurs in it."""
    nouns = words(language)["nouns"]
    length = random.between(1, 7)
    if random.chance(0.5):
        row = " ".join(random.choice(nouns) for _ in range(length))
        return row, _wording(random, language, "count_words").format(row), str(length)
    target, other = random.sample(nouns, 2)
    drawn = [random.choice((target, other)) for _ in range(length)]
    row = " ".join(drawn)
    prompt = _wording(random, language, "count_one_word").format(row, target)
    return f"{row}/{target}", prompt, str(drawn.count(target))


def lookup(random: StableRandom, language: Language) -> KeyPromptAnswer:
    """Facts about two or three people, and a question about one of them."""
    names, things = words(language)["names"], words(language)["things"]
    people = random.between(2, 3)
    facts = [
        {"name": name, "thing": thing, "n": str(random.between(2, 99))}
        for name, thing in zip(random.sample(names, people), random.sample(things, people), strict=True)
    ]
    target = random.choice(facts)
    context = "".join(phrases(language, "questions")["lookup_fact"].format_map(fact) for fact in facts)
    key = ",".join(f"{fact['name']} {fact['n']} {fact['thing']}" for fact in facts)
    question = _wording(random, language, "lookup").format_map(target)
    return f"{key}/{target['name']}", context + question, target["n"]


def date(random: StableRandom, language: Language) -> KeyPromptAnswer:
    """The date after or before another, in a year of 365 days; one in five is the first or last of a month."""
    month = random.below(12)
    last = _MONTH_LENGTHS[month]
    day = random.choice((1, last)) if random.chance(0.2) else random.between(1, last)
    if random.chance(0.5):
        answer = (month, day + 1) if day < last else ((month + 1) % 12, 1)
        wording, key = "next_date", f"{month + 1}-{day}+1"
    else:
        before = (month - 1) % 12
        answer = (month, day - 1) if day > 1 else (before, _MONTH_LENGTHS[before])
        wording, key = "previous_date", f"{month + 1}-{day}-1"
    prompt = _wording(random, language, wording).format(_format_date(month, day, language))
    return key, prompt, _format_date(*answer, language)


def _format_date(month: int, day: int, language: Language) -> str:
    return f"{day} {words(language)['months'][month]}" if language == "en" else f"{month + 1}月{day}日"


def weekday(random: StableRandom, language: Language) -> KeyPromptAnswer:
    """The day 2 to 30 days after or before another."""
    return _shifted(random, language, "weekday", 30)


def month(random: StableRandom, language: Language) -> KeyPromptAnswer:
    """The month 2 to 24 months after or before another."""
    return _shifted(random, language, "month", 24)


def _shifted(random: StableRandom, language: Language, unit: str, most: int) -> KeyPromptAnswer:
    names = words(language)[f"{unit}s"]
    start, n, after = random.below(len(names)), random.between(2, most), random.chance(0.5)
    wording = _wording(random, language, f"{unit}_after" if after else f"{unit}_before")
    key = f"{start}{'+' if after else '-'}{n}"
    return key, wording.format(n=n, start=names[start]), names[(start + (n if after else -n)) % len(names)]


def about(random: StableRandom, language: Language) -> KeyPromptAnswer:
    """About Sojourn's commands and the terms of training. There are few facts, so wordings are held out instead."""
    parts = phrases(language, "questions")
    if random.chance(0.5):
        topic = name = random.choice(tuple(parts["commands"]))
        wordings, answer = parts["command"], parts["commands"][topic]
    else:
        topic = random.choice(tuple(parts["terms"]))
        wordings, (name, answer) = parts["term"], parts["terms"][topic]
    wording = random.below(len(wordings))
    return f"{topic}/{language}{wording}", wordings[wording].format(name), answer


FAMILIES: dict[str, Callable[[StableRandom, Language], KeyPromptAnswer]] = {
    "echo_number": echo_number,
    "echo_phrase": echo_phrase,
    "compare": compare,
    "add": add,
    "subtract": subtract,
    "sort": sort,
    "count": count,
    "lookup": lookup,
    "date": date,
    "weekday": weekday,
    "month": month,
    "about": about,
}
