"""Plans every run in published.toml and compares it with the throughput that its authors published.

    python benchmarks/published.py            one table, errors by card family, how many lie in their planned range
    python benchmarks/published.py --folds    also: the fitted constant from one half of the rows, scored on the other

No GPU, no torch. Exit status 1 where a bar is missed. A library's own ways (its attention kernels, what it recomputes)
are stated with its source in published.toml and hold for all its rows: no row has a constant of its own.
"""

from __future__ import annotations

import importlib
import statistics
import sys
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sojourn.catalog.gpus import Gpu, find_gpu
from sojourn.catalog.models import ModelSpec, find_model
from sojourn.estimate.ceilings import matmul_rate
from sojourn.estimate.constants import constants
from sojourn.estimate.step_time import step_time
from sojourn.estimate.workload import LINEAR, Workload
from sojourn.resolve.new_model import llama_spec

_toml: Any = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
DATA = Path(__file__).with_name("published.toml")
BARS = {"A100": 0.06, "Hopper, several": 0.12, "Hopper, one": 0.20, "others": 0.20}  # mean error by family
LEAST_INSIDE, WIDEST = 0.80, 0.35
_FUSED_ADAMW_BYTES = 40  # what `estimate/` counts for AdamW whose clipping is not fused


@dataclass(frozen=True)
class Published:
    """One row: what was run, what was published, what is planned (seconds of a step)."""

    row: dict[str, Any]
    workload: Workload
    gpu: Gpu
    planned: float
    spread: float

    @property
    def published(self) -> float:
        return self.tokens / float(self.row["tokens_per_second"])

    @property
    def tokens(self) -> int:
        """Of one GPU in a step."""
        return self.workload.tokens * self.workload.gradient_accumulation

    @property
    def error(self) -> float:
        """Of the planned throughput."""
        return self.published / self.planned - 1

    @property
    def inside(self) -> bool:
        return abs(self.published / self.planned - 1) <= self.spread

    @property
    def family(self) -> str:
        if self.gpu.name.startswith("A100"):
            return "A100"
        if self.gpu.name.startswith(("H100", "H200")):
            return "Hopper, several" if self.workload.world_size > 1 else "Hopper, one"
        return "others"


def read() -> list[Published]:
    table = _toml.loads(DATA.read_text(encoding="utf-8"))
    return [_planned(table, row) for row in table["row"]]


def _planned(table: dict[str, Any], row: dict[str, Any]) -> Published:
    source, gpu = table["source"][row["source"]], _board(table, row)
    workload = _workload(table, row, source, gpu)
    step = step_time(workload, gpu)
    seconds = {part.name: part.seconds for part in step.parts}
    more = seconds["attention"] * (1 / source.get("attention_speed", 1.0) - 1)
    if workload.activation_checkpointing == "selective":
        more += source.get("selective_recomputes", 0.0) * seconds["matmuls"] / 3
    moved = source.get("optimizer_bytes", _FUSED_ADAMW_BYTES) / _FUSED_ADAMW_BYTES
    more += (moved - 1) * seconds["optimizer step"]
    return Published(row, workload, gpu, step.step_seconds + more, step.spread)


def _board(table: dict[str, Any], row: dict[str, Any]) -> Gpu:
    gpu = find_gpu(row["gpu"])
    board = table["board"].get(row.get("board"))
    if board is None or gpu.watts is None:
        return gpu
    slower = (board["watts"] / gpu.watts) ** 0.5
    return replace(gpu, **board, matmul_tflops=slower * matmul_rate("bf16", gpu) / 1e12)


def _workload(table: dict[str, Any], row: dict[str, Any], source: dict[str, Any], gpu: Gpu) -> Workload:
    stack = dict(table["stack"][row.get("stack", source["stack"])])
    if row.get("chunked_loss"):
        stack["full_logits"] = False
    return Workload(
        _model(table, row["model"]), row["method"], row["micro_batch"], row["length"], row.get("accumulation", 1),
        compute_capability=gpu.capability or (8, 0), precision=row.get("precision", "bf16"),
        attention=row.get("attention", "flash_attention_2"), activation_checkpointing=row.get("checkpointing", "off"),
        fp8=row.get("fp8", "off"), cuda_graphs=row.get("cuda_graphs", False), optimizer=row.get("optimizer", "adamw"),
        lora_rank=row.get("rank", 16), lora_targets=tuple(row.get("targets", LINEAR)),
        lora_dropout=row.get("dropout", 0.0), engine=row.get("engine", "single"), world_size=row.get("count", 1),
        nodes=row.get("nodes", 1), network_gbs=row.get("network_gbs"), with_evaluation=False, in_training_loop=False,
        **stack,
    )  # fmt: skip


