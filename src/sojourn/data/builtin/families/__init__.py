"""The families of tasks by name: each draws a key, a prompt and its answer."""

from __future__ import annotations

from collections.abc import Callable

from sojourn.data.builtin.dice import Dice
from sojourn.data.builtin.families import about, arithmetic, copying, counting, dates, lookup, ordering
from sojourn.data.builtin.words import Language

Draw = Callable[[Dice, Language], tuple[str, str, str]]

FAMILIES: dict[str, Draw] = {
    "echo_number": copying.echo_number,
    "echo_phrase": copying.echo_phrase,
    "compare": ordering.compare,
    "add": arithmetic.add,
    "subtract": arithmetic.subtract,
    "sort": ordering.sort,
    "count": counting.count,
    "lookup": lookup.lookup,
    "date": dates.date,
    "weekday": dates.weekday,
    "month": dates.month,
    "about": about.about,
}
