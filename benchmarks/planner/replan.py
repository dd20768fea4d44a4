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
from sojourn.estimate.step_time import step_time
from sojourn.estimate.workload import Workload
from sojourn.resolve.device_spec import DeviceSpec
from sojourn.resolve.resolve import resolve

Row = dict[str, Any]


def workload_of_row(row: Row) -> Workload:
    """As plans see it, with documents as long as they really are, and steps by themselves, without evaluation."""
    config = RunConfig.model_validate(upgrade(row["config"]))
    known = {field.name for field in fields(ModelSpec)}
    shape = ModelSpec(**{key: _plain(value) for key, value in row["shape"].items() if key in known})
    work = resolve(config, shape, _device(row)).workload
    document = row["document"] if row["document"] and row["document"] < work.sequence_length else None
    return replace(work, document_length=document, with_evaluation=False, in_training_loop=False)


def _device(row: Row) -> DeviceSpec:
    kind, capability = row["place"]["device"], row["place"]["capability"]
    gpu = None
    with suppress(UserError):  # a GPU that the catalogue does not have, or none
        gpu = find_gpu(str(row.get("gpu")))
    return DeviceSpec(
        device_type=kind,
        name=str(row.get("gpu")),
        precision=row["place"]["precision"],
        compute_capability=None if capability is None else tuple(capability),
        gpu=gpu,
    )


def planned(row: Row) -> Row:
    work = workload_of_row(row)
    found = memory(work)
    plan: Row = {
        "allocated": found.allocated, "device": found.device, "enough": found.enough, "context": found.cuda_context,
        "moment": found.peak.name,
        "moments": {phase.name: int(phase.bytes) for phase in found.phases},
        "kinds": {kind: int(size) for kind, size in found.peak.by_kind().items()},
        "step_seconds": None, "known_seconds": None,
    }  # fmt: skip
    with suppress(UserError):  # a card that the catalogue does not know, or none
        card = find_gpu(str(row.get("gpu")))
        fast = step_time(work, card)
        plan |= {"step_seconds": fast.step_seconds, "parts": {part.name: part.seconds for part in fast.parts}}
        if "cpu_us" in row.get("measured", {}):
            plan["known_seconds"] = step_time(replace(work, cpu_slowness=cpu_of_row(row)), card).step_seconds
    return plan


def cpu_of_row(row: Row) -> float:
    """How much longer than usual its machine's CPU took to launch, where that was measured."""
    usual = float(constants()["launch"]["usual_us"])
    return float(row["measured"].get("cpu_us", usual)) / usual


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
