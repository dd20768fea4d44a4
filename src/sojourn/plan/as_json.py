"""A plan as plain values, for `--json`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from sojourn.config.schema import RunConfig
from sojourn.estimate.memory import MemoryEstimate
from sojourn.plan.advice import Advice, Capacity
from sojourn.plan.offers import Offer, Plan
from sojourn.plan.vocabulary import assumed_vocabulary


def plan_values(config: RunConfig, plan: Plan, advice: list[Advice], sooner: Advice | None) -> dict[str, Any]:
    """For --json."""
    return {
        "name": config.name, "model": asdict(plan.model), "parameters": plan.model.parameters,
        "active_parameters": plan.model.active_parameters, "steps": plan.length.steps, "tokens": plan.length.tokens,
        "assumed": plan.length.assumed, "assumed_vocabulary": assumed_vocabulary(config),
        "memory": _memory_values(plan.fit.memory),
        "workload": {key: value for key, value in asdict(plan.fit.workload).items() if key != "model"},
        "checkpoint_bytes": plan.checkpoint_bytes, "preparing_seconds": round(plan.preparing_seconds, 1),
        "offers": [_offer_values(offer) for offer in plan.offers],
        "best": None if plan.best is None else _offer_values(plan.best),
        "fastest": None if plan.fastest is None else _offer_values(plan.fastest),
        "advice": [_advice_values(one) for one in advice],
        "faster": None if sooner is None else _advice_values(sooner),
        "correction": asdict(plan.correction),
    }  # fmt: skip


def _advice_values(one: Advice) -> dict[str, Any]:
    return {
        "changes": [change.description for change in one.changes], "arguments": one.arguments, "gpu": one.gpu.name,
        "tokens_per_second": round(one.tokens_per_second, 1), "memory": one.memory,
    }  # fmt: skip


def _memory_values(found: MemoryEstimate) -> dict[str, Any]:
    return {
        "allocated": found.allocated, "device": found.device, "peak": found.peak.name,
        "by_kind": _by_kind(found),
        "phases": [{"name": one.name, "bytes": int(one.bytes), "terms": [asdict(term) for term in one.terms]}
                    for one in found.phases],
    }  # fmt: skip


def _by_kind(found: MemoryEstimate) -> dict[str, int]:
    return {kind: int(size) for kind, size in found.peak.by_kind().items()}


def _offer_values(offer: Offer) -> dict[str, Any]:
    bill, found = offer.bill, offer.fit
    return {
        "gpu": asdict(offer.gpu), "count": offer.count, "fits": offer.fits, "reason_not": offer.reason_not,
        "micro_batch": offer.micro_batch, "largest_micro_batch": offer.largest_micro_batch,
        "activation_checkpointing": found.workload.activation_checkpointing if found else None,
        "engine": found.workload.engine if found else None,
        "allocated": found.memory.allocated if found else None, "device": found.memory.device if found else None,
        "by_kind": _by_kind(found.memory) if found else None,
        "tokens_per_second": round(offer.step.tokens_per_second, 1) if offer.step else None,
        "step_seconds": round(offer.step.step_seconds, 5) if offer.step else None,
        "hours": round(offer.run_time.seconds / 3600, 4) if offer.run_time else None,
        "platform": bill.platform if bill else None, "cost": round(bill.amount, 4) if bill else None,
        "bill": asdict(bill) if bill else None,
    }  # fmt: skip


def capacity_values(found: Capacity) -> dict[str, Any]:
    models = {method: one and {"model": one[0].name, "device": one[1]} for method, one in found.models.items()}
    return {
        "size": found.size, "micro_batch": found.micro_batch,
        "micro_batch_checkpointed": found.micro_batch_checkpointed, "length": found.length, "models": models,
    }  # fmt: skip
