"""Typed quantities as people write them: durations, sizes, token counts, money. Each parses text and prints it back."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from typing import Any, ClassVar

from pydantic_core import core_schema

_SECONDS = {"d": 86400, "h": 3600, "m": 60, "s": 1}
_BYTES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_COUNTS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}
_CURRENCIES = {"¥": "CNY", "￥": "CNY", "元": "CNY", "RMB": "CNY", "YUAN": "CNY", "$": "USD", "€": "EUR", "£": "GBP"}
_SIGNS = {"CNY": "¥", "USD": "$", "EUR": "€", "GBP": "£"}
_LARGEST = 10**18

_NUMBER = r"\d+(?:\.\d+)?"


def _schema(parse: Callable[[Any], Any]) -> core_schema.CoreSchema:
    written = core_schema.plain_serializer_function_ser_schema(_written, when_used="json")
    return core_schema.no_info_plain_validator_function(parse, serialization=written)


def _written(value: Any) -> Any:
    text = str(value)
    return int(text) if text.isdigit() else text


def _plain_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _bounded(number: Fraction, what: str) -> Fraction:
    if not 0 <= number <= _LARGEST:
        raise ValueError(f"{what} must lie between 0 and 10^18")
    return number


def _fraction(value: Any, what: str) -> Fraction:
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{what} must be finite")
    return _bounded(Fraction(value), what)


class Duration(float):
    """Seconds, written `90s`, `10m`, `11h30m`, `2d`; a bare number is seconds."""

    allowed: ClassVar[str] = "a duration such as 90s, 10m or 11h30m"

    @classmethod
    def parse(cls, value: Any) -> Duration:
        if _plain_number(value):
            return cls(_fraction(value, "a duration"))
        if isinstance(value, str):
            text = value.strip().lower().replace(" ", "")
            if re.fullmatch(_NUMBER, text):
                return cls(_fraction(text, "a duration"))
            if text and re.fullmatch(rf"(?:{_NUMBER}d)?(?:{_NUMBER}h)?(?:{_NUMBER}m)?(?:{_NUMBER}s)?", text):
                parts = re.findall(rf"({_NUMBER})([dhms])", text)
                total = sum((Fraction(number) * _SECONDS[unit] for number, unit in parts), Fraction(0))
                return cls(_bounded(total, "a duration"))
        raise ValueError(f"allowed: {cls.allowed}")

    def __str__(self) -> str:
        whole = int(self)
        if whole != self:
            return f"{Decimal(repr(float(self))):f}s"
        if whole == 0:
            return "0s"
        text = ""
        for unit, seconds in list(_SECONDS.items())[1:]:
            count, whole = divmod(whole, seconds)
            text += f"{count}{unit}" if count else ""
        return text

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> core_schema.CoreSchema:
        return _schema(cls.parse)


class _Whole(int):
    """A whole number with a unit suffix; subclasses say which suffixes there are."""

    allowed: ClassVar[str]
    units: ClassVar[dict[str, int]]
    shown: ClassVar[tuple[tuple[str, int], ...]]
    pattern: ClassVar[str]

    @classmethod
    def parse(cls, value: Any) -> Any:
        number: Fraction | None = None
        if _plain_number(value):
            number = _fraction(value, "the number")
        elif isinstance(value, str):
            found = re.fullmatch(cls.pattern, value.strip().replace("_", "").replace(",", ""), re.IGNORECASE)
            if found:
                number = _bounded(Fraction(found[1]) * cls.units[found[2].lower()], "the number")
        if number is None or number.denominator != 1:
            raise ValueError(f"allowed: {cls.allowed}")
        return cls(number)

    def __str__(self) -> str:
        for unit, size in self.shown:
            if self and self % size == 0:
                return f"{int(self) // size}{unit}"
        return int.__repr__(self)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> core_schema.CoreSchema:
        return _schema(cls.parse)


class Size(_Whole):
    """Bytes, written `24GiB`, `500MB`; a bare number is bytes."""

    allowed = "a size such as 500MB or 24GiB"
    units = _BYTES
    shown = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("GB", 10**9), ("MB", 10**6))
    pattern = rf"({_NUMBER})\s*([kmgt]?i?)b?"


class Count(_Whole):
    """How many (tokens, examples, parameters), written `2M`, `1.5B`, `20k` or plainly."""

    allowed = "a count such as 5000, 20k, 2M or 1.5B"
    units = _COUNTS
    shown = (("T", 10**12), ("B", 10**9), ("M", 10**6), ("k", 10**3))
    pattern = rf"({_NUMBER})\s*([kmbgt]?)"


@dataclass(frozen=True)
class Money:
    """An amount with its currency, written `30 CNY`, `¥30`, `$5`; without one it is in the currency of the price."""

    allowed: ClassVar[str] = "an amount such as 30, 30 CNY, ¥30 or $5"
    amount: Decimal
    currency: str = ""

    @classmethod
    def parse(cls, value: Any) -> Money:
        if isinstance(value, Money):
            return value
        if _plain_number(value):
            value = repr(value)
        if isinstance(value, str):
            text = value.strip().removesuffix("/h")
            sign, word = r"[¥￥$€£元]", r"[A-Za-z]{3,4}|元"
            found = re.fullmatch(rf"({sign}|{word})?\s*({_NUMBER})\s*({word})?", text)
            if found and not (found[1] and found[3]):
                mark = (found[1] or found[3] or "").upper()
                currency = _CURRENCIES.get(mark, mark)
                try:
                    amount = Decimal(found[2])
                except InvalidOperation:
                    amount = Decimal(-1)
                if 0 <= amount <= 10**12 and len(currency) in (0, 3):
                    return cls(amount, currency)
        raise ValueError(f"allowed: {cls.allowed}")

    def __str__(self) -> str:
        sign = _SIGNS.get(self.currency)
        number = f"{self.amount:f}"
        return f"{sign}{number}" if sign else f"{number} {self.currency}".strip()

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> core_schema.CoreSchema:
        return _schema(cls.parse)
