"""`sojourn plan --budget ¥20` without a run, as text: what can be trained, by size and method."""

from __future__ import annotations

from dataclasses import asdict

from sojourn.config.quantities import Duration, Money
from sojourn.plan.affordable import (
    GLOBAL_BATCH,
    METHODS,
    ROW_LENGTH,
    TOKENS_PER_PARAMETER,
    USUAL_HOURS,
    Affordable,
)
from sojourn.plan.money import money_text
from sojourn.plan.prices import describe_rates
from sojourn.plan.ranges import count_text, time_text
from sojourn.resolve.workload import USUAL_DOCUMENT

_ENOUGH = 5_000_000  # tokens: some ten thousand examples
Table = dict[str, dict[str, Affordable | None]]


def affordable_lines(table: Table, new: Affordable | None, budget: Money | None, hours: float | None) -> list[str]:
    """One sentence, the table, and the offers that it is computed from."""
    found = [one for row in table.values() for one in row.values() if one is not None]
    asked = _asked(budget, hours)
    if not found and new is None:
        return [f"{asked}: nothing can be trained with that; give more, or another --gpu or --platform"]
    lines = [f"{asked}: {_sentence(found, new)}", ""]
    width = 2 + max(len(name) for name in table)
    lines.append(f"{'tokens for':<{width}}" + "".join(f"{title:<21}" for title in METHODS.values()).rstrip())
    for name, row in table.items():
        lines.append((f"{name:<{width}}" + "".join(f"{_cell(one):<21}" for one in row.values())).rstrip())
    if new is not None:
        size, tokens = count_text(new.model.parameters), count_text(new.tokens)
        lines.append(
            f"from scratch: up to {size} parameters, which want {TOKENS_PER_PARAMETER} tokens each; "
            f"{tokens} on {_card(new)}"
        )
    offers = dict.fromkeys(_offer(one) for one in [*found, *([new] if new else [])])
    lines += ["", *(f"{offer}" for offer in offers)]
    used = {one.price.currency for one in found if one.price.cny_per_hour} | ({budget.currency} if budget else set())
    rates = describe_rates(used - {""})
    lines += [rates] if rates else []
    assumed = (
        f"rows of {ROW_LENGTH:,} tokens, {GLOBAL_BATCH} a step; the slow end of each estimate; - where it does not fit"
    )
    return [*lines, f"assumed: {assumed}", "next: sojourn plan MODEL method.kind=qlora data.sources=FILE --budget …"]


def _asked(budget: Money | None, hours: float | None) -> str:
    day = f"a day ({USUAL_HOURS:g}h; --time says otherwise)"
    time = day if hours is None else f"{Duration(round(3600 * hours))}"
    return f"{budget} within {time}" if budget else f"{time}, where it is cheapest for its speed"


def _sentence(found: list[Affordable], new: Affordable | None) -> str:
    enough = [one for one in found if one.tokens >= _ENOUGH]
    if not enough:
        largest = max(found, key=lambda one: one.tokens, default=new)
        return f"little: at most {_trained(largest)}" if largest else "nothing"
    largest = max(enough, key=lambda one: (one.model.parameters, one.tokens))
    cost = "free" if largest.cost == 0 else money_text(largest.cost, largest.price.currency)
    return f"up to {_trained(largest)}; {cost}, {time_text(largest.hours)}"


def _trained(one: Affordable) -> str:
    examples = f"about {count_text(one.tokens / USUAL_DOCUMENT)} examples"
    method = METHODS.get(one.method, "from scratch")
    return f"{one.model.name} with {method} on {count_text(one.tokens)} tokens ({examples}) on {_where(one)}"


def _cell(one: Affordable | None) -> str:
    return "-" if one is None else f"{count_text(one.tokens):<7}{_card(one)}"


def _card(one: Affordable) -> str:
    return f"{one.price.count} × {one.gpu.name}" if one.price.count > 1 else one.gpu.name


def _where(one: Affordable) -> str:
    return f"{_card(one)} at {one.platform.title}" if one.platform and one.price.platform != "generic" else _card(one)


def _offer(one: Affordable) -> str:
    each = one.price.per_hour if one.price.per_hour is not None else one.price.cny_per_hour
    price = "free" if each == 0 else f"{money_text(each, one.price.currency)} an hour"
    untried = "; Sojourn was never run on one" if one.gpu.not_run else ""
    seen = f", {one.price.source}" + (f", {one.price.month}" if one.price.month else "")
    return f"{_where(one)}: {price} for {time_text(one.hours)}{seen}{untried}"


def affordable_values(table: Table, new: Affordable | None) -> dict[str, object]:
    """For --json."""
    return {
        "models": {name: {method: _values(one) for method, one in row.items()} for name, row in table.items()},
        "from_scratch": _values(new),
    }


def _values(one: Affordable | None) -> dict[str, object] | None:
    if one is None:
        return None
    return {
        "parameters": one.model.parameters, "tokens": one.tokens, "gpu": one.gpu.name, "count": one.price.count,
        "platform": one.price.platform, "hours": round(one.hours, 3), "cost": round(one.cost, 4),
        "currency": one.price.currency, "price": asdict(one.price),
    }  # fmt: skip
