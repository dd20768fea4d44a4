"""How old a price or an exchange rate is, by its own date. Older than 90 days it is marked wherever it is shown."""

from __future__ import annotations

import calendar
import re
from datetime import date, datetime, timezone

STALE_DAYS = 90


def today() -> date:
    return datetime.now(timezone.utc).date()


def age_in_days(when: str) -> int | None:
    """Of `2026-11-09`, or of `2026-11`, which counts as its last day; None where it is no date."""
    found = re.match(r"(\d{4})-(\d\d)(?:-(\d\d))?", when)
    if found is None:
        return None
    year, month = int(found[1]), int(found[2])
    try:
        day = int(found[3]) if found[3] else calendar.monthrange(year, month)[1]
        return (today() - date(year, month, day)).days
    except (ValueError, calendar.IllegalMonthError):
        return None


def is_stale(when: str) -> bool:
    age = age_in_days(when)
    return age is not None and age > STALE_DAYS


def with_age(when: str) -> str:
    """The date as it is shown: `2026-05-08, stale: 194 days old`."""
    return f"{when}, stale: {age_in_days(when)} days old" if is_stale(when) else when
