"""Facts told in the prompt, one of them asked for."""

from __future__ import annotations

from sojourn.data.builtin.dice import Dice
from sojourn.data.builtin.words import NAMES, NAMES_ZH, THINGS, THINGS_ZH, Language

_FACT = {"en": "{name} has {n} {thing}. ", "zh": "{name}有{n}个{thing}。"}
_ASK = {
    "en": (
        "How many {thing} does {name} have?",
        "How many {thing} has {name}?",
        "Tell me how many {thing} {name} has.",
    ),
    "zh": ("{name}有几个{thing}？", "请问{name}有多少个{thing}？", "{name}的{thing}有几个？"),
}


def lookup(dice: Dice, language: Language) -> tuple[str, str, str]:
    """The key is all the facts and the name asked for: two or three people with different things."""
    names, things = (NAMES, THINGS) if language == "en" else (NAMES_ZH, THINGS_ZH)
    people = dice.between(2, 3)
    facts = [
        {"name": name, "thing": thing, "n": str(dice.between(2, 99))}
        for name, thing in zip(dice.distinct(names, people), dice.distinct(things, people), strict=True)
    ]
    asked = dice.pick(facts)
    told = "".join(_FACT[language].format_map(fact) for fact in facts)
    key = ",".join(f"{fact['name']} {fact['n']} {fact['thing']}" for fact in facts)
    return f"{key}/{asked['name']}", told + dice.pick(_ASK[language]).format_map(asked), asked["n"]