def _model(table: dict[str, Any], name: str) -> ModelSpec:
    shape = table["shape"].get(name)
    if shape is None:
        return find_model(name)
    sizes = [shape[key] for key in ("hidden", "layers", "heads", "kv_heads", "ffn", "vocab", "tied")]
    return replace(llama_spec(*sizes), name=name, head_dim=shape["head_dim"])


def by_family(rows: list[Published]) -> dict[str, list[Published]]:
    families: dict[str, list[Published]] = defaultdict(list)
    for row in rows:
        families[row.family].append(row)
    return dict(families)


def mean_error(rows: list[Published]) -> float:
    return statistics.mean(abs(row.error) for row in rows)


def share_inside(rows: list[Published]) -> float:
    return sum(row.inside for row in rows) / len(rows)


def _line(one: Published) -> str:
    row, work = one.row, one.workload
    card = f"{work.world_size} × {one.gpu.name}" if work.world_size > 1 else one.gpu.name
    what = f"{row['model']} {row['method']}{' FP8' if work.fp8 != 'off' else ''}"
    size = f"{work.micro_batch} × {work.sequence_length:,}"
    low, high = (one.tokens / one.planned / (1 + way * one.spread) for way in (1, -1))
    mark = "" if one.inside else "  outside"
    return (
        f"{row['source']:<15}{card:<17}{what:<25}{size:>12} {work.activation_checkpointing:<10}{low:>9,.0f} to"
        f"{high:>10,.0f}{row['tokens_per_second']:>10,.0f}{100 * one.error:>+7.1f} %{mark}"
    )


def _folds() -> None:
    """`links.copies`, fitted to every second row and scored on the others. The other rates come from their sources, but
    were chosen with these rows in sight, so rows that nobody has seen will be further off."""
    links = constants()["links"]
    kept = links["copies"]
    try:
        for fold in (0, 1):
            scores = {}
            for value in (0.0, 1.5, 3.0, 4.5, 6.0, 7.5):
                links["copies"] = value
                several = [row for row in read() if row.workload.world_size > 1]
                scores[value] = tuple(mean_error(several[start::2]) for start in (fold, 1 - fold))
            best = min(scores, key=lambda value: scores[value][0])
            fitted, other = scores[best]
            print(f"fold {fold}: copies = {best:g}; {100 * fitted:.1f} % there, {100 * other:.1f} % on the other half")
    finally:
        links["copies"] = kept


def main(words: list[str]) -> int:
    rows, missed = read(), []
    print(f"{'source':<15}{'GPUs':<17}{'run':<25}{'micro batch':>12} {'recomputes':<10}{'planned tok/s a GPU':>22}"
          f"{'published':>10}{'error':>9}")  # fmt: skip
    for row in rows:
        print(_line(row))
    print()
    for family, some in by_family(rows).items():
        off, bias = mean_error(some), statistics.mean(row.error for row in some)
        missed += [family] if off > BARS[family] else []
        print(f"{family:<16}{len(some):>4} rows  mean error {100 * off:>4.1f} % (bar {100 * BARS[family]:.0f} %), "
              f"bias {100 * bias:+.1f} %, in their range {100 * share_inside(some):.0f} %")  # fmt: skip
    inside, widest = share_inside(rows), max(row.spread for row in rows if row.gpu.rates != "data sheet")
    print(f"{'all':<16}{len(rows):>4} rows  in their range {100 * inside:.0f} % (bar {100 * LEAST_INSIDE:.0f} %); "
          f"widest range ±{100 * widest:.0f} %, of cards that were measured (bar ±{100 * WIDEST:.0f} %)")  # fmt: skip
    missed += (["coverage"] if inside < LEAST_INSIDE else []) + (["widest range"] if widest > WIDEST else [])
    if "--folds" in words:
        _folds()
    if missed:
        print(f"missed: {', '.join(missed)}")
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
