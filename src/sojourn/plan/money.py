"""What a run costs on a platform: sessions, weeks, money in the platform's own currency, disk."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from sojourn.catalog.platforms import PlatformFacts
from sojourn.catalog.prices import Price, currencies
from sojourn.catalog.staleness import with_age
from sojourn.catalog.tables import user_file
from sojourn.config.quantities import Money
from sojourn.errors import UserError

_SIGNS = {"CNY": "¥", "USD": "$", "EUR": "€", "GBP": "£"}
_WEEK = 168.0


@dataclass(frozen=True)
class End:
    """One end of the range that a bill lies in."""

    amount: float
    cny: float
    hours: float
    elapsed: float
    sessions: int
    weeks: int


@dataclass(frozen=True)
class Bill(End):
    """`hours` on the GPU, `elapsed` from start to end with the weeks that a quota makes one wait; `amount` of all.
    These are what is expected; `low` and `high` are where they may end."""

    platform: str
    title: str
    count: int
    per_hour: float
    currency: str
    seen: str
    low: End
    high: End
    notes: tuple[str, ...] = ()
    no_gpu_per_hour: float | None = None
    disk_suffices: bool = True


def money_text(amount: float, currency: str, most: float | None = None) -> str:
    """`most`: the upper end, where `amount` is the lower one."""
    low, high, sign = f"{amount:,.2f}", f"{amount if most is None else most:,.2f}", _SIGNS.get(currency)
    between = high if low == high else f"{low}–{high}"
    return f"{sign}{between}" if sign else f"{between} {currency}".strip()


def bill(
    price: Price, platform: PlatformFacts | None, seconds: float, again: float, own: Money | None = None,
    between: tuple[float, float] | None = None,
) -> Bill:  # fmt: skip
    """`again`: seconds that every further session pays to start; `own`: the user's price for an hour; `between`: the
    seconds that it may take."""
    session = platform.session_hours if platform else None
    quota = platform.weekly_gpu_hours if platform else None
    if own is not None:
        per_hour, currency, seen = float(own.amount), own.currency or price.currency, "your price"
    else:
        per_hour = price.per_hour if price.per_hour is not None else price.cny_per_hour
        currency, seen = price.currency, f"{price.source}, {with_age(price.month)}"

    def end(taken: float) -> End:
        hours, sessions = _sessions(taken / 3600, again / 3600, session)
        weeks = max(1, math.ceil(hours / quota - 1e-9)) if quota else 1
        elapsed = hours if weeks == 1 else (weeks - 1) * _WEEK + (hours - (weeks - 1) * (quota or 0.0))
        return End(per_hour * hours, in_cny(per_hour * hours, currency), hours, elapsed, sessions, weeks)

    usual, (low, high) = end(seconds), map(end, between or (seconds, seconds))
    notes = []
    if high.sessions > 1:
        notes.append(f"{_counts(low.sessions, high.sessions)} sessions of {session:g} h")
    if high.weeks > 1:
        notes.append(f"{_counts(low.weeks, high.weeks)} weeks at {quota:g} GPU-hours a week")
    return Bill(
        **vars(usual), platform=price.platform, title=platform.title if platform else "", count=price.count,
        per_hour=per_hour, currency=currency, seen=seen, low=low, high=high, notes=tuple(notes),
        no_gpu_per_hour=platform.no_gpu_per_hour if platform else None,
    )  # fmt: skip


def _counts(low: int, high: int) -> str:
    """Whoever may need two has to plan for two."""
    return str(high) if low in (1, high) else f"{low} to {high}"


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
        raise UserError(
            f"no rate for {currency} in the catalogue, which has {', '.join(rates)}; "
            f"add [currencies.{currency}] with `cny`, what one is worth in CNY, to {user_file()}"
        )
    return amount * rates[currency or "CNY"].cny


def within(one: Bill, budget: Money | None, deadline: float | None) -> bool:
    """Even if it takes as long as it may; `deadline` in seconds from now. Where two checkpoints have no room, a run
    cannot be kept."""
    if not one.disk_suffices:
        return False
    if budget is not None and one.high.cny > in_cny(float(budget.amount), budget.currency or one.currency):
        return False
    return deadline is None or 3600 * one.high.elapsed <= deadline


def with_disk(one: Bill, platform: PlatformFacts | None, least: float, usual: float) -> Bill:
    """Notes whether the platform's persistent disk holds so many bytes: `least` must fit, `usual` is what is set."""
    lasting = [disk for disk in platform.disks if disk.survives in ("stop", "release")] if platform else []
    if not lasting or any(disk.free_gb is None and disk.size_gb is None for disk in lasting):
        return one
    limits = [disk.size_gb for disk in lasting if disk.size_gb is not None]
    free = max((disk.free_gb for disk in lasting if disk.free_gb is not None), default=0.0)
    if limits and least > 1e9 * max(limits):
        note = f"its {max(limits):g} GB of disk are too few: two checkpoints take {least / 1e9:.0f} GB"
        return replace(one, notes=(*one.notes, note), disk_suffices=False)
    if limits and usual > 1e9 * max(limits):
        note = f"of {max(limits):g} GB of disk, checkpoints would take {usual / 1e9:.0f}: lower save.keep"
        return replace(one, notes=(*one.notes, note))
    if not limits and usual > 1e9 * free:
        return replace(one, notes=(*one.notes, f"checkpoints take {usual / 1e9:.0f} GB of disk, {free:g} GB are free"))
    return one
