"""Limits that depend on the platform: the price of its GPUs, and the end of its session."""

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
    """Adds the catalogue's price where there is a budget and no price."""
    limits = config.limits
    if limits.budget is None or limits.price_per_hour is not None:
        return config
    price = _catalogue_price()
    if price is None or limits.budget.currency not in ("", price.currency):
        raise UserError(
            f"limits.budget: {limits.budget} given, but no price is known for this machine; add "
            "limits.price_per_hour, such as 2.19 CNY (or --price '2.19 CNY')"
        )
    print(f"note: {price} an hour, from the catalogue; set another price with limits.price_per_hour", flush=True)
    return config.model_copy(update={"limits": limits.model_copy(update={"price_per_hour": price})})


def _catalogue_price() -> Money | None:
    platform, found = detect().name, gpus()
    if not found:
        return None
    try:
        card = find_gpu(found[0].name, found[0].memory_gib)
    except UserError:
        return None
    prices = [row for row in prices_of(card) if row.platform == platform and row.cny_per_hour > 0]
    per_card = min((row.cny_per_hour / row.count for row in prices), default=None)
    return None if per_card is None else Money(Decimal(str(round(per_card * len(found), 4))), "CNY")


def session_end(limits: LimitsConfig) -> float | None:
    """When the platform ends the session, as `time.time`. A session starts with the machine or its container."""
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
        started = max(psutil.boot_time(), psutil.Process(1).create_time())
    except psutil.Error:
        started = psutil.boot_time()
    return float(started + seconds)
