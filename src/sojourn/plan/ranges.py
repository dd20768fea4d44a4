"""Planned times, costs, speeds and counts as text: ranges, and no more digits than are known."""

from __future__ import annotations

import math

from sojourn.catalog.gpus import Gpu
from sojourn.estimate.uncertainty import MEASURED
from sojourn.plan.money import Bill, money_text

_UNITS = ((1.0, "h"), (1 / 60, "m"), (1 / 3600, "s"))  # in hours


def time_text(hours: float) -> str:
    return time_range(hours, hours)


def time_range(low: float, high: float) -> str:
    """3.1–4.0h, both ends in the unit of the upper one."""
    size, unit = next(((size, unit) for size, unit in _UNITS if high >= size), _UNITS[-1])
    digits = 1 if unit == "h" and high < 10 else 0
    return _between(*(f"{end / size:,.{digits}f}" for end in (low, high))) + unit


def cost_range(bill: Bill) -> str:
    if bill.high.amount == 0:
        return "free"
    return money_text(bill.low.amount, bill.currency, bill.high.amount)


def count_text(number: float) -> str:
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.2f}{unit}" if number < 10 * size else f"{number / size:.1f}{unit}"
    return f"{number:.0f}"


def rate_text(tokens_per_second: float, gpu: Gpu, count: int = 1) -> str:
    return f"{known_digits(tokens_per_second, gpu, count):,.0f}"


def known_digits(value: float, gpu: Gpu, count: int = 1) -> float:
    """Two significant digits; three on a card that was measured."""
    if value <= 0:
        return value
    measured = gpu.rates == MEASURED and (count == 1 or gpu.allreduce_gbs is not None)
    step = 10.0 ** (math.floor(math.log10(value)) - (2 if measured else 1))
    return round(value / step) * step


def _between(low: str, high: str) -> str:
    return high if low == high else f"{low}–{high}"
