"""`sojourn bench train --gpus`: strong scaling of each engine over 1, 2, 4, … ranks, against one process alone.

The global batch and its rows stay the same. One rank of an engine shows what the engine itself costs. A row whose
losses are not those of the single process gets no speed-up. Without GPUs the ranks share the CPU.
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

from sojourn.bench.train.bench_row import OURS, BenchRow
from sojourn.bench.train.compare import Row, compare
from sojourn.bench.train.measure import TrainBench, describe_environment, make_bench, run_row, store
from sojourn.bench.train.rows import bench_rows, check_rows
from sojourn.bench.train.workload_files import make_files, prepare_rows, run_settings
from sojourn.bench.train.workloads import Workload
from sojourn.config.fields import parse_gpus
from sojourn.config.messages import did_you_mean, printable
from sojourn.errors import UserError
from sojourn.storage.files import write_json

Print = Callable[[str], None]

ENGINES = ("ddp", "fsdp", "deepspeed")
SINGLE = "single"
_DEFAULT_ROW = "fused"  # our fastest row that does not compile


@dataclass(frozen=True)
class Scaling:
    """`bench.rows[0]`: the row of ours whose settings all ranks use."""

    bench: TrainBench
    gpus: tuple[int, ...]
    engines: tuple[str, ...]

    @property
    def counts(self) -> list[int]:
        """1, 2, 4, … and all."""
        count = len(self.gpus)
        return [*(2**power for power in range(count.bit_length()) if 2**power < count), count]

    def round_up(self, workload: Workload) -> Workload:
        """With a global batch that every number of ranks divides."""
        multiple = math.lcm(*self.counts)
        return replace(workload, rows=-(-workload.rows // multiple) * multiple)

    def bench_rows(self, workload: Workload) -> list[BenchRow]:
        ours = {row.name: row.settings for row in bench_rows(workload, self.bench.device) if row.runner == OURS}
        settings = ours[self.bench.rows[0]]

        def row(engine: str, count: int) -> BenchRow:
            gpus = ",".join(map(str, self.gpus[:count]))
            parallel = {"parallel.engine": engine, "parallel.gpus": gpus, "parallel.restarts": 0}
            needs = ("deepspeed",) if engine == "deepspeed" else ()
            return BenchRow(f"{engine}-{count}", engine, OURS, {**settings, **parallel}, needs)

        return [row(SINGLE, 1), *(row(engine, count) for engine in self.engines for count in self.counts)]


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
    names = list(dict.fromkeys(name.strip() for name in engines.split(",") if name.strip()))
    for name in names:
        if name not in ENGINES:
            hint = did_you_mean(name, ENGINES)
            raise UserError(f"--engines: “{printable(name)}”: no such engine{hint}; there are: {', '.join(ENGINES)}")
    numbers = _gpu_indices(gpus)
    bench = make_bench(workloads, "", steps, False, folder, data=data, out=out)
    row = row.strip() or _DEFAULT_ROW
    common = [{one.name for one in bench.select_rows(workload)} for workload in bench.workloads]
    check_rows([row], set.intersection(*common))
    available = _gpu_count(bench.device)
    if numbers is None:
        numbers = list(range(available or 1))
    elif available is not None and max(numbers) >= available:
        raise UserError(f"--gpus: there is no GPU {max(numbers)}; this machine has {available}, counted from 0")
    return Scaling(replace(bench, rows=(row,)), tuple(numbers), tuple(names))


def _gpu_indices(text: str) -> list[int] | None:
    """None: all GPUs."""
    found = parse_gpus(text)
    if found == "all":
        return None
    if not isinstance(found, list) or not all(isinstance(one, int) for one in found):
        raise UserError(f"--gpus: “{printable(text)}” given; allowed: numbers such as 0,1, or all")
    if len(set(found)) < len(found):
        raise UserError(f"--gpus: {text} given; name each GPU once")
    return found


def _gpu_count(device: str) -> int | None:
    """None on a CPU, which any number of ranks can share."""
    if device != "cuda":
        return None
    import torch

    return int(torch.cuda.device_count())


def measure(scaling: Scaling, echo: Print) -> dict[str, Any]:
    """Runs all workloads; prints each row as it ends."""
    bench = scaling.bench
    folder = tempfile.TemporaryDirectory(prefix="sojourn-bench-") if bench.folder is None else nullcontext(bench.folder)
    if bench.on_cpu and len(scaling.gpus) > 1:
        echo(f"no GPU is used; {len(scaling.gpus)} ranks share the CPU")
    result: Row = {
        **describe_environment(bench.device), "steps": bench.steps, "gpus_used": list(scaling.gpus),
        "settings": bench.rows[0], "workloads": [],
    }  # fmt: skip
    with folder as work:
        for workload in bench.workloads:
            for table in _measure(scaling, workload, Path(work).absolute(), echo):
                store(bench, result, table)
    return result


def _measure(scaling: Scaling, workload: Workload, work: Path, echo: Print) -> Iterator[Row]:
    """The table so far, after each row."""
    bench, workload = scaling.bench, scaling.round_up(workload)
    title = f"{workload.name}: {workload.title}; {workload.rows} rows of {workload.row_length:,} tokens per step"
    echo(f"{title}, over all ranks")
    files = make_files(workload, bench.steps, bench.device, work, bench.data)
    run = work / "run.yaml"
    write_json(run, run_settings(files, bench.steps, bench.log_every, bench.device))
    prepared = prepare_rows(files, run)
    echo(format_header())
    rows: list[Row] = []
    for bench_row in scaling.bench_rows(workload):
        with _temporary_files_in(work):
            row = run_row(bench, bench_row, files, run, prepared, work)
        engine, _, count = bench_row.name.partition("-")
        rows.append(row | {"engine": engine, "ranks": int(count)})
        compare_with_single(rows[-1], rows[0], bench.on_cpu)
        echo(format_row(rows[-1]))
        yield {"workload": workload.name, "global_batch": workload.rows, "rows": rows}
    echo("")


@contextmanager
def _temporary_files_in(work: Path) -> Iterator[None]:
    """A run is killed after its last step, and cannot remove its temporary files."""
    before = os.environ.get("TMPDIR")
    with tempfile.TemporaryDirectory(prefix="tmp-", dir=work, ignore_cleanup_errors=True) as folder:
        os.environ["TMPDIR"] = folder
        try:
            yield
        finally:
            del os.environ["TMPDIR"]
            if before is not None:
                os.environ["TMPDIR"] = before


def compare_with_single(row: Row, single: Row, on_cpu: bool) -> None:
    """Adds speed-up and efficiency against the single process, if the losses are the same.

    Memory is per rank: rank 0's on a GPU, the mean on a CPU, the launcher included.
    """
    if "losses" not in row:
        return
    if on_cpu:
        row["peak_memory"] //= row["ranks"]
    if "losses" not in single:
        row["note"] = f"not compared: {SINGLE} failed"
        return
    compare(row, single, row["settings"]["train.precision"])
    row["efficiency"] = row["gain"] / row["ranks"] if row["same"] else None


def format_header() -> str:
    return f"{'engine':<12}{'ranks':>9}{'tok/s':>12}{'×':>8}{'efficiency':>12}{'GiB each':>10}{'loss differs':>14}"


def format_row(row: Row) -> str:
    speed = f"{row['tokens_per_second']:,.0f}" if "tokens_per_second" in row else ""
    gain = f"{row['gain']:.2f}" if row.get("gain") else ""
    efficiency = f"{100 * row['efficiency']:.0f} %" if row.get("efficiency") else ""
    memory = f"{row['peak_memory'] / 2**30:.2f}" if "peak_memory" in row else ""
    difference = f"{row['difference']:.1e}" if row.get("difference") is not None else ""
    text = f"{row['engine']:<12}{row['ranks']:>9}{speed:>12}{gain:>8}{efficiency:>12}{memory:>10}{difference:>14}"
    return f"{text}  {row.get('note', '')}".rstrip()
