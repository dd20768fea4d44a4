"""Runs the cases side by side, each in a process of its own, and puts planned and measured next to each other.

First steps compile, and have no more memory than the smallest card that the plan says is enough. Then one case at a
time has the device to itself.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.planner.case_files import lay, settings_of
from benchmarks.planner.cases import Case, chosen, is_held_out, shape_of
from benchmarks.planner.child import Task
from benchmarks.planner.peers import ask_peers
from benchmarks.planner.process import Need
from benchmarks.planner.random_cases import drawn
from benchmarks.planner.replan import Row, planned
from benchmarks.planner.report import line, lines, summary
from benchmarks.planner.worker_pool import make_pool
from sojourn.bench.train.measure import describe_environment
from sojourn.config.load import dump
from sojourn.config.schema import RunConfig
from sojourn.errors import UserError
from sojourn.storage.files import read_json, write_json

Say = Callable[[str], None]

_GIB = 2**30
_ROOM = 0.97  # of the device, for cases side by side
_MORE = 1.15  # than planned may be needed, and a GiB
_BLOCKS, _ENDS = 3, 0.3  # two blocks while compiling, and some more; their gradients and those of the ends


@dataclass(frozen=True)
class Plan:
    """`limit`: seconds that a run may take; `within`: those after which none is started; `before`: rows of an earlier
    call."""

    cases: tuple[Case, ...]
    device: str
    gpu: str
    capability: tuple[int, int] | None
    memory: int
    jobs: int
    limit: float
    within: float
    capped: bool
    peers: bool
    folder: Path | None
    out: Path | None
    before: dict[str, Row]


def make_plan(
    words: Iterable[str], limit: int | None, jobs: int, seconds: float, within: float | None, capped: bool, peers: bool,
    folder: Path | None, out: Path | None, resume: Path | None, draw: int | None = None, seed: int = 0,
) -> Plan:  # fmt: skip
    missing = [name for name in ("torch", "transformers") if find_spec(name) is None]
    if missing:
        raise UserError(f"to train, {' and '.join(missing)} must be installed: pip install 'sojourn[train]'")
    if folder is not None and not folder.is_dir():
        raise UserError(f"--folder: {folder}: no such folder")
    from sojourn.machine.gpus import driver_gpus

    seen = driver_gpus()
    device = "cuda" if seen else "cpu"
    before = {} if resume is None else {row["name"]: row for row in read_result(resume, "--resume")["rows"]}
    first = (seen[0].name, seen[0].capability, seen[0].memory_bytes) if seen else ("cpu", None, 0)
    plan = Plan((), device, *first, jobs, seconds, within or math.inf, capped, peers, folder, out, before)
    if draw is None:
        return replace(plan, cases=tuple(chosen(words, limit, device)))
    return replace(plan, cases=tuple(drawn(draw, seed, device, lambda case: _fits(plan, case))))


def _fits(plan: Plan, case: Case) -> bool:
    row = _row(plan, case, dump(settings_of(case, plan.device, plan.folder or Path())))
    return plan.device == "cpu" or _need(row).most <= _ROOM * plan.memory


def measure(plan: Plan, say: Say) -> dict[str, Any]:
    made = tempfile.TemporaryDirectory(prefix="sojourn-bench-") if plan.folder is None else nullcontext(plan.folder)
    with made as work:
        return _measure(plan, Path(work).absolute(), say)


def _measure(plan: Plan, folder: Path, say: Say) -> dict[str, Any]:
    until = time.monotonic() + plan.within
    signal.signal(signal.SIGTERM, lambda *given: sys.exit(1))  # so that no case is left behind
    adapters = any(case.method in ("lora", "qlora") for case in plan.cases)
    pool = make_pool(plan.device, plan.capability, folder / "compiled", adapters)
    if not pool.forks:
        say(f"note: a forked process cannot use the GPU ({pool.why}), so that each case starts a Python of its own")
    result: dict[str, Any] = {**describe_environment(plan.device), "rows": []}
    configs = {case.name: settings_of(case, plan.device, folder) for case in plan.cases}
    rows = {case.name: plan.before.get(case.name) or _row(plan, case, dump(configs[case.name])) for case in plan.cases}
    for row in plan.before.values():
        row["planned"] = planned(row)
    result["rows"] = [*rows.values(), *(row for name, row in plan.before.items() if name not in rows)]
    _set_home(folder)
    for case in plan.cases:
        lay(case, configs[case.name], folder)
    place = folder / "cases"
    place.mkdir(exist_ok=True)
    capped = plan.capped and plan.device == "cuda"
    todo = to_run(list(rows.values()), capped)
    tasks = [(_task(row, configs[row["name"]], place, folder, capped), _need(row)) for row in todo]

    def tell(task: Task, found: Row) -> None:
        row = rows[task.name]
        _note(row, task, found)
        say(line(row))
        if plan.out is not None:
            write_json(plan.out, result)

    say(f"{len(tasks)} cases, up to {plan.jobs} at once, one of them timed while the others stand still:")
    room = int(_ROOM * plan.memory) if plan.device == "cuda" else sum(need.most for _, need in tasks)
    pool.run(tasks, tell, room, plan.jobs, plan.limit, until)
    return finished(result, plan.peers, say)


def finished(result: dict[str, Any], peers: bool, say: Say) -> dict[str, Any]:
    """With the planned side by the present planner, the peers' answers, and the report."""
    for row in result["rows"]:
        row["planned"] = planned(row)
    if peers:
        result["peers"] = ask_peers(result["rows"], result.get("peers", {}))
    result["report"] = summary(result)
    for text in lines(result):
        say(text)
    return result


