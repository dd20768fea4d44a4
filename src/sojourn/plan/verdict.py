"""Whether a plan found what was asked for: the exit code of `sojourn plan`, so that `plan && train` guards."""

from __future__ import annotations

from sojourn.config.quantities import Money
from sojourn.plan.offers import Offer, Plan

NOTHING_MEETS = 4  # exit code: nothing fits, or nothing meets the budget and the deadline


def exit_code(plan: Plan, budget: Money | None, deadline: float | None) -> int:
    if plan.best is not None:
        return 0
    return 0 if any(_meets(offer, budget, deadline) for offer in plan.offers) else NOTHING_MEETS


def _meets(offer: Offer, budget: Money | None, deadline: float | None) -> bool:
    """Of an offer without a price: a machine of one's own costs nothing, of others it is not known what they cost."""
    if not offer.fits or offer.bill is not None:
        return False
    if budget is not None and not offer.gpu.unified:
        return False
    return deadline is None or (offer.run_time is not None and offer.run_time.between[1] <= deadline)
