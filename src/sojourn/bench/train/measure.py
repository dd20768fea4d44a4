"""Runs the contenders of each workload one after the other, each in a fresh process, and puts the rows together."""

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

from sojourn.bench.memory import watched
from sojourn.bench.train.compare import Row, best, compare, head, line
from sojourn.bench.train.contenders import OURS, REFERENCE, Contender, check_rows, contenders, selected
from sojourn.bench.train.ground import ALPHA, Ground, folder_of, lay, rows_of, settings
from sojourn.bench.train.workloads import Workload, chosen, fitting
from sojourn.config.load import load_run
from sojourn.config.words import shown
from sojourn.errors import UserError
from sojourn.run.folder import RunFolder
from sojourn.storage.files import read_json, write_json
from sojourn.train.metrics.environment import version_of

Say = Callable[[str], None]

_PACKAGES = (
    "sojourn", "torch", "transformers", "peft", "bitsandbytes", "triton", "liger-kernel", "flash-attn",
    "flash-attn-4", "quack-kernels", "trl", "unsloth",
)  # fmt: skip
_SPARE = 500_000_000  # for data, rows and what is compiled
_KEPT = 3000  # characters of what a failed row said
_BLOCKS = 5  # a run is cut into so many at least; the first of them warms up
_LONGEST_BLOCK = 10  # steps, so that there is a curve to compare
_TOLD = (
    "train.lr", "train.min_lr", "train.schedule", "train.warmup", "train.weight_decay", "train.beta1", "train.beta2",
    "train.clip", "train.seed", "log.every_steps",
)  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """What to measure; `folder` is None where nothing is to be left. Peers may make fewer steps.

    `data`: texts or chats of the user's, instead of those that we make. `out`: where the rows are kept as they come.
    `told`: settings of the run that all rows share, which only our own can follow.
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
    told: tuple[str, ...] = ()

    @property
    def every(self) -> int:
        return max(1, min(_LONGEST_BLOCK, self.steps // _BLOCKS))

    @property
    def marks(self) -> list[int]:
        """The steps that are logged, as `log.every_steps` logs them."""
        return sorted({1, *range(self.every, self.steps + 1, self.every), self.steps})

    @property
    def on_cpu(self) -> bool:
        """Where a row's memory is that of its process."""
        return self.device == "cpu"

    @property
    def precision(self) -> str:
        """Of the reference."""
        return "fp32" if self.on_cpu else "bf16"

    def contenders(self, workload: Workload) -> list[Contender]:
        return selected(contenders(workload, self.device), list(self.rows), self.peers)


def make_plan(
    workloads: Iterable[str],
    rows: str,
    steps: int,
    peers: bool,
    folder: Path | None,
    peer_steps: int | None = None,
    data: str | None = None,
    out: Path | None = None,
    told: Sequence[str] = (),
) -> Plan:
    missing = [name for name in ("torch", "transformers") if find_spec(name) is None]
    if missing:
        raise UserError(f"to train, {' and '.join(missing)} must be installed: pip install 'sojourn[train]'")
    if folder is not None and not folder.is_dir():
        raise UserError(f"--folder: {folder}: no such folder")
    if peers and told:
        raise UserError(f"{shown(told[0])}: other programs are not told so; add --no-peers")
    _check_told(told)
    named = chosen(workloads)
    from sojourn.machine.gpus import driver_gpus
    from sojourn.machine.precision import choose_device

    device = "cuda" if choose_device() == "cuda" else "cpu"
    if not named:
        seen = driver_gpus() if device == "cuda" else []
        named = fitting(seen[0].memory_bytes if seen else None)
    wanted = tuple(dict.fromkeys(name.strip() for name in rows.split(",") if name.strip()))
    others = min(steps, peer_steps or steps)
    plan = Plan(tuple(named), wanted, steps, peers, device, folder, others, data, out, tuple(told))
    check_rows(list(wanted), {one.name for workload in named for one in contenders(workload, device)})
    if not any(plan.contenders(workload) for workload in named):
        raise UserError("--rows: only peers are named, but --no-peers leaves them out; remove one")
    _check_room(plan)
    return plan


