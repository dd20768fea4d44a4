"""Prices that a platform's API gave within the last day: a file that `sojourn cloud offers --save` writes."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from sojourn.expand_user import expand_user

VALID_HOURS = 24.0
_MOST_BYTES = 1 << 22


@dataclass(frozen=True)
class LivePrice:
    """What `count` GPUs cost per hour on a platform at `time` (Unix seconds)."""

    platform: str
    gpu: str
    count: int
    per_hour: float
    currency: str
    source: str
    time: float

    @property
    def when(self) -> str:
        return datetime.fromtimestamp(self.time).astimezone().strftime("%Y-%m-%d %H:%M")


def live_file() -> Path:
    """In SOJOURN_HOME where that is set, else in the user's cache folder."""
    from platformdirs import user_cache_dir

    home = os.environ.get("SOJOURN_HOME")
    return (expand_user(home) if home else Path(user_cache_dir("sojourn", appauthor=False))) / "live-prices.json"


def live_prices(now: float | None = None) -> list[LivePrice]:
    """Those of the last day; a file that cannot be read has none."""
    path = live_file()
    try:
        facts = path.stat()
    except OSError:
        return []
    if facts.st_size > _MOST_BYTES:
        return []
    oldest = (time.time() if now is None else now) - 3600 * VALID_HOURS
    return [price for price in _read(path, facts.st_mtime_ns) if price.time >= oldest]


def save_live_prices(found: Iterable[LivePrice]) -> Path:
    """A new price takes the place of the earlier one of that card on that platform."""
    new = {(price.platform, price.gpu): price for price in found}
    kept = [price for price in live_prices() if (price.platform, price.gpu) not in new]
    path = live_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"version": 1, "prices": [asdict(price) for price in (*kept, *new.values())]}, indent=1)
    written = path.with_name(f".{path.name}.{os.getpid()}")
    written.write_text(text + "\n", encoding="utf-8")
    written.replace(path)
    return path


@lru_cache(4)
def _read(path: Path, _: int) -> tuple[LivePrice, ...]:
    """Once for each version of the file: a plan asks for prices of every GPU."""
    with suppress(OSError, ValueError, RecursionError, AttributeError, TypeError):
        rows = json.loads(path.read_text(encoding="utf-8")).get("prices", [])
        return tuple(price for row in rows if (price := _price(row)) is not None)
    return ()


def _price(row: Any) -> LivePrice | None:
    kinds = {
        "platform": str,
        "gpu": str,
        "count": int,
        "per_hour": float,
        "currency": str,
        "source": str,
        "time": float,
    }
    if not isinstance(row, dict) or not all(type(row.get(key)) is kind for key, kind in kinds.items()):
        return None
    price = LivePrice(**{field.name: row[field.name] for field in fields(LivePrice)})
    return price if 0 < price.count < 1000 and 0 < price.per_hour < 1e6 and 0 < price.time < 1e11 else None
