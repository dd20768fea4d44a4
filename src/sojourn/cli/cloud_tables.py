"""Tables of offers and machines for `sojourn cloud`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sojourn.remote.platforms.base import Cloud, Instance, Offer

_MOST_LINES = 20  # of each platform; Vast has hundreds


def offer_lines(found: list[Offer], asked: Iterable[Cloud], gpu: str | None, every: bool) -> list[str]:
    lines, left, left_out = [], {cloud.name: _MOST_LINES for cloud in asked}, 0
    for offer in found:
        left[offer.platform] -= 1
        if left[offer.platform] < 0 and not every:
            left_out += 1
            continue
        stock = {True: "yes", False: "none", None: "?"}[offer.available]
        price = money(offer.price_per_hour, offer.currency) or "?"
        where = f"{offer.region} (spot)" if offer.spot else offer.region
        lines.append((offer.platform, offer.id, card(offer.gpu, offer.count), price, stock, where, offer.note))
    if not lines:
        return [f"no offers of {gpu or 'this kind'} on {', '.join(left)}"]
    shown = table([("PLATFORM", "OFFER", "GPU", "PRICE/H", "FREE", "WHERE", "NOTE"), *lines])
    return [*shown, f"{left_out} dearer ones are left out: --all shows them"] if left_out else shown


def describe_offer(offer: Offer) -> str:
    price = (
        f"at {money(offer.price_per_hour, offer.currency)} an hour"
        if offer.price_per_hour
        else "at a price not known yet"
    )
    return " ".join(part for part in (card(offer.gpu, offer.count), f"({offer.id})", price, offer.region) if part)


def card(gpu: str | None, count: int) -> str:
    return "-" if not gpu else f"{count} x {gpu}" if count > 1 else gpu


def instance_lines(found: list[Instance]) -> list[str]:
    rows = [
        (
            one.platform,
            one.id,
            one.name or "-",
            one.message or one.state,
            card(one.gpu, one.count),
            money(one.price_per_hour, one.currency) or "-",
            one.ssh_line or "-",
        )
        for one in found
    ]
    return table([("PLATFORM", "ID", "NAME", "STATE", "GPU", "PRICE/H", "SSH"), *rows])


def money(amount: float | None, currency: str) -> str:
    from sojourn.plan.money import money_text

    return "" if amount is None else money_text(amount, currency)


def table(rows: list[tuple[str, ...]]) -> list[str]:
    from sojourn.cli.runs import _width

    widths = [max(_width(row[column]) for row in rows) for column in range(len(rows[0]))]
    padded = [[cell + " " * (size - _width(cell)) for cell, size in zip(row, widths, strict=True)] for row in rows]
    return ["  ".join(cells).rstrip() for cells in padded]