def _check_told(told: Sequence[str]) -> None:
    """What may change is how all rows learn; the rest is the workload's, or what tells rows apart."""
    for word in told:
        key, equals, _ = word.partition("=")
        if key not in _TOLD or not equals:
            raise UserError(f"{shown(word)}: rows can be told KEY=VALUE, with a KEY of {', '.join(_TOLD)}")
    load_run(["small", *told])


def _check_room(plan: Plan) -> None:
    place = plan.folder or Path(tempfile.gettempdir())
    bases = {folder_of(one, plan.steps, place, plan.data): one.shape.size for one in plan.workloads}
    needed = sum(size for folder, size in bases.items() if not folder.is_dir()) + _SPARE
    free = shutil.disk_usage(place).free
    if free < needed:
        says = f"{free / 1e9:.1f} GB are free, {needed / 1e9:.1f} GB are needed for weights and data"
        raise UserError(f"--folder: {place}: {says}; choose another, or fewer with --workload")


def measure(plan: Plan, say: Say) -> dict[str, Any]:
    """Everything, and a line to `say` for each row as it comes."""
    made = tempfile.TemporaryDirectory(prefix="sojourn-bench-") if plan.folder is None else nullcontext(plan.folder)
    result: Row = {**circumstances(plan.device), "steps": plan.steps, "workloads": []}
    with made as work:
        for workload in plan.workloads:
            for found in _measure(plan, workload, Path(work).absolute(), say):
                keep(plan, result, found)
    return result


def keep(plan: Plan, result: Row, found: Row) -> None:
    """What is known of a workload so far takes the place of what was known before."""
    others = [one for one in result["workloads"] if one["workload"] != found["workload"]]
    result["workloads"] = [*others, found]
    if plan.out is not None:
        write_json(plan.out, result)


def _measure(plan: Plan, workload: Workload, work: Path, say: Say) -> Iterator[Row]:
    """All rows so far, after each."""
    say(f"{workload.name}: {workload.says}; {workload.rows} rows of {workload.row_length:,} to a step")
    ground = lay(workload, plan.steps, plan.device, work, plan.data)
    run = work / "run.yaml"
    write_json(run, settings(ground, plan.steps, plan.every, plan.device))
    rows_at = rows_of(ground, run)
    say(head(""))
    rows: list[Row] = []
    for contender in plan.contenders(workload):
        row = row_of(plan, contender, ground, run, rows_at, work)
        rows.append(row)
        if (reference := _reference(rows)) is not None:
            compare(row, reference, plan.precision)
        say(line(row))
        for note in row.get("notes", []):  # such as that it was not computed as its row says
            say(f"  {note}")
        yield {"workload": workload.name, "rows": rows, "best": best(rows)}
    if found := best(rows):
        say(found["says"])
    say("")


def _reference(rows: list[Row]) -> Row | None:
    """Plain transformers, or where it is not there or failed, the first row that did not."""
    worked = [row for row in rows if "losses" in row and not row.get("another")]
    return next((row for row in worked if row["name"] == REFERENCE), worked[0] if worked else None)


def row_of(plan: Plan, contender: Contender, ground: Ground, run: Path, rows_at: Path, work: Path) -> Row:
    """One contender. What fails is a row that says so."""
    row: Row = {"name": contender.name, "title": contender.title, "role": contender.role, "told": contender.settings}
    if contender.another:
        row["another"] = True
    missing = [name for name in contender.needs if find_spec(name) is None]
    if missing:
        return {**row, "note": f"{missing[0]} is not installed"}
    log, began = work / "log.txt", time.time()
    try:
        if contender.role == OURS:
            code, memory, found = _ours(plan, contender, run, work, log)
        else:
            code, memory, found = _peer(plan, contender, ground, rows_at, work, log)
        said = log.read_text(encoding="utf-8", errors="replace")
        if found is None:
            return {**row, "note": why(said, code), "said": said[-_KEPT:]}
    finally:
        for name in ("home/runs", "trl", "cache"):
            shutil.rmtree(work / name, ignore_errors=True)
    blocks = [block["tokens_per_second"] for block in found["blocks"] if block["step"] > plan.every]
    return {
        **row, "tokens_per_second": round(median(blocks), 1), "losses": found["losses"],
        "first_gradient": found["first_gradient"], "peak_memory": found.get("memory") or memory,
        "peak_reserved": found.get("memory_reserved"), "seconds_to_first_step": round(found["first_done"] - began, 1),
        "blocks": found["blocks"], "notes": [one for one in said.splitlines() if one.startswith("note: ")],
    }  # fmt: skip


