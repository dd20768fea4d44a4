"""Offers of several platforms side by side: asked for, sorted by price, kept as live prices for `plan`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from sojourn.catalog.live_prices import LivePrice, save_live_prices
from sojourn.catalog.prices import currencies
from sojourn.catalog.refresh import Refreshed
from sojourn.errors import UserError
from sojourn.remote.platforms.base import Cloud, Offer, OutOfStock


@dataclass
class Market:
    """`problems`: one line for each platform that did not answer; `asked`: those that did."""

    offers: list[Offer] = field(default_factory=list)
    asked: list[Cloud] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def ask(
    names: Iterable[str], open_one: Callable[[str], Cloud], gpu: str | None = None, count: int = 1, spot: bool = False
) -> Market:
    """A platform that does not answer does not hide the others."""
    market = Market()
    for name in names:
        try:
            cloud = open_one(name)
            market.offers += cloud.offers(gpu, count, spot)
            market.asked.append(cloud)
        except UserError as error:
            market.problems.append(str(error))
    market.offers.sort(key=by_price())
    return market


def by_price() -> Callable[[Offer], tuple[bool, bool, float]]:
    """What can be had comes first, what has no price last; currencies are compared by the catalogue's rates."""
    rates = currencies()

    def key(offer: Offer) -> tuple[bool, bool, float]:
        rate = rates[offer.currency].cny if offer.currency in rates else 1.0
        return offer.available is False, offer.price_per_hour is None, rate * (offer.price_per_hour or 0.0)

    return key


def choose(offers: list[Offer], wanted: str | None) -> Offer:
    """The offer with that id, or the cheapest that can be had."""
    if wanted is not None:
        found = next((offer for offer in offers if offer.id == wanted), None)
        if found is None:
            raise UserError(f"no offer {wanted!r} there now; see sojourn cloud offers")
        return found
    usable = [offer for offer in offers if offer.available is not False]
    if not usable:
        raise OutOfStock("nothing of that kind can be had there now; see sojourn cloud offers")
    return min(usable, key=by_price())


def keep(market: Market) -> tuple[Path, int]:
    """The cheapest offer of each card on each platform as a live price. AutoDL's prices are the catalogue's
    own, so they are not kept."""
    now = time.time()
    best: dict[tuple[str, str], LivePrice] = {}
    titles = {cloud.name: cloud.title for cloud in market.asked}
    for offer in market.offers:  # sorted: the first of a card is its cheapest
        place = offer.platform, offer.gpu
        if offer.available is False or not offer.price_per_hour or offer.platform == "autodl" or place in best:
            continue
        source = f"{titles.get(offer.platform, offer.platform)}'s API"
        best[place] = LivePrice(*place, offer.count, float(offer.price_per_hour), offer.currency, source, now)
    return save_live_prices(best.values()), len(best)


def refresh_live_prices() -> Refreshed:
    """Today's prices of every platform whose token is known."""
    from sojourn.remote.platforms.registry import open_cloud, token_hint, with_token

    names = with_token()
    if not names:
        raise UserError(f"prices: {token_hint()}")
    market = ask(names, open_cloud)
    if not market.asked:
        raise UserError(f"prices: {'; '.join(market.problems)}")
    keep(market)
    places = {(offer.platform, offer.gpu) for offer in market.offers if offer.platform != "autodl"}
    return Refreshed(changed=sorted(f"price {platform}/{gpu}" for platform, gpu in places))
