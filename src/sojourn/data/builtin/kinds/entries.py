"""Encyclopaedia entries about towns, animals and tools that do not exist; the facts of an entry agree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sojourn.data.builtin.dice import Dice
from sojourn.data.builtin.tongue import Tongue
from sojourn.data.builtin.weave import Plot, weave


@dataclass(frozen=True)
class EntryWords:
    """`animal_facts` are in the order in which the language draws them: another order would be other texts."""

    name_parts: tuple[Sequence[str], Sequence[str], Sequence[str]]
    rivers: Sequence[str]
    lands: Sequence[str]
    sides: Sequence[str]
    goods: Sequence[str]
    sights: Sequence[str]
    animal_facts: Mapping[str, Sequence[str]]
    habits: Sequence[str]
    tools: Sequence[tuple[str, str, str]]  # with what it is for, and who uses it
    materials: Sequence[str]
    town: Plot
    animal: Plot
    tool: Plot


def entry(dice: Dice, tongue: Tongue, words: EntryWords) -> str:
    facts, told = dice.pick(((_town, words.town), (_animal, words.animal), (_tool, words.tool)))
    return weave(dice, told, facts(dice, tongue, words), tongue.space)


def _name(dice: Dice, words: EntryWords) -> str:
    return "".join(dice.pick(part) for part in words.name_parts)


def _few(dice: Dice, tongue: Tongue, options: Sequence[str]) -> str:
    return tongue.listed(dice.distinct(options, dice.between(2, 3)))


def _places(dice: Dice, tongue: Tongue, words: EntryWords) -> dict[str, object]:
    year = dice.between(900, 1900)
    return {
        "town": _name(dice, words),
        "other": _name(dice, words),
        "year": year,
        "y2": dice.between(year + 5, 1990),
        "k": dice.between(2, 40),
        "m": dice.between(5, 90),
        "month": dice.pick(tongue.months),
        "cm": dice.between(4, 120),
        "years": dice.between(2, 30),
    }


def _town(dice: Dice, tongue: Tongue, words: EntryWords) -> dict[str, object]:
    facts = _places(dice, tongue, words) | {
        "third": _name(dice, words),
        "river": dice.pick(words.rivers),
        "land": dice.pick(words.lands),
        "people": dice.between(4, 990) * 100,
        "km": dice.between(4, 180),
        "side": dice.pick(words.sides),
        "goods": _few(dice, tongue, words.goods),
        "goods2": dice.pick(words.goods),
    }
    facts["sight"], facts["sight2"] = (sight.format_map(facts) for sight in dice.distinct(words.sights, 2))
    return facts


def _animal(dice: Dice, tongue: Tongue, words: EntryWords) -> dict[str, object]:
    facts = _places(dice, tongue, words)
    for name, options in words.animal_facts.items():
        facts[name] = _few(dice, tongue, options) if name == "food" else dice.pick(options)
    facts["young"] = dice.between(2, 9)
    facts["habit"], facts["habit2"] = (habit.format_map(facts) for habit in dice.distinct(words.habits, 2))
    return facts


def _tool(dice: Dice, tongue: Tongue, words: EntryWords) -> dict[str, object]:
    material, other_material = dice.distinct(words.materials, 2)
    tool, use, trade = dice.pick(words.tools)
    return _places(dice, tongue, words) | {
        "tool": tool,
        "material": material,
        "material2": other_material,
        "use": use,
        "trade": trade,
        "parts": dice.between(3, 19),
        "kg": dice.between(2, 60),
    }
