"""What a run costs on a platform: sessions, weeks, money in the platform's own currency, disk."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sojourn.catalog.facts import PlatformFacts, Price, currencies
from sojourn.config.quantities import Money
from sojourn.errors import UserError

_SIGNS = {"CNY": "¥", "USD": "$", "EUR": "€", "GBP": "£"}
_WEEK = 168.0


@dataclass(frozen=True)
class Bill:
    """`hours` on the GPU, `elapsed` from start to end with the weeks that a quota makes one wait; `amount` of all."""

    platform: str
    title: str
    count: int
    per_hour: float
    currency: str
    amount: float
    cny: float
    hours: float
    elapsed: float
    sessions: int
    weeks: int
    seen: str
    notes: tuple[str, ...] = ()
    no_gpu_per_hour: float | None = None

    @property
    def shown(self) -> str:
        return "free" if self.amount == 0 else money_text(self.amount, self.currency)


def money_text(amount: float, currency: str) -> str:
    sign = _SIGNS.get(currency)
    return f"{sign}{amount:,.2f}" if sign else f"{amount:,.2f} {currency}".strip()


def bill(price: Price, place: PlatformFacts | None, seconds: float, again: float, own: Money | None = None) -> Bill:
    """`again`: seconds that every further session pays to start; `own`: the user's price for an hour."""
    session = place.session_hours if place else None
    quota = place.weekly_gpu_hours if place else None
    hours, sessions = _sessions(seconds / 3600, again / 3600, session)
    weeks = max(1, math.ceil(hours / quota - 1e-9)) if quota else 1
    elapsed = hours if weeks == 1 else (weeks - 1) * _WEEK + (hours - (weeks - 1) * (quota or 0.0))
    if own is not None:
        per_hour, currency, seen = float(own.amount), own.currency or price.currency, "your price"
    else:
        per_hour = price.per_hour if price.per_hour is not None else price.cny_per_hour
        currency, seen = price.currency, f"{price.source}, {price.month}"
    notes = []
    if sessions > 1:
        notes.append(f"{sessions} sessions of {session:g} h")
    if weeks > 1:
        notes.append(f"{weeks} weeks at {quota:g} GPU-hours a week")
    return Bill(
        price.platform, place.title if place else price.platform, price.count, per_hour, currency, per_hour * hours,
        in_cny(per_hour * hours, currency), hours, elapsed, sessions, weeks, seen, tuple(notes),
        place.no_gpu_per_hour if place else None,
    )  # fmt: skip


def _sessions(hours: float, again: float, session: float | None) -> tuple[float, int]:
    """Hours in all, and how many sessions: each after the first starts anew."""
    if session is None or hours <= session:
        return hours, 1
    useful = max(0.1, session - again)
    count = 1 + math.ceil((hours - session) / useful - 1e-9)
    return hours + (count - 1) * again, count


def in_cny(amount: float, currency: str) -> float:
    rates = currencies()
    if currency and currency not in rates:
        raise UserError(f"no rate for {currency} in the catalogue; it has {', '.join(rates)}")
    return amount * rates[currency or "CNY"].cny


def within(one: Bill, budget: Money | None, deadline: float | None) -> bool:
    """`deadline` in seconds from now."""
    if budget is not None and one.cny > in_cny(float(budget.amount), budget.currency or one.currency):
        return False
    return deadline is None or 3600 * one.elapsed <= deadline


def disk_notes(place: PlatformFacts | None, needed: float) -> list[str]:
    """What the platform's lasting disk says to so many bytes."""
    if place is None:
        return []
    lasting = [disk for disk in place.disks if disk.survives in ("stop", "release")]
    limits = [disk.size_gb for disk in lasting if disk.size_gb is not None]
    gb = needed / 1e9
    if limits and gb > max(limits):
        return [f"needs {gb:.0f} GB of disk, {place.title} keeps {max(limits):g} GB"]
    free = [disk.free_gb for disk in lasting if disk.free_gb is not None]
    open_ended = any(disk.free_gb is None and disk.size_gb is None for disk in lasting)
    if free and not open_ended and gb > max(free):
        return [f"needs {gb:.0f} GB of disk, of which {max(free):g} GB are free of charge"]
    return []
