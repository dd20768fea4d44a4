"""What GPUs cost per hour on each platform, and the exchange rates to compare them by."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sojourn.catalog.gpus import Gpu, find_gpu, gpus, is_same_model
from sojourn.catalog.live_prices import live_prices
from sojourn.catalog.platforms import platforms
from sojourn.catalog.tables import load_rows, read_once, to_row, user_file
from sojourn.config.messages import did_you_mean
from sojourn.errors import UserError


@dataclass(frozen=True)
class Price:
    """What `count` GPUs of one kind cost per hour on one platform, with the source and the month.

    `per_hour` is in `currency`; `cny_per_hour` is the same by the catalogue's rate, to compare with others.
    """

    platform: str
    gpu: str
    cny_per_hour: float
    source: str
    month: str
    count: int = 1
    note: str = ""
    currency: str = "CNY"
    per_hour: float | None = None


@dataclass(frozen=True)
class Currency:
    """How many CNY one unit of a currency is, roughly."""

    name: str
    cny: float
    source: str
    date: str


@read_once
def currencies(user: Path | None = None) -> dict[str, Currency]:
    """Every currency with a rate, by its three letters; rates are in CNY."""
    found = {
        name.upper(): to_row(Currency, {"name": name.upper(), **row}, f"{where}: currency.{name}", "currency")
        for name, (row, where) in load_rows("currency", user).items()
    }
    return {"CNY": Currency("CNY", 1.0, "the catalogue's own unit", ""), **found}


def prices(user: Path | None = None) -> tuple[Price, ...]:
    """Every price, platform by platform. Of a card's prices on one platform, the user's own counts; else a live one of
    the last day; else ours."""
    by_place, own = _listed(user)
    live = {place: price for place, price in _live(currencies(user), user).items() if place not in own}
    return tuple({**by_place, **live}.values())


@read_once
def _listed(user: Path | None = None) -> tuple[dict[tuple[str, str], Price], frozenset[tuple[str, str]]]:
    """Prices of the catalogue's files by platform and card, and which of them are the user's own."""
    rates, mine = currencies(user), str(user or user_file())
    by_place: dict[tuple[str, str], Price] = {}
    own: set[tuple[str, str]] = set()
    for row, where in load_rows("price", user).values():
        place = f'{where}: price.{row["platform"]}."{row["gpu"]}"'
        price = _price(row if where == "prices.toml" else _with_our_names(row, place, user), place, rates)
        by_place[price.platform, price.gpu] = price
        if where == mine:
            own.add((price.platform, price.gpu))
    return by_place, frozenset(own)


def _live(rates: dict[str, Currency], user: Path | None) -> dict[tuple[str, str], Price]:
    """Live prices of platforms and cards that the catalogue knows, by both."""
    found: dict[tuple[str, str], Price] = {}
    live = live_prices()
    places, cards = (load_rows("platform", user), load_rows("gpu", user)) if live else ({}, {})
    for one in live:
        rate = rates.get(one.currency)
        if rate is None or one.platform not in places or one.gpu not in cards:
            continue
        found[one.platform, one.gpu] = Price(
            one.platform, one.gpu, rate.cny * one.per_hour, one.source, one.when, one.count, "", one.currency,
            one.per_hour,
        )  # fmt: skip
    return found


def _with_our_names(row: dict[str, Any], where: str, user: Path | None) -> dict[str, Any]:
    """A user's price under the catalogue's names of its platform and GPU."""
    known = [place.name for place in platforms(user)]
    if row["platform"] not in known:
        hint = did_you_mean(row["platform"], known) or f"; add [platform.{row['platform']}] to name it"
        raise UserError(f"{where}: no platform called '{row['platform']}'{hint}")
    try:
        return {**row, "gpu": find_gpu(row["gpu"], user=user).name}
    except UserError as error:
        raise UserError(f"{where}: {error}") from error


def _price(row: dict[str, Any], where: str, rates: dict[str, Currency]) -> Price:
    if "per_hour" in row and "cny_per_hour" in row:
        raise UserError(f"{where}: `per_hour` and `cny_per_hour` are both there; keep one of them")
    if "per_hour" not in row:
        price = to_row(Price, row, where, "price")
        if price.currency != "CNY":
            raise UserError(f"{where}: `currency` goes with `per_hour`; `cny_per_hour` is in CNY")
        return to_row(Price, {**row, "per_hour": price.cny_per_hour}, where, "price")
    price = to_row(Price, {**row, "cny_per_hour": row["per_hour"]}, where, "price")
    rate = rates.get(price.currency)
    if rate is None:
        add = f"add [currency.{price.currency}] with `cny`, or take one of {', '.join(rates)}"
        raise UserError(f"{where}: `currency` is {price.currency!r}, which has no rate; {add}")
    return to_row(Price, {**row, "cny_per_hour": rate.cny * (price.per_hour or 0.0)}, where, "price")


def prices_of(card: Gpu, user: Path | None = None) -> tuple[Price, ...]:
    """A card's prices. Where a platform has none for this board, those of the same card on another (PCIe, SXM)."""
    everything = prices(user)
    own = [price for price in everything if price.gpu == card.name]
    sisters = {row.name for row in gpus(user) if is_same_model(row, card)}
    served = {price.platform for price in own}
    return (*own, *(p for p in everything if p.gpu in sisters and p.platform not in served))
