"""The six types of text in `builtin:text`. The facts within one text agree with each other, and sums are right.

The order of the draws decides what a seed gives, so it must never change; where the two languages draw in another
order, their files say in which (`details`, `drawn`, `animal`), or there is a function for each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sojourn.data.builtin.phrases import SENTENCE_GAP, Language, fill, join_list, phrases, words
from sojourn.data.builtin.stable_random import StableRandom

Facts = dict[str, Any]

_NUMBERED = ("1.", "2.", "3.", "4.", "5.")
_COMMA, _FULL_STOP = {"en": ", ", "zh": "，"}, {"en": ".", "zh": "。"}
_LOSS_OF_GUESSING = {512: "6.2", 1024: "6.9", 2048: "7.6", 4096: "8.3", 8192: "9.0", 32768: "10.4"}  # ln(vocabulary)


def story(random: StableRandom, language: Language) -> str:
    """Somebody wants something, something is in the way, and there is a reason for how it ends."""
    lists, parts = words(language), phrases(language, "stories")
    plot = random.choice(parts["plots"])
    facts = _story_people(random, language)
    facts["weather"], facts["trouble"], facts["answer"] = random.choice(parts["weather"])
    facts["place"], facts["other_place"] = random.sample(parts["places"], 2)
    facts["thing"], facts["other"] = random.sample(lists["objects"], 2)
    facts["price"] = random.between(3, 40)
    facts["paid"] = random.between(1, facts["price"] - 1)
    facts["rest"] = facts["price"] - facts["paid"]
    for name, source in parts["details"].items():
        facts[name] = random.choice(parts["lists"].get(source) or lists[source])
    facts["n"] = random.between(2, 12)
    facts["age"] = random.between(7, 80)
    return fill(random, (*parts["opening"], *plot, *parts["ending"]), facts, SENTENCE_GAP[language])


def _story_people(random: StableRandom, language: Language) -> Facts:
    lists = words(language)
    if language == "zh":
        hero, friend = random.sample(lists["names"], 2)
        return {"hero": hero, "friend": friend}
    if random.chance(0.5):
        hero, friend = random.choice(lists["girls"]), random.choice(lists["boys"])
        return {"hero": hero, "friend": friend, "he": "she", "him": "her", "his": "her"}
    hero, friend = random.choice(lists["boys"]), random.choice(lists["girls"])
    return {"hero": hero, "friend": friend, "he": "he", "him": "him", "his": "his"}


def entry(random: StableRandom, language: Language) -> str:
    """An encyclopaedia entry about a town, an animal or a tool that does not exist."""
    draw, name = random.choice(((_town, "town"), (_animal, "animal_entry"), (_tool, "tool")))
    return fill(random, phrases(language, "entries")[name], draw(random, language), SENTENCE_GAP[language])


def _town_name(random: StableRandom, language: Language) -> str:
    return "".join(random.choice(part) for part in phrases(language, "entries")["name_parts"])


def _two_or_three(random: StableRandom, language: Language, options: Sequence[str]) -> str:
    return join_list(random.sample(options, random.between(2, 3)), language)


def _entry_facts(random: StableRandom, language: Language) -> Facts:
    year = random.between(900, 1900)
    return {
        "town": _town_name(random, language),
        "other": _town_name(random, language),
        "year": year,
        "y2": random.between(year + 5, 1990),
        "k": random.between(2, 40),
        "m": random.between(5, 90),
        "month": random.choice(words(language)["months"]),
        "cm": random.between(4, 120),
        "years": random.between(2, 30),
    }


def _town(random: StableRandom, language: Language) -> Facts:
    parts = phrases(language, "entries")
    facts = _entry_facts(random, language) | {
        "third": _town_name(random, language),
        "river": random.choice(parts["rivers"]),
        "land": random.choice(parts["lands"]),
        "people": random.between(4, 990) * 100,
        "km": random.between(4, 180),
        "side": random.choice(parts["sides"]),
        "goods": _two_or_three(random, language, parts["goods"]),
        "goods2": random.choice(parts["goods"]),
    }
    facts["sight"], facts["sight2"] = (sight.format_map(facts) for sight in random.sample(parts["sights"], 2))
    return facts


def _animal(random: StableRandom, language: Language) -> Facts:
    parts = phrases(language, "entries")
    facts = _entry_facts(random, language)
    for name, options in parts["animal"].items():
        facts[name] = _two_or_three(random, language, options) if name == "food" else random.choice(options)
    facts["young"] = random.between(2, 9)
    facts["habit"], facts["habit2"] = (habit.format_map(facts) for habit in random.sample(parts["habits"], 2))
    return facts


def _tool(random: StableRandom, language: Language) -> Facts:
    parts = phrases(language, "entries")
    material, other_material = random.sample(parts["materials"], 2)
    tool, use, trade = random.choice(parts["tools"])
    return _entry_facts(random, language) | {
        "tool": tool,
        "material": material,
        "material2": other_material,
        "use": use,
        "trade": trade,
        "parts": random.between(3, 19),
        "kg": random.between(2, 60),
    }


def how_to(random: StableRandom, language: Language) -> str:
    """How to do something: what is needed, the steps in order, what to watch for."""
    lists, parts, gap = words(language), phrases(language, "how_to"), SENTENCE_GAP[language]
    job = random.choice(parts["jobs"])
    options: dict[str, Sequence[object]] = {
        "name": lists["names"],
        "day": lists["weekdays"],
        "m": range(5, 61),
        "n": range(2, 10),
    }
    facts: Facts = {name: random.choice(options[name]) for name in parts["drawn"]} | {
        "job": job["name"],
        "needs": join_list(job["needs"], language),
        "times": random.between(2, 20),
        "watch": random.choice(job["problems"]),
    }
    opening = fill(random, parts["opening"], facts, gap)
    first, second = parts["step_words"]
    begin = random.choice((first, _NUMBERED, second))
    steps = zip(begin, job["steps"], strict=True)
    if begin is _NUMBERED:
        gap, lines = "\n", [f"{word} {step[0].upper()}{step[1:]}" for word, step in steps]
    else:
        lines = [word + _COMMA[language] + step for word, step in steps]
    body = [line.format_map(facts) + _FULL_STOP[language] for line in lines]
    return gap.join((opening, *body, fill(random, parts["closing"], facts, SENTENCE_GAP[language])))


def dialogue(random: StableRandom, language: Language) -> str:
    """Two people ask, answer, and come to an end."""
    lists, parts = words(language), phrases(language, "dialogues")
    plot = random.choice(parts["plots"])
    facts: Facts = {}
    facts["a"], facts["b"], facts["c"] = random.sample(lists["names"], 3)
    facts["thing"], facts["other"] = random.sample(lists["objects"], 2)
    facts |= _dialogue_numbers_en(random) if language == "en" else _dialogue_numbers_zh(random)
    facts |= {
        "then": facts["hour"] + facts["later"],
        "sum": facts["have"] + facts["more"],
        "month": random.choice(lists["months"]),
        "place": random.choice(parts["places"]),
        "things": random.choice(lists["things"]),
        "reason": random.choice(parts["reasons"]).format(thing=facts["thing"]),
        "work": random.choice(parts["activities"]).format(thing=facts["other"]),
        "n": random.between(2, 15),
    }
    return fill(random, (*parts["opening"], *plot, *parts["ending"]), facts, "\n")


def _dialogue_numbers_en(random: StableRandom) -> Facts:
    lists = words("en")
    price = random.between(4, 60)
    offer = price - random.between(1, price - 2)
    hour, later = random.between(1, 9), random.between(2, 3)
    day, day2 = random.sample(lists["weekdays"], 2)
    have, more = random.between(2, 40), random.between(1, 30)
    numbers = {"price": price, "offer": offer, "hour": hour, "later": later, "have": have, "more": more}
    return {**numbers, "day": day, "day2": day2, "adj": random.choice(lists["qualities"])}


def _dialogue_numbers_zh(random: StableRandom) -> Facts:
    day, day2 = random.sample(words("zh")["weekdays"], 2)
    price = random.between(4, 60)
    hour, later = random.between(1, 9), random.between(1, 3)
    have, more = random.between(2, 40), random.between(1, 30)
    offer = random.between(2, price - 1)
    numbers = {"price": price, "offer": offer, "hour": hour, "later": later, "have": have, "more": more}
    return {**numbers, "day": day, "day2": day2}


def number_facts(random: StableRandom, language: Language) -> str:
    """True statements about one number."""
    lists, parts = words(language), phrases(language, "number_facts")
    a, b, c = random.between(100, 999), random.between(2, 99), random.between(2, 12)
    facts = {
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
        "parity": parts["odd"] if a % 2 else parts["even"],
        "digits": sum(int(digit) for digit in str(a)),
        "back": str(a)[::-1],
        "length": len(str(a)),
        "name": random.choice(lists["names"]),
        "things": random.choice(lists["things"]),
    }
    return fill(random, parts["facts"], facts, SENTENCE_GAP[language])


def training(random: StableRandom, language: Language) -> str:
    """What Sojourn does, or a term of training, explained with an example."""
    lists, parts = words(language), phrases(language, "training")
    every = random.choice((20, 25, 40, 50, 100, 200, 250, 500))
    last_checkpoint = every * random.between(1, 90)
    vocab = random.choice(tuple(_LOSS_OF_GUESSING))
    name, friend = random.sample(lists["names"], 2)
    explanation = random.choice(parts["terms"] if random.chance(0.6) else parts["workflows"])
    facts = {
        "name": name,
        "friend": friend,
        "day": random.choice(lists["weekdays"]),
        "k": every,
        "kept": last_checkpoint,
        "step": last_checkpoint + random.between(1, every - 1),
        "lr": f"0.00{random.between(1, 99):02d}",
        "warm": random.between(2, 50) * 10,
        "m": random.between(1, 900),
        "batch": 2 ** random.between(2, 9),
        "vocab": vocab,
        "guess": _LOSS_OF_GUESSING[vocab],
        "page": random.between(300, 900),
        "loss": f"{random.between(1, 5)}.{random.between(0, 99):02d}",
        "gb": random.choice((8, 12, 16, 24, 32, 48, 80)),
        "hours": random.between(2, 60),
        "price": random.between(5, 300),
    }
    return fill(random, (*parts["opening"], *explanation, *parts["ending"]), facts, SENTENCE_GAP[language])


TEXT_TYPES: dict[str, Callable[[StableRandom, Language], str]] = {
    "story": story,
    "entry": entry,
    "how_to": how_to,
    "talk": dialogue,
    "numbers": number_facts,
    "training": training,
}
