"""Writes estimate/fit.toml anew: curves from single kernels, then what only whole steps can tell.

    python -m benchmarks.planner.fit KERNELS.json PLAN.json… [OUT.toml]

PLAN.json are results of `python -m benchmarks.planner --out`. Of the named cases only the half that is not held out is
fitted to; of runs drawn at random, all: those of another seed show how good the fit is.
"""

from __future__ import annotations

import json
import math
import re
import sys
from copy import deepcopy
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

from benchmarks.planner.cases import DRAWN
from benchmarks.planner.kernel_curves import fitted
from benchmarks.planner.replan import cpu_of_row, workload_of_row
from sojourn.catalog.gpus import Gpu, find_gpu
from sojourn.estimate.constants import constants, read
from sojourn.estimate.step_time import step_time
from sojourn.estimate.workload import Workload

# What steps may change, and how far off each may well be: little where kernels were measured by themselves.
FREE = {
    ("matmul", "slowness"): 0.05, ("matmul", "start"): 0.5, ("attention", "peak"): 0.1, ("attention", "varlen"): 0.2,
    ("traffic", "share"): 0.1, ("traffic", "eager_fused"): 0.2, ("traffic", "eager_plain"): 0.2,
    ("small", "adapter_compiled_us"): 0.3, ("small", "adapter_eager_us"): 0.3, ("small", "quantised_compiled_us"): 0.3,
    ("small", "quantised_eager_us"): 0.3, ("small", "again"): 0.1, ("small", "norms_eager_us"): 0.5,
    ("launch", "compiled_ms"): 0.2, ("launch", "compiled_plain_ms"): 0.2, ("launch", "compiled_frozen_ms"): 0.2,
    ("launch", "compiled_adapter_ms"): 0.3, ("launch", "compiled_quantised_ms"): 0.3, ("launch", "fp8_ms"): 0.2,
    ("launch", "eager_ms"): 0.2, ("launch", "adapter_ms"): 0.2, ("launch", "norm_ms"): 0.3, ("launch", "bias_ms"): 0.3,
    ("launch", "plain"): 0.2, ("launch", "quantised_ms"): 0.3, ("launch", "pass_ms"): 0.2,
    ("launch", "selective_compiled"): 0.1, ("launch", "selective_eager"): 0.2, ("launch", "full_compiled"): 0.1,
    ("launch", "full_eager"): 0.1, ("update", "step_ms"): 0.2, ("update", "tensor_us"): 0.3,
    ("update", "synced_us"): 0.5, ("update", "operation_us"): 0.5, ("update", "share_8bit"): 0.5,
}  # fmt: skip
_STRIDES = (0.2, 0.1, 0.05, 0.02, 0.01)
_NOISE = 0.05  # of a step's time
_OUTLIER = 2.0  # times the noise, from which on a step counts by how far off it is, not by the square of that

Timed = tuple[Workload, Gpu, float]


def timed(rows: list[dict[str, Any]]) -> list[Timed]:
    """Those that may be looked at, each with the speed of the CPU that it ran with."""
    found = []
    for row in rows:
        seconds = row.get("measured", {}).get("step_seconds")
        if seconds and (not row["held_out"] or row["name"].startswith(DRAWN)):
            work = replace(workload_of_row(row), cpu_slowness=cpu_of_row(row))
            found.append((work, find_gpu(str(row["gpu"])), float(seconds)))
    return found


def adjust(table: dict[str, Any], steps: list[Timed]) -> dict[tuple[str, str], float]:
    """Changes `table`, which step_time() reads, until no single change brings the planned times nearer."""
    first = {key: float(table[key[0]][key[1]]) for key in FREE}

    def error() -> float:
        missed = sum(_cost(math.log(step_time(work, card).step_seconds / real) / _NOISE) for work, card, real in steps)
        return missed + sum((math.log(table[a][b] / first[a, b]) / off) ** 2 for (a, b), off in FREE.items())

    best = error()
    for stride in _STRIDES:
        better = True
        while better:
            better = False
            for a, b in FREE:
                for times in (1 + stride, 1 / (1 + stride)):
                    kept, table[a][b] = table[a][b], table[a][b] * times
                    found = error()
                    if found < best - 1e-6:
                        best, better = found, True
                    else:
                        table[a][b] = kept
    return {key: float(table[key[0]][key[1]]) for key in FREE}


def _cost(off: float) -> float:
    """Huber's: a CPU that was busy with something else once must not move everything."""
    return off**2 if abs(off) <= _OUTLIER else _OUTLIER * (2 * abs(off) - _OUTLIER)


def written(text: str, changes: dict[tuple[str, str], float], count: int) -> str:
    """The file's text with other figures in it."""
    section, lines = "", []
    for line in text.splitlines():
        section = line.strip("[]") if line.startswith("[") else section
        name = line.partition(" = ")[0]
        value = changes.get((section, name))
        lines.append(line if value is None else re.sub(r"= [^ ]+", f"= {value:.6g}", line, count=1))
    lines.insert(2, f"# Then adjusted to {count} measured steps of `python -m benchmarks.planner`.")
    return "\n".join(lines) + "\n"


def made(kernels: dict[str, Any], plans: list[dict[str, Any]]) -> str:
    """The file's text, from both measurements."""
    text, table = fitted(kernels), constants()
    kept = deepcopy(table)
    try:
        table.clear()
        table.update(read(text))
        steps = timed([row for plan in plans for row in plan["rows"]])
        return written(text, adjust(table, steps), len(steps))
    finally:
        table.clear()
        table.update(kept)


def main(words: list[str]) -> None:
    targets = [Path(word) for word in words if word.endswith(".toml")]
    targets = targets or [Path(str(resources.files("sojourn.estimate"))) / "fit.toml"]
    kernels, *plans = (json.loads(Path(word).read_text(encoding="utf-8")) for word in words if word.endswith(".json"))
    targets[0].write_text(made(kernels, plans), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
