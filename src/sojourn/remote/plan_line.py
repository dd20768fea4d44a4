"""A run on one host in a line: memory, time, money; refused where it does not fit."""

from __future__ import annotations

from typing import Any

from sojourn.config.schema import RunConfig
from sojourn.errors import UserError
from sojourn.remote.hosts import Host
from sojourn.remote.spec import Terms


def plan_line(config: RunConfig, host: Host, terms: Terms) -> str:
    """Memory, time and money on this host; refused where it cannot fit."""
    if host.gpu is None:
        return f"{host.name} shows no GPU: no plan (sojourn plan {config.name} plans for GPUs)"
    from sojourn.catalog.gpus import find_gpu
    from sojourn.config.load import with_settings
    from sojourn.plan.offers import make_plan

    price = terms.price_on(host)
    priced = with_settings(config, {"limits.price_per_hour": str(price)}) if price is not None else config
    try:
        gpu = find_gpu(host.gpu)
    except UserError:
        return f"{host.gpu} is not in the catalogue: no plan for it"
    found = make_plan(priced, [gpu])
    offer = next((offer for offer in found.offers if offer.fits), None)
    if offer is None or offer.fit is None:
        why = next((offer.reason_not for offer in found.offers if offer.reason_not), "too small")
        raise UserError(
            f"{config.name} does not fit on {gpu.name}: {why}; see: sojourn plan {config.name} --gpu “{gpu.name}”"
        )
    return _describe_offer(offer, config, host, terms)


def _describe_offer(offer: Any, config: RunConfig, host: Host, terms: Terms) -> str:
    from sojourn.plan.ranges import time_range

    memory = offer.fit.memory.device / 2**30
    between = offer.run_time.between if offer.run_time is not None else None
    price = terms.price_on(host)
    line = f"plan for {host.name} ({offer.gpu.name}): {memory:.1f} of {offer.gpu.memory_gib:.0f} GiB"
    if between is None:
        return line
    low, high = (seconds / 3600 for seconds in between)
    line += f", {time_range(low, high)}"
    if price is not None:
        costs = [float(price.amount) * hours for hours in (low, high)]
        line += f", {costs[0]:.2f}–{costs[1]:.2f} {price.currency}".rstrip()
        if terms.budget is not None and costs[1] > float(terms.budget.amount):
            ends = "ends it before" if costs[0] > float(terms.budget.amount) else "may end it before"
            line += f"; the budget of {terms.budget} {ends}: it will stop there, saved and resumable"
    return f"{line}; {offer.range_reason}"
