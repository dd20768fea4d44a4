"""`sojourn bench save`: what saving and resuming cost, measured on a real run that saves often, is killed and resumed.

The cost of a save is the extra time of the steps that overlap it, whether training waited for the copy or was only
slowed by the writing thread.
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

from sojourn.bench.process_memory import run_sampled
from sojourn.bench.train.workload_files import make_files, prepare_rows, run_settings
from sojourn.bench.train.workloads import Workload, find_workloads
from sojourn.errors import RunFailed
from sojourn.machine.precision import choose_device
from sojourn.run.folder import RunFolder
from sojourn.storage.files import read_json_lines, write_json

_INTERVAL = 300.0  # seconds between saves for which the share is given
_STEPS_AFTER = 5  # undisturbed steps after the last save

Print = Callable[[str], None]


@dataclass(frozen=True)
class SaveBench:
    workloads: tuple[Workload, ...]
    saves: int
    every: float
    folder: Path | None
    runs: Path | None


def make_bench(workloads: list[str], saves: int, every: float, folder: Path | None, runs: Path | None) -> SaveBench:
    return SaveBench(tuple(find_workloads(workloads or ["tiny"])), saves, every, folder, runs)


def measure(bench: SaveBench, echo: Print) -> dict[str, Any]:
    from sojourn.bench.train.measure import describe_environment

    device = "cuda" if choose_device() == "cuda" else "cpu"
    folder = tempfile.TemporaryDirectory(prefix="sojourn-bench-") if bench.folder is None else nullcontext(bench.folder)
    with folder as work:
        results = [_measure(bench, one, device, Path(work).absolute(), echo) for one in bench.workloads]
    return {**describe_environment(device), "saves": bench.saves, "every": bench.every, "workloads": results}


def _measure(bench: SaveBench, workload: Workload, device: str, work: Path, echo: Print) -> dict[str, Any]:
    files = make_files(workload, 25, device, work)
    file = work / "run.yaml"
    run = RunFolder((bench.runs or work) / "save-bench")
    settings = run_settings(files, 100_000, 1, device)
    settings["train"] |= {"compile": "off"}
    settings["save"] = {"every": bench.every, "keep": 1, "folder": str(run.path.absolute())}
    if workload.method == "full" and device == "cuda":
        settings["train"] |= {"activation_checkpointing": "selective"}
    write_json(file, settings)
    prepare_rows(files, file)
    try:
        fresh = _run(file, run, work, lambda: _has_enough_saves(run, bench.saves))
        result = _costs(run)
        before = len(_steps(run))
        resumed = _run(file, run, work, lambda: len(_steps(run)) > before)
    finally:
        from sojourn.storage.disk import remove_folder

        remove_folder(run.path)
    result |= {"seconds_to_first_step": fresh, "seconds_to_first_step_resumed": resumed}
    extra = resumed - fresh
    echo(f"{workload.name}: checkpoint of {result['checkpoint_bytes'] / 2**30:.2f} GiB: training waits "
        f"{result['stalled']:.2f} s, loses {result['lost']:.2f} s in all; written in {result['seconds']:.1f} s; "
        f"saved every 5 minutes: {100 * result['share']:.2f} %; first step {fresh:.1f} s after the start, "
        f"resumed {resumed:.1f} s ({extra:+.1f})")  # fmt: skip
    return {"workload": workload.name, **result}


def _run(file: Path, run: RunFolder, work: Path, is_done: Callable[[], bool]) -> float:
    """Runs until `is_done()`, then kills it; returns the seconds from the start to this call's first step."""
    log, started = work / "log.txt", time.time()
    environment = {
        **os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "SOJOURN_HOME": str(work / "home"),
        "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    command = [sys.executable, "-m", "sojourn", "train", str(file), "name=save-bench"]
    run_sampled(command, environment, log, is_done, False)
    first = next((line["time"] for line in _steps(run) if line["time"] >= started), None)
    if first is None:
        raise RunFailed(
            f"the run completed no step: {log.read_text(encoding='utf-8', errors='replace').strip()[-500:]}"
        )
    return round(float(first) - started, 1)


def _steps(run: RunFolder) -> list[dict[str, Any]]:
    return [line for line in read_json_lines(run.metrics) if line.get("kind") == "train"]


def _saved(run: RunFolder) -> list[dict[str, Any]]:
    return [event for event in read_json_lines(run.events) if event["kind"] == "saved"]


def _has_enough_saves(run: RunFolder, saves: int) -> bool:
    done, steps = _saved(run), _steps(run)
    return len(done) >= saves and sum(step["time"] > done[-1]["time"] for step in steps) >= _STEPS_AFTER


def _costs(run: RunFolder) -> dict[str, Any]:
    """The first save allocates the memory of its copy and is reported separately."""
    steps, saved = _steps(run), _saved(run)
    times = [step["time"] for step in steps]
    windows = [(event["time"] - event["seconds"], event["time"]) for event in saved]
    gaps = list(pairwise(times[1:]))  # the first step includes start-up

    def during(gap: tuple[float, float], window: tuple[float, float]) -> bool:
        return gap[0] < window[1] and window[0] < gap[1]

    undisturbed = median(b - a for a, b in gaps if not any(during((a, b), window) for window in windows))
    lost = [sum(b - a - undisturbed for a, b in gaps if during((a, b), window)) for window in windows]
    checkpoints = sorted(run.checkpoints.glob("step-*"))
    later = slice(1, None) if len(lost) > 1 else slice(None)
    return {
        "checkpoint_bytes": sum(file.stat().st_size for file in checkpoints[-1].iterdir()),
        "step_seconds": round(undisturbed, 4),
        "stalled_first": saved[0]["stalled"], "lost_first": round(lost[0], 3),
        "stalled": round(max(event["stalled"] for event in saved[later]), 3),
        "lost": round(max(lost[later]), 3),
        "seconds": round(max(event["seconds"] for event in saved), 2),
        "share": round(max(lost[later]) / _INTERVAL, 5),
        "all": [{"step": event["step"], "stalled": event["stalled"], "seconds": event["seconds"], "lost": round(one, 3)}
                for event, one in zip(saved, lost, strict=True)],
    }  # fmt: skip
