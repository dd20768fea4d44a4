"""`sojourn bench train`: runs the rows of each workload one by one, each in a fresh process, and compares them."""

from __future__ import annotations

import datetime
import os
import platform
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

from sojourn.bench.peers import load_peers, require_peers
from sojourn.bench.process_memory import run_sampled
from sojourn.bench.train.bench_row import OURS, REFERENCE, BenchRow
from sojourn.bench.train.compare import Row, best_against_peer, compare, format_header, format_row
from sojourn.bench.train.rows import bench_rows, check_rows, select_rows
from sojourn.bench.train.workload_files import (
    ALPHA_PER_RANK,
    WorkloadFiles,
    files_folder,
    make_files,
    prepare_rows,
    run_settings,
)
from sojourn.bench.train.workloads import Workload, default_workloads, find_workloads
from sojourn.config.load import load_run
from sojourn.config.messages import printable
from sojourn.errors import UserError
from sojourn.run.folder import RunFolder
from sojourn.storage.files import read_json, write_json
from sojourn.train.metrics.environment import version_of

Print = Callable[[str], None]

_PACKAGES = (
    "sojourn", "torch", "transformers", "peft", "bitsandbytes", "triton", "liger-kernel", "flash-attn",
    "flash-attn-4", "quack-kernels", "trl", "unsloth",
)  # fmt: skip
_SPARE_BYTES = 500_000_000  # for data, rows and compiled code
_LOG_CHARACTERS = 3000  # of a failed row
_MIN_INTERVALS = 5  # of logged steps; the first warms up
_MAX_INTERVAL = 10  # steps, so that there is a loss curve to compare
_OVERRIDES = (
    "train.lr", "train.min_lr", "train.schedule", "train.warmup", "train.weight_decay", "train.beta1", "train.beta2",
    "train.clip", "train.seed", "log.every_steps",
)  # fmt: skip


