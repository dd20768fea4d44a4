"""Writes plan/fit.toml anew: curves from single kernels, then what only whole steps can tell.

    python -m sojourn.bench.plan.fit KERNELS.json PLAN.json [OUT.toml]

PLAN.json is a result of `sojourn bench plan --out`. Only the half of it that is not held out is looked at.
"""

from __future__ import annotations

import json
import math
import re
import sys
from copy import deepcopy
from importlib import resources
from pathlib import Path
from typing import Any

from sojourn.bench.plan.curves import fitted
from sojourn.bench.plan.replan import work_of_row
from sojourn.catalog.facts import Gpu
from sojourn.catalog.names import gpu as find_gpu
from sojourn.plan.constants import constants, read
from sojourn.plan.speed import speed
from sojourn.plan.work import Work

# What steps may change, and how far off each may well be: little where kernels were measured by themselves.
FREE = {
    ("matmul", "slowness"): 0.05, ("matmul", "start"): 0.3, ("attention", "peak"): 0.1, ("attention", "varlen"): 0.2,
    ("traffic", "share"): 0.1, ("traffic", "eager_fused"): 0.2, ("traffic", "eager_plain"): 0.2,
    ("launch", "compiled_ms"): 0.1, ("launch", "compiled_adapter_ms"): 0.5, ("launch", "compiled_quantised_ms"): 0.3,
    ("launch", "eager_ms"): 0.3, ("launch", "adapter_ms"): 0.3, ("launch", "norm_ms"): 0.3, ("launch", "plain"): 0.2,
    ("launch", "quantised_ms"): 0.3, ("launch", "pass_ms"): 0.2, ("update", "step_ms"): 0.2,
    ("update", "tensor_us"): 0.3, ("update", "synced_us"): 0.5, ("update", "operation_us"): 0.5,
    ("update", "share_8bit"): 0.5,
}  # fmt: skip
_STRIDES = (0.2, 0.1, 0.05, 0.02, 0.01)
_NOISE = 0.05  # of a step's time

Timed = tuple[Work, Gpu, float]


def timed(rows: list[dict[str, Any]]) -> list[Timed]:
    """Those that may be looked at."""
    able = [row for row in rows if not row["held_out"] and row.get("measured", {}).get("step_seconds")]
    return [(work_of_row(row), find_gpu(str(row["gpu"])), float(row["measured"]["step_seconds"])) for row in able]


def adjust(table: dict[str, Any], steps: list[Timed]) -> dict[tuple[str, str], float]:
    """Changes `table`, which speed() reads, until no single change brings the planned times nearer."""
    first = {key: float(table[key[0]][key[1]]) for key in FREE}

    def error() -> float:
        missed = sum((math.log(speed(work, card).step_seconds / real) / _NOISE) ** 2 for work, card, real in steps)
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


def written(text: str, changes: dict[tuple[str, str], float], count: int) -> str:
    """The file's text with other figures in it."""
    section, lines = "", []
    for line in text.splitlines():
        section = line.strip("[]") if line.startswith("[") else section
        name = line.partition(" = ")[0]
        value = changes.get((section, name))
        lines.append(line if value is None else re.sub(r"= [^ ]+", f"= {value:.6g}", line, count=1))
    lines.insert(2, f"# Then adjusted to {count} whole steps of `sojourn bench plan`.")
    return "\n".join(lines) + "\n"


def made(kernels: dict[str, Any], plan: dict[str, Any]) -> str:
    """The file's text, from both measurements."""
    text, steps, table = fitted(kernels), timed(plan["rows"]), constants()
    kept = deepcopy(table)
    try:
        table.clear()
        table.update(read(text))
        return written(text, adjust(table, steps), len(steps))
    finally:
        table.clear()
        table.update(kept)


def main(words: list[str]) -> None:
    kernels, plan = (json.loads(Path(word).read_text(encoding="utf-8")) for word in words[:2])
    target = Path(words[2]) if len(words) > 2 else Path(str(resources.files("sojourn.plan"))) / "fit.toml"
    target.write_text(made(kernels, plan), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
