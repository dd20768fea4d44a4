"""Kaggle's weekly GPU hours, as this laptop has used them: a session counts in full until it is known to have ended.

Kaggle's own count is asked first (`KaggleApi.quota`); this file is what is left where it does not answer, and what a
session that was started a minute ago will cost.
"""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from sojourn.catalog.platforms import platforms
from sojourn.run.home import home
from sojourn.run.ledger import is_amount
from sojourn.storage.files import read_json_object, write_json

_RESET_DAY = 5  # Saturday, 00:00 UTC
_KEPT = 200


def hours_file() -> Path:
    return home() / "remote" / "kaggle-hours.json"


def week_start(now: float) -> float:
    day = datetime.fromtimestamp(now, timezone.utc).replace(hour=0, minute=0, second=0, microsecond=0)
    return (day - timedelta(days=(day.weekday() - _RESET_DAY) % 7)).timestamp()


def weekly_hours() -> float:
    """Of the catalogue."""
    facts = next(row for row in platforms() if row.name == "kaggle")
    return facts.weekly_gpu_hours or 30.0


def session_hours() -> float:
    facts = next(row for row in platforms() if row.name == "kaggle")
    return facts.session_hours or 12.0


def used_hours(now: float) -> float:
    """This week: the part of each session since the quota was last reset."""
    start, used = week_start(now), 0.0
    for session in _sessions():
        begin, hours = float(session["started"]), float(session["hours"])
        used += max(0.0, begin / 3600 + hours - max(begin, start) / 3600)
    return used


def record(slug: str, hours: float, started: float) -> None:
    _save([*(one for one in _sessions() if one["slug"] != slug), {"slug": slug, "hours": hours, "started": started}])


def settle(slug: str, hours: float) -> None:
    """What a session really took."""
    _save([{**one, "hours": hours} if one["slug"] == slug else one for one in _sessions()])


def _sessions() -> list[dict[str, Any]]:
    found = read_json_object(hours_file()).get("sessions")
    return [
        one
        for one in (found if isinstance(found, list) else [])
        if isinstance(one, dict) and "slug" in one and all(is_amount(one.get(key)) for key in ("hours", "started"))
    ]


def _save(sessions: list[dict[str, Any]]) -> None:
    hours_file().parent.mkdir(parents=True, exist_ok=True)
    write_json(hours_file(), {"sessions": sessions[-_KEPT:]})
