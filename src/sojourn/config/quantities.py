"""Durations, sizes, counts and money as people write them. Each type parses text and prints it back."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any, ClassVar

from pydantic_core import core_schema
from typing_extensions import Self

_SECONDS = {"d": 86400, "h": 3600, "m": 60, "s": 1}
_BYTES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_COUNTS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}
_SIGNS = {"CNY": "¥", "USD": "$", "EUR": "€", "GBP": "£"}
_CODES = {
    *("CNY", "USD", "EUR", "GBP", "JPY", "KRW", "INR", "HKD", "TWD", "SGD", "AUD", "CAD", "CHF", "SEK", "NOK", "DKK"),
    *("PLN", "BRL", "MXN", "RUB", "TRY", "ZAR", "THB", "IDR", "VND", "MYR", "PHP", "AED", "ILS", "NZD"),
}
_CURRENCIES = {
    **{code: code for code in _CODES},
    **{sign: code for code, sign in _SIGNS.items()},
    **dict.fromkeys(("￥", "元", "RMB", "YUAN"), "CNY"),
}
_LARGEST = 10**18

_NUMBER = r"\d+(?:\.\d+)?"
_GROUPED = r"(?:\d{1,3}(?:,\d{3})+|\d+(?:_\d+)*)(?:\.\d+)?"  # 1,000 and 1_000; never 1,5, which may mean 1.5


def _schema(parse: Callable[[Any], Any]) -> core_schema.CoreSchema:
    written = core_schema.plain_serializer_function_ser_schema(_written, when_used="json")
    return core_schema.no_info_plain_validator_function(parse, serialization=written)


def _written(value: Any) -> Any:
    text = str(value)
    return int(text) if text.isdigit() else text


def _plain_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _fraction(value: Any, unit: int = 1) -> Fraction:
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("must be finite")
    if isinstance(value, str):
        value = value.replace(",", "").replace("_", "")
    number = Fraction(value) * unit
    if not 0 <= number <= _LARGEST:
        raise ValueError("must lie between 0 and 10^18")
    return number


class Duration(float):
    """Seconds, written `90s`, `10m`, `11h30m`, `2d`; a bare number is seconds."""

    allowed: ClassVar[str] = "a duration such as 90s, 10m or 11h30m"

    @classmethod
    def parse(cls, value: Any) -> Self:
        if _plain_number(value):
            return cls(_fraction(value))
        text = value.strip().lower() if isinstance(value, str) else ""
        if re.fullmatch(_NUMBER, text):
            return cls(_fraction(text))
        if text and re.fullmatch("".join(rf"(?:{_NUMBER}\s*{unit}\s*)?" for unit in _SECONDS), text):
            parts = re.findall(rf"({_NUMBER})\s*([dhms])", text)
            return cls(_fraction(sum(_fraction(number, _SECONDS[unit]) for number, unit in parts)))
        raise ValueError(f"allowed: {cls.allowed}")

    def __str__(self) -> str:
        whole = int(self)
        if whole != float(self):
            return f"{Decimal(repr(float(self))):f}s"
        text = ""
        for unit in "hms":
            count, whole = divmod(whole, _SECONDS[unit])
            text += f"{count}{unit}" if count else ""
        return text or "0s"

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> core_schema.CoreSchema:
        return _schema(cls.parse)


class _IntWithUnit(int):
    """A whole number with a unit suffix; subclasses define the suffixes."""

    allowed: ClassVar[str]
    units: ClassVar[dict[str, int]]
    shown: ClassVar[dict[str, int]]
    pattern: ClassVar[str]

    @classmethod
    def parse(cls, value: Any) -> Self:
        number: Fraction | None = None
        if _plain_number(value):
            number = _fraction(value)
        elif isinstance(value, str) and (found := re.fullmatch(cls.pattern, value.strip(), re.IGNORECASE)):
            number = _fraction(found[1], cls.units[found[2].lower()])
        if number is None or number.denominator != 1:
            raise ValueError(f"allowed: {cls.allowed}")
        return cls(number)

    def __str__(self) -> str:
        for unit, size in self.shown.items():
            if self and self % size == 0:
                return f"{int(self) // size}{unit}"
        return int.__repr__(self)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> core_schema.CoreSchema:
        return _schema(cls.parse)


class Size(_IntWithUnit):
    """Bytes, written `24GiB`, `500MB`; a bare number is bytes."""

    allowed = "a size such as 500MB or 24GiB"
    units = _BYTES
    shown: ClassVar = {"TiB": 2**40, "GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "GB": 10**9, "MB": 10**6, "kB": 10**3}
    pattern = rf"({_GROUPED})\s*((?:[kmgt]i?)?)b?"


class Count(_IntWithUnit):
    """How many (tokens, examples, parameters), written `2M`, `1.5B`, `20k` or plainly."""

    allowed = "a count such as 5000, 20k, 2M or 1.5B"
    units = _COUNTS
    shown: ClassVar = {"T": 10**12, "B": 10**9, "M": 10**6, "k": 10**3}
    pattern = rf"({_GROUPED})\s*([kmbgt]?)"


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
            value = f"{Decimal(repr(value)):f}"  # nan and inf become text that is no amount
        mark = r"[¥￥$€£元]|[A-Za-z]{3,4}"
        text = value.strip() if isinstance(value, str) else ""
        if found := re.fullmatch(rf"({mark})?\s*({_GROUPED})\s*({mark})?", text):
            marks = {_CURRENCIES.get(word.upper()) for word in (found[1], found[3]) if word}
            amount = Decimal(found[2].replace(",", "").replace("_", ""))
            if amount <= 10**12 and len(marks) <= 1 and None not in marks:
                return cls(amount, "".join(filter(None, marks)))
        raise ValueError(f"allowed: {cls.allowed}")

    def __str__(self) -> str:
        sign = _SIGNS.get(self.currency)
        number = f"{self.amount:f}"
        return f"{sign}{number}" if sign else f"{number} {self.currency}".strip()

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> core_schema.CoreSchema:
        return _schema(cls.parse)
