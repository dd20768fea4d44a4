"""Durations, sizes, counts and money: what people write is understood, and what is printed reads back the same."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sojourn.config.quantities import Count, Duration, Money, Size

KINDS = (Duration, Size, Count, Money)
MARKS = ("¥", "￥", "$", "€", "£", "元", "CNY", "usd", "RMB", "yuan", "JPY")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90s", 90),
        ("10m", 600),
        ("11h30m", 41400),
        ("2d", 172800),
        ("1d 2h 3m 4s", 93784),
        ("1.5h", 5400),
        ("0.5s", 0.5),
        (" 5M ", 300),
        ("45", 45),
        (45, 45),
        (0.25, 0.25),
        (0, 0),
    ],
)
def test_durations(text: Any, seconds: float) -> None:
    assert Duration.parse(text) == seconds


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("24GiB", 24 * 2**30),
        ("24gib", 24 * 2**30),
        ("500MB", 500 * 10**6),
        ("500 mb", 500 * 10**6),
        ("1.5GiB", 3 * 2**29),
        ("100kB", 10**5),
        ("4Ki", 4096),
        ("7B", 7),
        ("1,024", 1024),
        ("1_000_000", 10**6),
        (12, 12),
        (1e6, 10**6),
    ],
)
def test_sizes(text: Any, size: int) -> None:
    assert Size.parse(text) == size


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("20k", 20_000),
        ("100K", 100_000),
        ("2M", 2 * 10**6),
        ("1.5B", 15 * 10**8),
        ("1,234,567", 1_234_567),
        ("5000", 5000),
        (1e3, 1000),
        (0, 0),
    ],
)
def test_counts(text: Any, count: int) -> None:
    assert Count.parse(text) == count


@pytest.mark.parametrize(
    ("text", "amount", "currency"),
    [
        ("30", "30", ""),
        (30, "30", ""),
        (2.19, "2.19", ""),
        (1e-7, "0.0000001", ""),
        ("30 CNY", "30", "CNY"),
        ("30cny", "30", "CNY"),
        ("CNY 30", "30", "CNY"),
        ("¥30", "30", "CNY"),
        ("￥2.50", "2.5", "CNY"),
        ("30元", "30", "CNY"),
        ("30 RMB", "30", "CNY"),
        ("¥30 CNY", "30", "CNY"),
        ("$5", "5", "USD"),
        ("€0.34", "0.34", "EUR"),
        ("1,000 JPY", "1000", "JPY"),
    ],
)
def test_money(text: Any, amount: str, currency: str) -> None:
    assert Money.parse(text) == Money(Decimal(amount), currency)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Duration(41400), "11h30m"),
        (Duration(0), "0s"),
        (Duration(172800), "48h"),
        (Duration(0.5), "0.5s"),
        (Size(24 * 2**30), "24GiB"),
        (Size(20 * 10**6), "20MB"),
        (Size(10**5), "100kB"),
        (Size(7), "7"),
        (Size(0), "0"),
        (Count(20_000), "20k"),
        (Count(1_500_000_000), "1500M"),
        (Count(8192), "8192"),
        (Money(Decimal("30"), "CNY"), "¥30"),
        (Money(Decimal("2.19"), "JPY"), "2.19 JPY"),
        (Money(Decimal("30")), "30"),
    ],
)
def test_how_quantities_are_printed(value: Any, text: str) -> None:
    assert str(value) == text and f"{value}" == text


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "garbage",
    [
        *("", " ", "-1", "+1", "abc", "1,5", "1,00", "1__0", "1.", ".5", "1e3", "5i", "5ib", "1h2d", "5 5", "nan"),
        *("5 bananas", "$5 CNY", "30 XYZ", "5\n5", "１２ 3", "9" * 5000, "1" * 30, "🚀", "5/h", "\0", "0x10"),
        *(None, True, False, [], {}, (), b"5", float("nan"), float("inf"), -float("inf"), -1, -0.5, 10**400, 10**5000),
    ],
    ids=lambda value: ascii(value)[:20] if not isinstance(value, int) or value < 9 else "huge",
)  # fmt: skip
def test_garbage_is_a_value_error(kind: Any, garbage: Any) -> None:
    with pytest.raises(ValueError):
        kind.parse(garbage)


@given(st.floats(0, 1e18, allow_nan=False) | st.integers(0, 10**18))
def test_a_duration_reads_back_as_printed(seconds: float) -> None:
    value = Duration(seconds)
    assert Duration.parse(str(value)) == value


@given(
    st.integers(0, 10**18) | st.builds(lambda n, unit: n * unit, st.integers(0, 999), st.sampled_from([10**3, 2**30]))
)
def test_a_size_and_a_count_read_back_as_printed(number: int) -> None:
    assert Size.parse(str(Size(number))) == number
    assert Count.parse(str(Count(number))) == number


@given(st.decimals(0, 10**12, allow_nan=False, allow_infinity=False, places=4), st.sampled_from(["", *MARKS]))
def test_money_reads_back_as_printed(amount: Decimal, mark: str) -> None:
    value = Money.parse(f"{amount:f} {mark}")
    assert value.amount == amount and Money.parse(str(value)) == value


anything = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters())
    | st.text("0123456789.,_-+dhmskKMGTiB ¥$元CNY/eE", max_size=12)
    | st.lists(st.integers())
    | st.binary()
)


@settings(max_examples=300)
@given(st.sampled_from(KINDS), anything)
def test_whatever_is_given_is_a_quantity_or_a_value_error(kind: Any, value: Any) -> None:
    try:
        parsed = kind.parse(value)
    except ValueError:
        return
    assert kind.parse(str(parsed)) == parsed
