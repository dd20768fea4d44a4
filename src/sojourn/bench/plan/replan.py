"""The planned side of a row, from what the row itself says: no torch, no GPU, and always the present planner."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import fields, replace
from typing import Any

from sojourn.catalog.gpus import find_gpu
from sojourn.catalog.models import ModelSpec
from sojourn.config.renamed import upgrade
from sojourn.config.schema import RunConfig
from sojourn.errors import UserError
from sojourn.estimate.constants import constants
from sojourn.estimate.memory import memory
from sojourn.estimate.step_time import speed
from sojourn.estimate.workload import Place, Work, work_of

Row = dict[str, Any]


def work_of_row(row: Row) -> Work:
    """As plans see it, with documents as long as they really are, and steps by themselves, without evaluation."""
    config = RunConfig.model_validate(upgrade(row["config"]))
    known = {field.name for field in fields(ModelSpec)}
    shape = ModelSpec(**{key: _plain(value) for key, value in row["shape"].items() if key in known})
    capability = row["place"]["capability"]
    place = Place(row["place"]["device"], None if capability is None else tuple(capability), row["place"]["precision"])
    rows = config.train.micro_batch if isinstance(config.train.micro_batch, int) else 1
    work = work_of(config, shape, place, rows)
    document = row["document"] if row["document"] and row["document"] < work.length else None
    return replace(work, document=document, evaluates=False, looped=False)


def planned(row: Row) -> Row:
    work = work_of_row(row)
    found = memory(work)
    plan: Row = {
        "allocated": found.allocated, "device": found.device, "enough": found.enough, "context": found.context,
        "moment": found.peak.name,
        "moments": {moment.name: int(moment.bytes) for moment in found.moments},
        "kinds": {kind: int(size) for kind, size in found.peak.by_kind().items()},
        "step_seconds": None, "known_seconds": None,
    }  # fmt: skip
    with suppress(UserError):  # a card that the catalogue does not know, or none
        card = find_gpu(str(row.get("gpu")))
        fast = speed(work, card)
        plan |= {"step_seconds": fast.step_seconds, "parts": {part.name: part.seconds for part in fast.parts}}
        if "cpu_us" in row.get("measured", {}):
            plan["known_seconds"] = speed(replace(work, cpu=cpu_of_row(row)), card).step_seconds
    return plan


def cpu_of_row(row: Row) -> float:
    """How much longer than usual its machine's CPU took to launch, where that was measured."""
    usual = float(constants()["launch"]["usual_us"])
    return float(row["measured"].get("cpu_us", usual)) / usual


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
