"""What the user asks a plan for, as typed: a budget, a deadline, a size, a platform."""

from __future__ import annotations

from sojourn.catalog.facts import platforms
from sojourn.config.quantities import Duration, Money, Size
from sojourn.config.words import closest, shown
from sojourn.errors import UserError


def to_budget(text: str | None) -> Money | None:
    try:
        return None if text is None else Money.parse(text)
    except ValueError as error:
        raise UserError(f"--budget: “{shown(str(text))}”: {error}") from None


def to_seconds(text: str | None) -> float | None:
    try:
        return None if text is None else float(Duration.parse(text))
    except ValueError as error:
        raise UserError(f"--deadline: “{shown(str(text))}”: {error}") from None


def to_bytes(text: str) -> int:
    try:
        size = int(Size.parse(text))
    except ValueError as error:
        raise UserError(f"--fit: “{shown(text)}”: {error}") from None
    if size < 2**30:
        raise UserError(f"--fit: “{shown(text)}” is less than a GPU's own overhead; give at least 1GiB")
    return size


def known_platform(name: str | None) -> str | None:
    names = [place.name for place in platforms()]
    if name is not None and name not in names:
        raise UserError(
            f"--platform: no platform called “{shown(name)}”{closest(name, names)}; there are: {', '.join(names)}"
        )
    return name
