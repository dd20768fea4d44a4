"""A plan as plain values, for `--json`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from sojourn.config.schema import RunConfig
from sojourn.estimate.memory import MemoryEstimate
from sojourn.plan.advice import Advice, Capacity
from sojourn.plan.epoch import Epoch
from sojourn.plan.offers import Offer, Plan
from sojourn.plan.ranges import known_digits
from sojourn.plan.vocabulary import assumed_vocabulary


def plan_values(config: RunConfig, plan: Plan, advice: list[Advice], sooner: Advice | None) -> dict[str, Any]:
    """For --json."""
    return {
        "name": config.name, "model": asdict(plan.model), "parameters": plan.model.parameters,
        "active_parameters": plan.model.active_parameters, "steps": plan.length.steps, "tokens": plan.length.tokens,
        "exact": plan.length.exact, "assumed": plan.length.assumed, "data_notes": list(plan.length.notes),
        "epoch": _epoch_values(plan.length.epoch), "assumed_vocabulary": assumed_vocabulary(config),
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


def _epoch_values(epoch: Epoch | None) -> dict[str, Any] | None:
    if epoch is None:
        return None
    return {"rows": round(epoch.rows), "tokens": round(epoch.tokens), "exact": epoch.exact, "assumed": epoch.assumed,
            "mean_document": round(sum(epoch.lengths) / len(epoch.lengths), 1) if epoch.lengths else None}  # fmt: skip


def _advice_values(one: Advice) -> dict[str, Any]:
    return {
        "changes": [change.description for change in one.changes], "arguments": one.arguments, "gpu": one.gpu.name,
        "tokens_per_second": known_digits(one.tokens_per_second, one.gpu), "memory": one.memory,
        "host_memory": one.host_memory, "keeps_result": one.keeps_result,
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
        "tokens_per_second": known_digits(offer.step.tokens_per_second, offer.gpu, offer.count) if offer.step else None,
        "step_seconds": round(offer.step.step_seconds, 5) if offer.step else None,
        "hours": round(offer.run_time.seconds / 3600, 4) if offer.run_time else None,
        "platform": bill.platform if bill else None, "cost": round(bill.amount, 4) if bill else None,
        "bill": asdict(bill) if bill else None, "range_reason": offer.range_reason,
        "low": _end_values(offer, -1), "high": _end_values(offer, 1),
    }  # fmt: skip


def _end_values(offer: Offer, way: int) -> dict[str, Any] | None:
    """One end of the range: the shortest (-1) or the longest (1) that a run may take."""
    if offer.step is None or offer.run_time is None:
        return None
    end = None if offer.bill is None else offer.bill.high if way > 0 else offer.bill.low
    seconds = offer.run_time.between[1 if way > 0 else 0]
    return {
        "hours": round(end.hours if end else seconds / 3600, 4), "cost": round(end.amount, 4) if end else None,
        "step_seconds": round(offer.step.step_seconds * (1 + way * offer.step.spread), 5),
        "tokens_per_second": known_digits(
            offer.step.tokens_per_second / (1 + way * offer.step.spread), offer.gpu, offer.count
        ),
    }  # fmt: skip


def capacity_values(found: Capacity) -> dict[str, Any]:
    models = {method: one and {"model": one[0].name, "device": one[1]} for method, one in found.models.items()}
    return {
        "size": found.size, "micro_batch": found.micro_batch,
        "activation_checkpointing": found.checkpointing, "micro_batch_checkpointed": found.micro_batch_checkpointed,
        "length": found.length, "models": models,
    }  # fmt: skip
