"""What the user asks a plan for, as typed: a budget, a deadline, a size, a platform."""

from __future__ import annotations

from collections.abc import Mapping

from sojourn.catalog.platforms import platforms
from sojourn.config.messages import did_you_mean, printable
from sojourn.config.quantities import Duration, Money, Size
from sojourn.errors import UserError


def to_budget(text: str | None, option: str = "--budget") -> Money | None:
    try:
        return None if text is None else Money.parse(text)
    except ValueError as error:
        raise UserError(f"{option}: “{printable(str(text))}”: {error}") from None


def to_seconds(text: str | None, option: str = "--deadline") -> float | None:
    try:
        return None if text is None else float(Duration.parse(text))
    except ValueError as error:
        raise UserError(f"{option}: “{printable(str(text))}”: {error}") from None


def to_bytes(text: str) -> int:
    try:
        size = int(Size.parse(text))
    except ValueError as error:
        raise UserError(f"--fit: “{printable(text)}”: {error}") from None
    if size < 2**30:
        unit = f", so write {text.strip()}GiB" if text.strip().isdigit() and size else "; give at least 1GiB"
        raise UserError(f"--fit: “{printable(text)}” is {size:,} bytes, less than a GPU needs for itself{unit}")
    return size


def known_platform(name: str | None) -> str | None:
    names = [platform.name for platform in platforms()]
    if name is None:
        return None
    meant = next((known for known in names if known.casefold() == name.strip().casefold()), None)
    if meant is None:
        raise UserError(
            f"--platform: no platform called “{printable(name)}”{did_you_mean(name, names)} (of {', '.join(names)})"
        )
    return meant


def alone(option: str, asked: object, others: Mapping[str, object]) -> None:
    """`--fit` and `--serve` ask about memory and about nothing else."""
    given = [name for name, value in others.items() if value]
    if asked and given:
        raise UserError(f"{option}: a plan of memory alone has no {given[0]}; leave out one of the two")
