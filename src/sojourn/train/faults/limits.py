"""The limits that come from where we are: the price of this GPU on this platform, and the end of its session."""

from __future__ import annotations

from decimal import Decimal

from sojourn.catalog.gpus import find_gpu
from sojourn.catalog.prices import prices_of
from sojourn.config.quantities import Money
from sojourn.config.schema import LimitsConfig, RunConfig
from sojourn.errors import UserError
from sojourn.machine.gpus import gpus
from sojourn.machine.platform import detect


def with_catalogue_price(config: RunConfig) -> RunConfig:
    """With the catalogue's price where the user has set a budget and no price."""
    limits = config.limits
    if limits.budget is None or limits.price_per_hour is not None:
        return config
    price = _catalogue_price()
    if price is None or limits.budget.currency not in ("", price.currency):
        raise UserError(
            f"limits.budget: {limits.budget} given, but no price is known for this machine; add "
            "limits.price_per_hour, such as 2.19 CNY (or --price '2.19 CNY')"
        )
    print(f"note: {price} an hour, from the catalogue; another price: limits.price_per_hour", flush=True)
    return config.model_copy(update={"limits": limits.model_copy(update={"price_per_hour": price})})


def _catalogue_price() -> Money | None:
    here, cards = detect().name, gpus()
    if not cards:
        return None
    try:
        card = find_gpu(cards[0].name, cards[0].memory_gib)
    except UserError:
        return None
    found = [row for row in prices_of(card) if row.platform == here and row.cny_per_hour > 0]
    per_card = min((row.cny_per_hour / row.count for row in found), default=None)
    return None if per_card is None else Money(Decimal(str(round(per_card * len(cards), 4))), "CNY")


def session_end(limits: LimitsConfig) -> float | None:
    """By `time.time`; a session begins when the machine, or its container, starts."""
    import psutil

    if limits.session == "off":
        return None
    if limits.session == "auto":
        hours = detect().facts.session_hours
        if hours is None:
            return None
        seconds = 3600 * hours
    else:
        seconds = float(limits.session)
    try:
        began = max(psutil.boot_time(), psutil.Process(1).create_time())
    except psutil.Error:
        began = psutil.boot_time()
    return float(began + seconds)