@dataclass(frozen=True)
class TrainBench:
    """What to measure; `folder` is None where no files are kept.

    `data`: the user's own texts or chats instead of synthetic ones. `out`: where the result is written after each row.
    `overrides`: settings of all our rows, which peers cannot follow.
    """

    workloads: tuple[Workload, ...]
    rows: tuple[str, ...]
    steps: int
    peers: bool
    device: str
    folder: Path | None
    peer_steps: int
    data: str | None = None
    out: Path | None = None
    overrides: tuple[str, ...] = ()

    @property
    def log_every(self) -> int:
        return max(1, min(_MAX_INTERVAL, self.steps // _MIN_INTERVALS))

    @property
    def logged_steps(self) -> list[int]:
        """As `log.every_steps` logs them."""
        return sorted({1, *range(self.log_every, self.steps + 1, self.log_every), self.steps})

    @property
    def on_cpu(self) -> bool:
        """There a row's memory is that of its process."""
        return self.device == "cpu"

    @property
    def precision(self) -> str:
        """Of the reference."""
        return "fp32" if self.on_cpu else "bf16"

    def select_rows(self, workload: Workload) -> list[BenchRow]:
        return select_rows(bench_rows(workload, self.device), list(self.rows), self.peers)


def make_bench(
    workloads: Iterable[str],
    rows: str,
    steps: int,
    peers: bool | None,
    folder: Path | None,
    peer_steps: int | None = None,
    data: str | None = None,
    out: Path | None = None,
    overrides: Sequence[str] = (),
) -> TrainBench:
    """`peers`: None takes them where their scripts are at hand."""
    missing = [name for name in ("torch", "transformers") if find_spec(name) is None]
    if missing:
        raise UserError(f"to train, {' and '.join(missing)} must be installed: pip install 'sojourn[train]'")
    if folder is not None and not folder.is_dir():
        raise UserError(f"--folder: {folder}: no such folder")
    if peers:
        require_peers()
    elif peers is None:
        peers = load_peers() is not None
    if peers and overrides:
        raise UserError(f"{printable(overrides[0])}: applies to our own rows alone; add --no-peers")
    _check_overrides(overrides)
    selected = find_workloads(workloads)
    from sojourn.machine.gpus import driver_gpus
    from sojourn.machine.precision import choose_device

    device = "cuda" if choose_device() == "cuda" else "cpu"
    if not selected:
        gpus = driver_gpus() if device == "cuda" else []
        selected = default_workloads(gpus[0].memory_bytes if gpus else None)
    names = tuple(dict.fromkeys(name.strip() for name in rows.split(",") if name.strip()))
    peer_steps = min(steps, peer_steps or steps)
    bench = TrainBench(tuple(selected), names, steps, peers, device, folder, peer_steps, data, out, tuple(overrides))
    check_rows(list(names), {row.name for workload in selected for row in bench_rows(workload, device)})
    if not any(bench.select_rows(workload) for workload in selected):
        raise UserError("--rows: names only peers, but --no-peers leaves them out; remove one of the two")
    _check_disk(bench)
    return bench


def _check_overrides(overrides: Sequence[str]) -> None:
    """Hyperparameters may change; the rest belongs to the workload or distinguishes the rows."""
    for arg in overrides:
        key, equals, _ = arg.partition("=")
        if key not in _OVERRIDES or not equals:
            raise UserError(f"{printable(arg)}: allowed: KEY=VALUE, with a KEY of {', '.join(_OVERRIDES)}")
    load_run(["small", *overrides])


def _check_disk(bench: TrainBench) -> None:
    folder = bench.folder or Path(tempfile.gettempdir())
    sizes = {files_folder(one, bench.steps, folder, bench.data): one.shape.size for one in bench.workloads}
    needed = sum(size for path, size in sizes.items() if not path.is_dir()) + _SPARE_BYTES
    free = shutil.disk_usage(folder).free
    if free < needed:
        space = f"{free / 1e9:.1f} GB are free, {needed / 1e9:.1f} GB are needed for weights and data"
        raise UserError(f"--folder: {folder}: {space}; choose another folder, or fewer workloads with --workload")


def measure(bench: TrainBench, echo: Print) -> dict[str, Any]:
    """Runs all workloads; prints each row as it ends."""
    folder = tempfile.TemporaryDirectory(prefix="sojourn-bench-") if bench.folder is None else nullcontext(bench.folder)
    result: Row = {**describe_environment(bench.device), "steps": bench.steps, "workloads": []}
    with folder as work:
        for workload in bench.workloads:
            for table in _measure(bench, workload, Path(work).absolute(), echo):
                store(bench, result, table)
    return result


def store(bench: TrainBench, result: Row, table: Row) -> None:
    """Replaces the workload's table in the result, and writes it."""
    others = [one for one in result["workloads"] if one["workload"] != table["workload"]]
    result["workloads"] = [*others, table]
    if bench.out is not None:
        write_json(bench.out, result)


def _measure(bench: TrainBench, workload: Workload, work: Path, echo: Print) -> Iterator[Row]:
    """The table so far, after each row."""
    echo(f"{workload.name}: {workload.title}; {workload.rows} rows of {workload.row_length:,} tokens per step")
    files = make_files(workload, bench.steps, bench.device, work, bench.data)
    run = work / "run.yaml"
    write_json(run, run_settings(files, bench.steps, bench.log_every, bench.device))
    prepared = prepare_rows(files, run)
    echo(format_header(""))
    rows: list[Row] = []
    for bench_row in bench.select_rows(workload):
        row = run_row(bench, bench_row, files, run, prepared, work)
        rows.append(row)
        if (reference := _reference(rows)) is not None:
            compare(row, reference, bench.precision)
        echo(format_row(row))
        for note in row.get("notes", []):  # such as that a setting could not be used
            echo(f"  {note}")
        yield {"workload": workload.name, "rows": rows, "best": best_against_peer(rows)}
    if best := best_against_peer(rows):
        echo(best["message"])
    echo("")


def _reference(rows: list[Row]) -> Row | None:
    """Plain transformers; where it is absent or failed, the first row that did not."""
    completed = [row for row in rows if "losses" in row and not row.get("different_model")]
    return next((row for row in completed if row["name"] == REFERENCE), completed[0] if completed else None)


def run_row(bench: TrainBench, bench_row: BenchRow, files: WorkloadFiles, run: Path, prepared: Path, work: Path) -> Row:
    """Runs one row in its own process. A failure becomes the note of its row."""
    row: Row = {
        "name": bench_row.name, "title": bench_row.title, "runner": bench_row.runner, "settings": bench_row.settings,
    }  # fmt: skip
    if bench_row.different_model:
        row["different_model"] = True
    missing = [name for name in bench_row.needs if find_spec(name) is None]
    if missing:
        return {**row, "note": f"{missing[0]} is not installed"}
    log, started = work / "log.txt", time.time()
    try:
        if bench_row.runner == OURS:
            code, memory, measured = _run_ours(bench, bench_row, run, work, log)
        else:
            code, memory, measured = _run_peer(bench, bench_row, files, prepared, work, log)
        output = log.read_text(encoding="utf-8", errors="replace")
        if measured is None:
            return {**row, "note": failure_reason(output, code), "log": output[-_LOG_CHARACTERS:]}
    finally:
        for name in ("home/runs", "trl", "cache"):
            shutil.rmtree(work / name, ignore_errors=True)
    speeds = [one["tokens_per_second"] for one in measured["intervals"] if one["step"] > bench.log_every]
    return {
        **row, "tokens_per_second": round(median(speeds), 1), "losses": measured["losses"],
        "first_grad_norm": measured["first_grad_norm"], "peak_memory": measured.get("memory") or memory,
        "peak_reserved": measured.get("memory_reserved"),
        "seconds_to_first_step": round(measured["first_step_at"] - started, 1), "intervals": measured["intervals"],
        "notes": [line for line in output.splitlines() if line.startswith("note: ")],
    }  # fmt: skip


def _run_ours(bench: TrainBench, bench_row: BenchRow, run: Path, work: Path, log: Path) -> tuple[int, int, Row | None]:
    """`sojourn train` itself, killed after its last step: its final save is not measured here."""
    folder = RunFolder(work / "home" / "runs" / "bench")
    settings = [f"{key}={value}" for key, value in bench_row.settings.items()]
    command = [sys.executable, "-m", "sojourn", "train", str(run), *bench.overrides, *settings, "name=bench"]

    def logged() -> list[Row]:
        return [one for one in folder.read_metrics() if one.get("kind") == "train"] if folder.metrics.is_file() else []

    code, memory = run_sampled(
        command, _environment(work), log, lambda: any(one["step"] >= bench.steps for one in logged()), bench.on_cpu
    )
    lines = logged()
    if not lines or lines[-1]["step"] < bench.steps:
        return code, memory.pss, None
    return code, memory.pss, {
        "losses": {str(one["step"]): one["loss"] for one in lines},
        "first_grad_norm": lines[0].get("grad_norm"), "first_step_at": lines[0]["time"],
        "intervals": [{"step": one["step"], "tokens_per_second": one["tokens_per_second"]} for one in lines[1:]],
        "memory": None if bench.on_cpu else lines[-1]["memory"], "memory_reserved": lines[-1].get("memory_reserved"),
    }  # fmt: skip


def _run_peer(
    bench: TrainBench, bench_row: BenchRow, files: WorkloadFiles, prepared: Path, work: Path, log: Path
) -> tuple[int, int, Row | None]:
    workload, out, task = files.workload, work / "row.json", work / "task.json"
    out.unlink(missing_ok=True)
    fields = {
        "runner": bench_row.runner, "family": workload.shape.family, "theta": workload.shape.theta,
        "method": workload.method, "base": str(files.base), "prepared": str(prepared),
        "adapter": str(files.adapter) if workload.has_adapters else None, "whole_rows": workload.documents == "long",
        "global_batch": workload.rows, "micro_batch": workload.micro_batch, "steps": bench.peer_steps,
        "logged_steps": sorted({*(s for s in bench.logged_steps if s <= bench.peer_steps), bench.peer_steps}),
        "device": bench.device, "precision": bench.precision, "weight_dtype": workload.weight_dtype, "lr": workload.lr,
        "weight_decay": workload.weight_decay, "clip": 1.0, "rank": workload.rank,
        "alpha": ALPHA_PER_RANK * workload.rank,
        "out": str(out), **bench_row.settings,
    }  # fmt: skip
    write_json(task, fields)
    command = [sys.executable, "-c", "from benchmarks.peers import train_main; train_main()", str(task)]
    code, memory = run_sampled(command, _environment(work), log, sample_memory=bench.on_cpu)
    return code, memory.pss, read_json(out) if code == 0 else None


def _environment(work: Path) -> dict[str, str]:
    """No network, no shared cache of compiled code: every row compiles for itself."""
    return {
        **os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "SOJOURN_HOME": str((work / "home").absolute()),
        "HF_HUB_OFFLINE": "1", "HF_HOME": str(work / "cache"), "TORCHINDUCTOR_CACHE_DIR": str(work / "cache"),
        "TOKENIZERS_PARALLELISM": "false",
    }  # fmt: skip


def failure_reason(output: str, code: int) -> str:
    """In one line, from the output and the exit code."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    if "out of memory" in output.lower() or "OutOfMemoryError" in output:
        return "out of memory"
    if code < 0:
        return f"killed by signal {-code}"
    return f"failed: {(lines[-1] if lines else 'no output')[:160]}"


def describe_environment(device: str) -> dict[str, Any]:
    """Command, date, machine and versions."""
    from sojourn.machine.gpus import driver_gpus
    from sojourn.machine.hardware import cpu

    machine = cpu()
    return {
        "command": shlex.join(["sojourn", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "device": device, "gpus": [gpu.name for gpu in driver_gpus()], "cpu": machine.model,
        "cores": machine.usable, "system": platform.platform(),
        "versions": {"python": platform.python_version(), **{name: version_of(name) for name in _PACKAGES}},
    }  # fmt: skip