def read_again(path: Path, peers: bool, say: Say) -> dict[str, Any]:
    """A result of an earlier call, planned by the present planner."""
    result = read_result(path, "--read")
    for row in result["rows"]:
        row["planned"] = planned(row)
        if "measured" in row:
            say(line(row))
    return finished(result, peers, say)


def read_result(path: Path, flag: str) -> dict[str, Any]:
    found = read_json(path)
    if not path.is_file():
        raise UserError(f"{flag}: {path}: no such file")
    if not isinstance(found, dict) or not all("shape" in row for row in found.get("rows", [{}])):
        raise UserError(f"{flag}: {path}: not a result of python -m benchmarks.planner --out FILE")
    return found


def _set_home(folder: Path) -> None:
    """For this process and those it starts: rows and runs lie with the rest."""
    os.environ["SOJOURN_HOME"] = str(folder / "home")


def _row(plan: Plan, case: Case, config: dict[str, Any]) -> Row:
    capability = list(plan.capability) if plan.capability else None
    precision = "bf16" if plan.device == "cuda" else "fp32"
    row = {
        "name": case.name, "held_out": is_held_out(case.name), "case": asdict(case),
        "config": _portable(config, case.shape),
        "shape": asdict(shape_of(case)), "document": case.document, "gpu": plan.gpu,
        "place": {"device": plan.device, "capability": capability, "precision": precision},
    }  # fmt: skip
    row["planned"] = planned(row)
    return row


def _portable(config: dict[str, Any], shape: str) -> dict[str, Any]:
    """Without the places of this machine, on which no plan depends."""
    model = {**config["model"], "base": shape if config["model"]["base"] else None}
    return {**config, "model": model, "data": {**config["data"], "sources": [], "tokenizer": "auto"}}


def to_run(rows: list[Row], capped: bool) -> list[Row]:
    """Those that lack an answer, the largest first: small ones fill the gaps between them, and the end is short."""
    kinds = ("capped", "measured") if capped else ("measured",)
    return sorted((row for row in rows if any(_open(row, kind) for kind in kinds)), key=lambda row: -_need(row).most)


def _open(row: Row, kind: str) -> bool:
    """Running out of memory is an answer, other failures are not."""
    return kind not in row or ("failed" in row[kind] and not row[kind].get("out_of_memory"))


def _need(row: Row) -> Need:
    """While it is opened, and compiled with two blocks alone; then the whole."""
    plan, few = row["planned"], row["planned"]["moments"]["loading"] + row["planned"]["context"]
    if row["case"]["compiled"]:
        kinds, blocks = plan["kinds"], min(1.0, _BLOCKS / row["shape"]["layers"])
        few += sum(kinds.get(kind, 0) for kind in ("logits", "temporary buffers"))
        few += blocks * kinds.get("activations", 0) + _ENDS * kinds.get("gradients", 0)
    most = int(_MORE * plan["device"]) + _GIB
    return Need(min(most, int(_MORE * few) + _GIB), most)


def _task(row: Row, config: RunConfig, out: Path, folder: Path, cap: bool) -> Task:
    name = row["name"]
    most = row["planned"]["enough"] - row["planned"]["context"] if cap else None
    return Task(name, dump(config), str(folder), str(out / f"{name}.json"), str(out / f"{name}.log"), most)


def _note(row: Row, task: Task, found: Row) -> None:
    if "config" in found:
        row["config"] = _portable(found["config"], row["case"]["shape"])
        row["document"], row["gpu"] = found["document"], found["gpu"]
    for kind in ("capped", "measured"):
        if kind in found:
            row[kind] = found[kind]
            if "failed" in row[kind]:
                row[kind]["failed"] = row[kind]["failed"].replace(f"{task.folder}/", "")
    row["planned"] = planned(row)
