"""What saving costs a run, and what resuming costs: a real run that saves often, killed, and continued.

Steps that overlap a save are compared with the others: what they take longer is the save's price, whether training
waited for the copy or was only slowed by the writing beside it.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from sojourn.bench.memory import watched
from sojourn.bench.train.ground import lay, rows_of, settings
from sojourn.bench.train.workloads import Workload, chosen
from sojourn.errors import RunFailed
from sojourn.machine.precision import choose_device
from sojourn.run.folder import RunFolder
from sojourn.storage.files import read_json_lines, write_json

_INTERVAL = 300.0  # seconds between saves that the price is told for
_AFTER = 5  # steps left in peace after the last save

Say = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    workloads: tuple[Workload, ...]
    saves: int
    every: float
    folder: Path | None
    runs: Path | None


def make_plan(workloads: list[str], saves: int, every: float, folder: Path | None, runs: Path | None) -> Plan:
    return Plan(tuple(chosen(workloads or ["tiny"])), saves, every, folder, runs)


def measure(plan: Plan, say: Say) -> dict[str, Any]:
    from sojourn.bench.train.measure import circumstances

    device = "cuda" if choose_device() == "cuda" else "cpu"
    made = tempfile.TemporaryDirectory(prefix="sojourn-bench-") if plan.folder is None else nullcontext(plan.folder)
    with made as work:
        results = [_measure(plan, one, device, Path(work).absolute(), say) for one in plan.workloads]
    return {**circumstances(device), "saves": plan.saves, "every": plan.every, "workloads": results}


def _measure(plan: Plan, workload: Workload, device: str, work: Path, say: Say) -> dict[str, Any]:
    ground = lay(workload, 25, device, work)
    file = work / "run.yaml"
    run = RunFolder((plan.runs or work) / "save-bench")
    told = settings(ground, 100_000, 1, device)
    told["train"] |= {"compile": "off"}
    told["save"] = {"every": plan.every, "keep": 1, "folder": str(run.path.absolute())}
    if workload.method == "full" and device == "cuda":
        told["train"] |= {"activation_checkpointing": "selective"}
    write_json(file, told)
    rows_of(ground, file)
    try:
        fresh = _run(file, run, work, lambda: _enough(run, plan.saves))
        result = _prices(run)
        before = len(_steps(run))
        resumed = _run(file, run, work, lambda: len(_steps(run)) > before)
    finally:
        from sojourn.storage.disk import remove_folder

        remove_folder(run.path)
    result |= {"seconds_to_first_step": fresh, "seconds_to_first_step_resumed": resumed}
    extra = resumed - fresh
    say(f"{workload.name}: a checkpoint of {result['checkpoint_bytes'] / 2**30:.2f} GiB: training waits "
        f"{result['stalled']:.2f} s, loses {result['lost']:.2f} s in all, written in {result['seconds']:.1f} s; every "
        f"5 minutes {100 * result['share']:.2f} %; first step {fresh:.1f} s after the start, resumed {resumed:.1f} s "
        f"({extra:+.1f})")  # fmt: skip
    return {"workload": workload.name, **result}


def _run(file: Path, run: RunFolder, work: Path, until: Callable[[], bool]) -> float:
    """Runs until told, then kills it; returns the seconds from the start to the first step that this call made."""
    log, began = work / "log.txt", time.time()
    environment = {
        **os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "SOJOURN_HOME": str(work / "home"),
        "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    command = [sys.executable, "-m", "sojourn", "train", str(file), "name=save-bench"]
    watched(command, environment, log, until, False)
    first = next((line["time"] for line in _steps(run) if line["time"] >= began), None)
    if first is None:
        raise RunFailed(f"the run made no step: {log.read_text(encoding='utf-8', errors='replace').strip()[-500:]}")
    return round(float(first) - began, 1)


def _steps(run: RunFolder) -> list[dict[str, Any]]:
    return [line for line in read_json_lines(run.metrics) if line.get("kind") == "train"]


def _saved(run: RunFolder) -> list[dict[str, Any]]:
    return [event for event in read_json_lines(run.events) if event["kind"] == "saved"]


def _enough(run: RunFolder, saves: int) -> bool:
    done, steps = _saved(run), _steps(run)
    return len(done) >= saves and sum(step["time"] > done[-1]["time"] for step in steps) >= _AFTER


def _prices(run: RunFolder) -> dict[str, Any]:
    """The first save makes the place for its copy and is told apart."""
    steps, saved = _steps(run), _saved(run)
    times = [step["time"] for step in steps]
    windows = [(event["time"] - event["seconds"], event["time"]) for event in saved]
    gaps = list(pairwise(times[1:]))  # the first step starts everything up

    def during(gap: tuple[float, float], window: tuple[float, float]) -> bool:
        return gap[0] < window[1] and window[0] < gap[1]

    calm = median(b - a for a, b in gaps if not any(during((a, b), window) for window in windows))
    lost = [sum(b - a - calm for a, b in gaps if during((a, b), window)) for window in windows]
    places = sorted(run.checkpoints.glob("step-*"))
    later = slice(1, None) if len(lost) > 1 else slice(None)
    return {
        "checkpoint_bytes": sum(file.stat().st_size for file in places[-1].iterdir()),
        "step_seconds": round(calm, 4),
        "stalled_first": saved[0]["stalled"], "lost_first": round(lost[0], 3),
        "stalled": round(max(event["stalled"] for event in saved[later]), 3),
        "lost": round(max(lost[later]), 3),
        "seconds": round(max(event["seconds"] for event in saved), 2),
        "share": round(max(lost[later]) / _INTERVAL, 5),
        "all": [{"step": event["step"], "stalled": event["stalled"], "seconds": event["seconds"], "lost": round(one, 3)}
                for event, one in zip(saved, lost, strict=True)],
    }  # fmt: skip
