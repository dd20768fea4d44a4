"""Which of the catalogue's prices count for a run: where, for which board, and for how many GPUs at once."""

from __future__ import annotations

import math
from dataclasses import replace

from sojourn.catalog.gpus import Gpu
from sojourn.catalog.platforms import platforms
from sojourn.catalog.prices import Price, currencies, prices, prices_of
from sojourn.catalog.staleness import with_age
from sojourn.catalog.tables import user_file
from sojourn.config.schema import RunConfig


def gpus_named(config: RunConfig) -> int | None:
    """How many the run asks for, over all its machines; None where it leaves that open."""
    named, nodes = config.parallel.gpus, config.parallel.nodes
    return len(named) * nodes if isinstance(named, list) else nodes if nodes > 1 else None


def prices_on(gpu: Gpu, config: RunConfig, platform: str | None, named: bool) -> list[Price] | list[None]:
    """None among them: no price is known, or the user's own counts. A card that the user named has the prices of its
    other boards too."""
    asked, own = gpus_named(config), config.limits.price_per_hour
    if own is not None and platform is None:
        return [None]
    known = prices_of(gpu) if named else [price for price in prices() if price.gpu == gpu.name]
    there = [price for price in known if platform in (None, price.platform)]
    found = [
        one for price in there if (one := _for_so_many(price, asked or min(price.count, config.train.global_batch)))
    ]
    if found or platform is None:
        return found or [None]
    mine = own is not None and (named or not _sold_on(platform))
    return [Price(platform, gpu.name, 0.0, "your price", "", asked or 1)] if mine else []


def _for_so_many(price: Price, asked: int) -> Price | None:
    """By the machine of so many cards as the price is for; of what is free there is one machine."""
    if asked > price.count and (price.cny_per_hour == 0 or asked > _most_on(price.platform)):
        return None
    times = -(-asked // price.count)
    each = None if price.per_hour is None else times * price.per_hour
    return replace(price, count=asked, cny_per_hour=times * price.cny_per_hour, per_hour=each)


def _most_on(platform: str) -> float:
    return next((row.most_gpus for row in platforms() if row.name == platform and row.most_gpus), math.inf)


def most_gpus(gpu: Gpu, platform: str | None) -> int | None:
    """How many of a kind one can have on a platform; None where that is a question of money."""
    free = [p.count for p in prices() if p.platform == platform and p.gpu == gpu.name and p.cny_per_hour == 0]
    return max(free, default=None)


def describe_rates(used: set[str]) -> str | None:
    """The exchange rates by which amounts in so many currencies were compared, with their dates."""
    known = currencies()
    if len(used) < 2:
        return None
    rates = [known[name] for name in sorted(used) if name in known and name != "CNY"]
    shown = ", ".join(f"{rate.name} {rate.cny:g}" for rate in rates)
    seen = dict.fromkeys(f"{rate.source}, {with_age(rate.date)}" for rate in rates)
    return f"exchange rates in CNY: {shown} ({'; '.join(seen)})"


def describe_no_price(platform: str, only: list[Gpu] | None, asked: int | None) -> str:
    """Why a platform has no offer for a run, and what to type."""
    sold = _sold_on(platform)
    names = " or ".join(gpu.name for gpu in only) if only and sold else "a GPU"
    names = f"{asked} × {names}" if asked and asked > 1 else names
    has = f"; it has {', '.join(sold)}" if sold else ""
    row = f'[prices.{platform}."{only[0].name if only else "RTX 4090"}"]'
    fix = f"give limits.price_per_hour, or add {row} to {user_file()}"
    return f"--platform: no price of {names} is known on {platform}{has}; {fix}"


def _sold_on(platform: str) -> list[str]:
    return [f"{p.count} × {p.gpu}" if p.count > 1 else p.gpu for p in prices() if p.platform == platform]
