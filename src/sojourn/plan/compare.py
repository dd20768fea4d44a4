"""`sojourn plan MODEL --compare`: full fine-tuning, LoRA and QLoRA of one model side by side."""

from __future__ import annotations

from dataclasses import dataclass

from sojourn.catalog.gpus import Gpu, gpus
from sojourn.catalog.prices import prices
from sojourn.config.load import with_settings
from sojourn.config.quantities import Money
from sojourn.config.schema import RunConfig
from sojourn.errors import UserError
from sojourn.plan.offers import Offer, Plan, make_plan
from sojourn.plan.ranges import cost_range, count_text, time_range
from sojourn.plan.show import length_text

METHODS = {"full": "full", "lora": "LoRA", "qlora": "QLoRA"}
_GIB = 2**30


@dataclass(frozen=True)
class Compared:
    """One method: its plan, or why there is none."""

    method: str
    plan: Plan | None
    reason: str = ""


def compare(
    config: RunConfig, cards: list[Gpu] | None, platform: str | None, budget: Money | None, deadline: float | None
) -> list[Compared]:
    if config.model.base is None:
        raise UserError("--compare: adapters need a model to start from, such as: sojourn plan qwen2.5-7b --compare")
    found, offered = [], cards or _offered(config)
    for method in METHODS:
        try:
            changed = with_settings(config, {"method.kind": method})
            found.append(Compared(method, make_plan(changed, offered, platform, budget, deadline)))
        except UserError as error:
            found.append(Compared(method, None, str(error)))
    if all(one.plan is None for one in found):
        raise UserError(found[0].reason)
    return found


def _offered(config: RunConfig) -> list[Gpu] | None:
    """The GPUs that somebody rents out, which a comparison names; None where the user gives a price for every GPU."""
    rented = {price.gpu for price in prices()}
    return None if config.limits.price_per_hour else [gpu for gpu in gpus() if gpu.name in rented]


def compare_lines(found: list[Compared], limits: str) -> list[str]:
    """One sentence, then one column for each method. `limits`: what was asked for, in words."""
    plans = [(METHODS[one.method], one.plan) for one in found if one.plan is not None]
    model, length = plans[0][1].model, plans[0][1].length
    lines = [
        _sentence(plans, limits),
        "",
        f"{model.name}, {count_text(model.parameters)} parameters; {length_text(length)}",
    ]
    lines += [f"note: {length.assumed}"] if length.assumed else []
    rows = [("", [title for title, _ in plans]), *_rows([plan for _, plan in plans])]
    for title, cells in rows:
        lines.append((f"{title:<20}" + "".join(f"{cell:<20}" for cell in cells)).rstrip())
    lines += [f"{METHODS[one.method]}: {one.reason}" for one in found if one.plan is None]
    return [*lines, "one of them in full: sojourn plan MODEL method.kind=lora"]


def _rows(plans: list[Plan]) -> list[tuple[str, list[str]]]:
    cheapest, fastest = [plan.best for plan in plans], [plan.fastest for plan in plans]
    return [
        ("trained parameters", [count_text(plan.fit.workload.trainable_parameters) for plan in plans]),
        ("least memory", [f"{_least(plan):.1f} GiB" for plan in plans]),
        ("smallest GPU", [_smallest(plan) for plan in plans]),
        ("cheapest", [_card(offer) for offer in cheapest]),
        ("  where", [_where(offer) for offer in cheapest]),
        ("  time", [_hours(offer) for offer in cheapest]),
        ("  cost", [_cost(offer) for offer in cheapest]),
        ("fastest", [_card(offer) for offer in fastest]),
        ("  time", [_hours(offer) for offer in fastest]),
        ("  cost", [_cost(offer) for offer in fastest]),
        ("a checkpoint", [f"{plan.checkpoint_bytes / _GIB:.2f} GiB" for plan in plans]),
    ]


def _sentence(plans: list[tuple[str, Plan]], limits: str) -> str:
    chosen = [(plan.best.bill, title, plan.best) for title, plan in plans if plan.best and plan.best.bill]
    none = [title for title, plan in plans if plan.best is None]
    met = f" and meets the {limits}" if limits else ""
    if not chosen:
        return f"no method has an offer that fits{met}"
    _, title, best = min(chosen, key=lambda one: (one[0].high.cny, one[0].high.elapsed))
    rest = f"; no offer fits{met} for {' and '.join(none)}" if none else ""
    where = f" on {_where(best)}" if best.bill and best.bill.title else ""
    return f"{title} is the cheapest that fits{met}: {_card(best)}{where}: {_cost(best)}, {_hours(best)}{rest}"


def _least(plan: Plan) -> float:
    """On as few GPUs as it fits on; where it fits on none, what it would take."""
    fitting = ((offer.count, offer.fit.memory.device) for offer in plan.offers if offer.fit)
    return min(fitting, default=(1, plan.fit.memory.device))[1] / _GIB


def _smallest(plan: Plan) -> str:
    fitting = [offer for offer in plan.offers if offer.fits and not offer.gpu.unified]
    return _card(min(fitting, key=lambda o: (o.count * o.gpu.plan_gib, o.gpu.memory_gib), default=None))


def _card(offer: Offer | None) -> str:
    if offer is None:
        return "-"
    return f"{offer.count} × {offer.gpu.name}" if offer.count > 1 else offer.gpu.name


def _where(offer: Offer | None) -> str:
    return offer.bill.title if offer and offer.bill else "-"


def _hours(offer: Offer | None) -> str:
    return time_range(offer.bill.low.hours, offer.bill.high.hours) if offer and offer.bill else "-"


def _cost(offer: Offer | None) -> str:
    return cost_range(offer.bill) if offer and offer.bill else "-"