def _ours(plan: Plan, contender: Contender, run: Path, work: Path, log: Path) -> tuple[int, int, Row | None]:
    """The command itself. It is ended after its last step: what it would save then is not wanted."""
    folder = RunFolder(work / "home" / "runs" / "bench")
    told = [f"{key}={value}" for key, value in contender.settings.items()]
    command = [sys.executable, "-m", "sojourn", "train", str(run), *plan.told, *told, "name=bench"]

    def logged() -> list[Row]:
        return [one for one in folder.read_metrics() if one.get("kind") == "train"] if folder.metrics.is_file() else []

    code, memory = watched(
        command, _environment(work), log, lambda: any(one["step"] >= plan.steps for one in logged()), plan.on_cpu
    )
    lines = logged()
    if not lines or lines[-1]["step"] < plan.steps:
        return code, memory.pss, None
    return code, memory.pss, {
        "losses": {str(one["step"]): one["loss"] for one in lines},
        "first_gradient": lines[0].get("grad_norm"), "first_done": lines[0]["time"],
        "blocks": [{"step": one["step"], "tokens_per_second": one["tokens_per_second"]} for one in lines[1:]],
        "memory": None if plan.on_cpu else lines[-1]["memory"], "memory_reserved": lines[-1].get("memory_reserved"),
    }  # fmt: skip


def _peer(
    plan: Plan, contender: Contender, ground: Ground, rows_at: Path, work: Path, log: Path
) -> tuple[int, int, Row | None]:
    workload, out, task = ground.workload, work / "row.json", work / "task.json"
    out.unlink(missing_ok=True)
    facts = {
        "role": contender.role, "family": workload.shape.family, "theta": workload.shape.theta,
        "method": workload.method, "base": str(ground.base), "rows": str(rows_at),
        "adapter": str(ground.adapter) if workload.adapters else None, "whole_rows": workload.documents == "long",
        "global_batch": workload.rows, "micro_batch": workload.micro_batch, "steps": plan.peer_steps,
        "marks": sorted({*(mark for mark in plan.marks if mark <= plan.peer_steps), plan.peer_steps}),
        "device": plan.device, "precision": plan.precision, "weights": workload.weights, "lr": workload.lr,
        "weight_decay": workload.weight_decay, "clip": 1.0, "rank": workload.rank, "alpha": ALPHA * workload.rank,
        "out": str(out), **contender.settings,
    }  # fmt: skip
    write_json(task, facts)
    command = [sys.executable, "-c", "from sojourn.bench.train.peers import contend; contend()", str(task)]
    code, memory = watched(command, _environment(work), log, look=plan.on_cpu)
    return code, memory.pss, read_json(out) if code == 0 else None


def _environment(work: Path) -> dict[str, str]:
    """No network, no shared cache of compiled code: every contender compiles for itself."""
    return {
        **os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "SOJOURN_HOME": str((work / "home").absolute()),
        "HF_HUB_OFFLINE": "1", "HF_HOME": str(work / "cache"), "TORCHINDUCTOR_CACHE_DIR": str(work / "cache"),
        "TOKENIZERS_PARALLELISM": "false",
    }  # fmt: skip


def why(said: str, code: int) -> str:
    """The end of a contender in a word, from what it said."""
    lines = [one.strip() for one in said.splitlines() if one.strip()]
    if "out of memory" in said.lower() or "OutOfMemoryError" in said:
        return "out of memory"
    if code < 0:
        return f"killed by signal {-code}"
    told = lines[-1] if lines else "nothing was said"
    return f"failed: {told[:160]}"


def circumstances(device: str) -> dict[str, Any]:
    """Where, when and with what."""
    from sojourn.machine.gpus import driver_gpus
    from sojourn.machine.hardware import cpu

    machine = cpu()
    return {
        "command": shlex.join(["sojourn", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "device": device, "gpus": [seen.name for seen in driver_gpus()], "cpu": machine.model,
        "cores": machine.usable, "system": platform.platform(),
        "versions": {"python": platform.python_version(), **{name: version_of(name) for name in _PACKAGES}},
    }  # fmt: skip
