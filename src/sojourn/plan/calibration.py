"""Calibration: records of planned and measured memory and step time, and the correction that follows from them.

`plan/records.jsonl` under SOJOURN_HOME has one line a run; `sojourn plan --calibrate` folds them into
`plan/calibration.json`, which later plans use. Recorded runs are planned anew, by the planner and the rates of cards as
they are now: a correction of another planner's errors would be an error itself.
"""

from __future__ import annotations

import hashlib
import json
import math
import statistics
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from sojourn.catalog.gpus import find_gpu, gpus
from sojourn.catalog.models import ModelSpec
from sojourn.errors import UserError
from sojourn.estimate.constants import constants
from sojourn.estimate.memory import memory
from sojourn.estimate.step_time import step_time
from sojourn.estimate.workload import Workload
from sojourn.run.home import home
from sojourn.storage.files import read_json, read_json_lines, write_json

_MIN_RATIO, _MAX_RATIO = 0.5, 2.0  # measured over planned; beyond these a record is wrong
_NEWEST = 500  # records that count


@dataclass(frozen=True)
class Correction:
    """Factors of planned memory and planned step times; `records`: how many they come from.

    `times` are by GPU, for those that were measured; `time` is for the others.
    """

    memory: float = 1.0
    time: float = 1.0
    records: int = 0
    times: dict[str, float] = field(default_factory=dict)

    def time_on(self, gpu: str) -> float:
        return self.times.get(gpu, self.time)


def folder() -> Path:
    return home() / "plan"


def note(workload: Workload, gpu: str, kind: str, measured: dict[str, float], planned_seconds: float | None) -> None:
    """One line; `measured` may have `memory` (bytes) and `step_seconds`. A disk that refuses it stops no run."""
    settings = {key: value for key, value in asdict(workload).items() if key != "model"}
    line = {
        "kind": kind, "gpu": gpu, "model": asdict(workload.model), "settings": settings,
        "planned": {"memory": memory(workload).allocated, "step_seconds": planned_seconds}, "measured": measured,
    }  # fmt: skip
    try:
        folder().mkdir(parents=True, exist_ok=True)
        with (folder() / "records.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
    except OSError:
        return


def records() -> list[dict[str, Any]]:
    return [line for line in read_json_lines(folder() / "records.jsonl") if isinstance(line, dict)]


def correction() -> Correction:
    """From the local file, where there is a sound one."""
    found = read_json(folder() / "calibration.json")
    if not isinstance(found, dict):
        return Correction()
    if found.get("planner") != _planner():
        return calibrate()
    times = found.get("times", {})
    factors = [found.get("memory"), found.get("time"), *(times.values() if isinstance(times, dict) else [None])]
    if not all(isinstance(one, (int, float)) and _MIN_RATIO <= one <= _MAX_RATIO for one in factors):
        return Correction()
    count = found.get("records")
    of_all = float(factors[0] or 1), float(factors[1] or 1), count if isinstance(count, int) else 0
    return Correction(*of_all, {str(gpu): float(one) for gpu, one in times.items()})


def calibrate() -> Correction:
    """The median ratio of measured to planned, saved for later plans; records out of range are ignored."""
    keys = ("memory", "step_seconds")
    known = [{**line, "planned": _planned_now(line)} for line in records()[-_NEWEST:]]
    lines = [line for line in known if any(_ratio(line, key) is not None for key in keys)]
    cards: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        if _ratio(line, keys[1]) is not None:
            with suppress(UserError):  # a card that the catalogue does not know
                cards.setdefault(find_gpu(str(line.get("gpu"))).name, []).append(line)
    times = {card: _median_ratio(some, keys[1]) for card, some in sorted(cards.items())}
    found = Correction(_median_ratio(lines, keys[0]), _median_ratio(lines, keys[1]), len(lines), times)
    if not lines:
        return found
    with suppress(OSError):
        folder().mkdir(parents=True, exist_ok=True)
        write_json(folder() / "calibration.json", {**asdict(found), "planner": _planner()})
    return found


def _planner() -> str:
    """Changes with the constants of the estimate and with what is known of cards."""
    return hashlib.blake2b(repr((constants(), gpus())).encode(), digest_size=8).hexdigest()


def _planned_now(line: dict[str, Any]) -> Any:
    """By the present planner, where the record has what it needs; else as it was planned then."""
    try:
        model = ModelSpec(**_known(ModelSpec, line["model"]))
        workload = Workload(model, **_known(Workload, line["settings"]))
        planned: dict[str, Any] = {"memory": memory(workload).allocated}
        with suppress(UserError):  # a card that the catalogue does not know
            planned["step_seconds"] = step_time(workload, find_gpu(str(line.get("gpu")))).step_seconds
        return planned
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError):
        return line.get("planned")


def _known(cls: type, values: dict[str, Any]) -> dict[str, Any]:
    """Of a record that another version wrote, what this one has too."""
    names = {field.name for field in fields(cls)}
    return {key: tuple(value) if isinstance(value, list) else value for key, value in values.items() if key in names}


def _median_ratio(lines: list[dict[str, Any]], key: str) -> float:
    ratios = [ratio for line in lines if (ratio := _ratio(line, key)) is not None]
    return statistics.median(ratios) if ratios else 1.0


def _ratio(line: dict[str, Any], key: str) -> float | None:
    try:
        ratio = float(line["measured"][key]) / float(line["planned"][key])
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return None
    return ratio if math.isfinite(ratio) and _MIN_RATIO <= ratio <= _MAX_RATIO else None
