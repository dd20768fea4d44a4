"""What more GPUs bring: one run alone, then by each engine in 1, 2, 4, … processes, as `sojourn train` starts them.

The global batch and its rows stay the same (strong scaling). One process of an engine shows what the engine itself
costs. A row whose losses are not those of the run alone has no speed-up. Without GPUs the processes share the CPU.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sojourn.bench.train.compare import Row, compare
from sojourn.bench.train.contenders import OURS, Contender, check_rows, contenders
from sojourn.bench.train.ground import lay, rows_of, settings
from sojourn.bench.train.measure import Plan, circumstances, keep, make_plan, row_of
from sojourn.bench.train.workloads import Workload
from sojourn.config.fields import gpu_numbers
from sojourn.config.words import closest, shown
from sojourn.errors import UserError
from sojourn.storage.files import write_json

Say = Callable[[str], None]

ENGINES = ("ddp", "fsdp", "deepspeed")
ALONE = "single"
_USUAL = "fused"  # the fastest of our rows that starts at once


@dataclass(frozen=True)
class Scaling:
    """`plan.rows` is the one of our rows whose settings all processes have."""

    plan: Plan
    gpus: tuple[int, ...]
    engines: tuple[str, ...]

    @property
    def counts(self) -> list[int]:
        """1, 2, 4, … and all."""
        most = len(self.gpus)
        return [*(2**power for power in range(most.bit_length()) if 2**power < most), most]

    def workload(self, asked: Workload) -> Workload:
        """With as many rows to a step as can be shared evenly, however many processes there are."""
        share = math.lcm(*self.counts)
        return replace(asked, rows=-(-asked.rows // share) * share)

    def contenders(self, workload: Workload) -> list[Contender]:
        ours = {one.name: one.settings for one in contenders(workload, self.plan.device) if one.role == OURS}
        told = ours[self.plan.rows[0]]

        def one(engine: str, count: int) -> Contender:
            gpus = ",".join(map(str, self.gpus[:count]))
            how = {"parallel.engine": engine, "parallel.gpus": gpus, "parallel.restarts": 0}
            needs = ("deepspeed",) if engine == "deepspeed" else ()
            return Contender(f"{engine}-{count}", engine, OURS, {**told, **how}, needs)

        return [one(ALONE, 1), *(one(engine, count) for engine in self.engines for count in self.counts)]


def make_scaling(
    workloads: Iterable[str],
    row: str,
    steps: int,
    folder: Path | None,
    gpus: str,
    engines: str,
    data: str | None = None,
    out: Path | None = None,
) -> Scaling:
    named = list(dict.fromkeys(name.strip() for name in engines.split(",") if name.strip()))
    for name in named:
        if name not in ENGINES:
            hint = closest(name, ENGINES)
            raise UserError(f"--engines: “{shown(name)}”: no such engine{hint}; there are: {', '.join(ENGINES)}")
    numbers = _numbers(gpus)
    plan = make_plan(workloads, "", steps, False, folder, data=data, out=out)
    used = row.strip() or _USUAL
    common = [{one.name for one in plan.contenders(workload)} for workload in plan.workloads]
    check_rows([used], set.intersection(*common))
    there = _there(plan.device)
    if numbers is None:
        numbers = list(range(there or 1))
    elif there is not None and max(numbers) >= there:
        raise UserError(f"--gpus: there is no GPU {max(numbers)}; this machine has {there}, counted from 0")
    return Scaling(replace(plan, rows=(used,)), tuple(numbers), tuple(named))


def _numbers(typed: str) -> list[int] | None:
    """None: all there are."""
    found = gpu_numbers(typed)
    if found == "all":
        return None
    if not isinstance(found, list) or not all(isinstance(one, int) for one in found):
        raise UserError(f"--gpus: “{shown(typed)}” given; allowed: numbers such as 0,1, or all")
    if len(set(found)) < len(found):
        raise UserError(f"--gpus: {typed} given; name each GPU once")
    return found


def _there(device: str) -> int | None:
    """GPUs; None where the CPU is used, which any number of processes can share."""
    if device != "cuda":
        return None
    import torch

    return int(torch.cuda.device_count())


def measure(scaling: Scaling, say: Say) -> dict[str, Any]:
    """Everything, and a line to `say` for each row as it comes."""
    plan = scaling.plan
    made = tempfile.TemporaryDirectory(prefix="sojourn-bench-") if plan.folder is None else nullcontext(plan.folder)
    if plan.on_cpu and len(scaling.gpus) > 1:
        say(f"no GPU is used here; {len(scaling.gpus)} processes share the CPU")
    result: Row = {
        **circumstances(plan.device), "steps": plan.steps, "gpus_used": list(scaling.gpus), "settings": plan.rows[0],
        "workloads": [],
    }  # fmt: skip
    with made as work:
        for workload in plan.workloads:
            for found in _measure(scaling, workload, Path(work).absolute(), say):
                keep(plan, result, found)
    return result


def _measure(scaling: Scaling, asked: Workload, work: Path, say: Say) -> Iterator[Row]:
    """All rows so far, after each."""
    plan, workload = scaling.plan, scaling.workload(asked)
    says = f"{workload.name}: {workload.says}; {workload.rows} rows of {workload.row_length:,} to a step"
    say(f"{says}, in all processes together")
    ground = lay(workload, plan.steps, plan.device, work, plan.data)
    run = work / "run.yaml"
    write_json(run, settings(ground, plan.steps, plan.every, plan.device))
    rows_at = rows_of(ground, run)
    say(head())
    rows: list[Row] = []
    for contender in scaling.contenders(workload):
        with _temporary_files_in(work):
            row = row_of(plan, contender, ground, run, rows_at, work)
        engine, _, count = contender.name.partition("-")
        rows.append(row | {"engine": engine, "processes": int(count)})
        judge(rows[-1], rows[0], plan.on_cpu)
        say(line(rows[-1]))
        yield {"workload": workload.name, "rows_to_a_step": workload.rows, "rows": rows}
    say("")


@contextmanager
def _temporary_files_in(work: Path) -> Iterator[None]:
    """A run is ended after its last step, and cannot tidy up."""
    was = os.environ.get("TMPDIR")
    with tempfile.TemporaryDirectory(prefix="tmp-", dir=work, ignore_cleanup_errors=True) as folder:
        os.environ["TMPDIR"] = folder
        try:
            yield
        finally:
            del os.environ["TMPDIR"]
            if was is not None:
                os.environ["TMPDIR"] = was


def judge(row: Row, alone: Row, on_cpu: bool) -> None:
    """Adds what the row brought against the run alone, if it computed the same.

    Memory is that of one process: on a GPU of the first, on a CPU the mean, what started them included.
    """
    if "losses" not in row:
        return
    if on_cpu:
        row["peak_memory"] //= row["processes"]
    if "losses" not in alone:
        row["note"] = f"not compared: {ALONE} failed"
        return
    compare(row, alone, row["told"]["train.precision"])
    row["efficiency"] = row["gain"] / row["processes"] if row["same"] else None


def head() -> str:
    return f"{'engine':<12}{'processes':>9}{'tok/s':>12}{'×':>8}{'efficiency':>12}{'GiB each':>10}{'loss differs':>14}"


def line(row: Row) -> str:
    speed = f"{row['tokens_per_second']:,.0f}" if "tokens_per_second" in row else ""
    gain = f"{row['gain']:.2f}" if row.get("gain") else ""
    efficiency = f"{100 * row['efficiency']:.0f} %" if row.get("efficiency") else ""
    memory = f"{row['peak_memory'] / 2**30:.2f}" if "peak_memory" in row else ""
    apart = f"{row['difference']:.1e}" if row.get("difference") is not None else ""
    told = f"{row['engine']:<12}{row['processes']:>9}{speed:>12}{gain:>8}{efficiency:>12}{memory:>10}{apart:>14}"
    return f"{told}  {row.get('note', '')}".rstrip()
