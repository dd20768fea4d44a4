"""One case in a process of its own: a real session on made data, real optimizer steps, and what they took."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from sojourn.bench.plan.phases import phases
from sojourn.config.load import dump
from sojourn.config.schema import RunConfig
from sojourn.errors import UserError

_WARM, _WARM_SECONDS = 2, 0.3  # steps that start everything up, and the clocks of a GPU
_MOST, _LEAST, _SECONDS = 8, 3, 1.5  # steps that are timed, and about how long
_LINE = 300


@dataclass(frozen=True)
class Task:
    """`cap`: bytes that torch may take from the device; with one, two steps are enough. `before`: bytes of the device
    that were taken before."""

    name: str
    config: dict[str, Any]
    folder: str
    out: str
    log: str
    cap: int | None = None
    before: int = 0


def work(task: Task) -> None:
    """The process: it speaks into its log, leaves its findings as JSON, and ends."""
    log = os.open(task.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        found = _run(task)
    except BaseException as error:
        traceback.print_exc()
        found = {"failed": _line(error), "out_of_memory": _is_memory(error)}
    sys.stdout.flush()
    partial = Path(f"{task.out}.part")
    partial.write_text(json.dumps(found), encoding="utf-8")
    partial.rename(task.out)


def main() -> None:
    """Where forking is not possible."""
    work(Task(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))))
    os._exit(0)  # nothing here needs tidying up


def _run(task: Task) -> dict[str, Any]:
    began, config = time.monotonic(), RunConfig.model_validate(task.config)
    import torch

    from sojourn.run.folder import RunFolder
    from sojourn.train.lessons import work_of_session
    from sojourn.train.loop import use_device
    from sojourn.train.ranks import Ranks
    from sojourn.train.session import open_session

    device = use_device(config)
    if task.cap is not None and device == "cuda":
        torch.cuda.set_per_process_memory_fraction(
            min(1.0, task.cap / torch.cuda.get_device_properties(0).total_memory)
        )
    _for_made_bases()
    run = RunFolder(Path(task.folder) / "home" / "runs" / f"{task.name}-{os.getpid()}")
    run.path.mkdir(parents=True)
    session = open_session(config, run, Ranks(device=device))
    loading, held = _loaded(device)
    opened = time.monotonic() - began
    rate = float(session.config.train.lr)
    session.stepper.engine.set_learning_rate(rate)
    found: dict[str, Any] = {
        "config": dump(session.config), "document": work_of_session(session).document, "gpu": session.device_name,
        "parameters": sum(p.numel() for p in session.stepper.network.model.parameters()),
        "attention": session.stepper.network.backend, "loading": loading, "opened": round(opened, 2),
    }  # fmt: skip
    first, times, loss = _steps(session, timed=task.cap is None)
    found |= {"first_seconds": round(first, 2), "loss": loss, "tokens": session.tokens(0)}
    if times:
        found |= {"step_seconds": statistics.median(times), "steps": [round(one, 5) for one in times]}
    found |= _memory(device, task.before)
    if times and device == "cuda":
        with suppress(RuntimeError):  # a detail that must not cost the row
            found["phases"] = phases(session, held)
    return found | {"seconds": round(time.monotonic() - began, 2)}


def _steps(session: Any, timed: bool) -> tuple[float, list[float], float]:
    """Seconds of the first step; then those from the end of one to the end of the next, as the loop has them: a step
    ends when its loss is read, while its update still runs. Rows are read before, as the loop reads them ahead."""
    batches = [session.batches(step) for step in range(2)]
    count, warm, first, times = 0, False, 0.0, list[float]()
    began = last = time.perf_counter()
    while True:
        loss, _ = session.stepper.step(batches[count % 2])
        now, count = time.perf_counter(), count + 1
        if warm:
            times.append(now - last)
        elif count == 1:
            first, began = now - began, now
        last, warm = now, warm or (count >= _WARM and now - began >= _WARM_SECONDS)
        enough = len(times) >= _MOST or (len(times) >= _LEAST and sum(times) >= _SECONDS)
        if enough or (count >= _WARM and not timed):
            return first, times, loss


def _for_made_bases() -> None:
    """Two things that only this bench needs: zeros would be multiplied too fast and fail the trial of a model, so they
    become random numbers as soon as they are loaded; and nothing is saved, so that the disk needs no room for it."""
    build: Any = import_module("sojourn.train.build")
    session: Any = import_module("sojourn.train.session")
    opened = build.open_base
    build.open_base = lambda *given: filled(opened(*given))
    session.check_room = lambda *given: None


def filled(model: Any) -> Any:
    """The model with random numbers in place of its own, where they are."""
    import torch

    with torch.no_grad():
        for name, weight in model.named_parameters():
            packed = getattr(weight, "quant_state", None)
            if packed is not None:
                weight.data.random_()
                _fill_scales(packed)
            elif "norm" in name:
                weight.normal_(1.0, 0.02)
            else:
                weight.normal_(0.0, 0.02)
    return model


def _fill_scales(packed: Any) -> None:
    """Of 4-bit weights; these may be in 8 bits themselves, with scales and a middle of their own."""
    if packed.nested:
        packed.absmax.random_()
        packed.offset.fill_(0.05)
        packed.state2.absmax.fill_(0.02)
    else:
        packed.absmax.fill_(0.05)


def _loaded(device: str) -> tuple[int | None, int]:
    """Bytes at the peak so far, and those that are held now."""
    import torch

    if device != "cuda":
        return None, 0
    return int(torch.cuda.max_memory_allocated()), int(torch.cuda.memory_allocated())


def _memory(device: str, before: int) -> dict[str, Any]:
    """Torch gives nothing back by itself, so that what the device lacks at the end is what it lacked at the peak."""
    import torch

    if device != "cuda":
        return {"allocated": None, "reserved": None, "device": None}
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    used = device_used()
    return {
        "allocated": int(torch.cuda.max_memory_allocated()), "reserved": int(torch.cuda.max_memory_reserved()),
        "device": total - free if used is None else used - before, "lacking": total - free,
    }  # fmt: skip


def device_used() -> int | None:
    """Bytes of the first GPU that are taken, as the driver counts them: the only count that needs no context."""
    command = ["nvidia-smi", "--id=0", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=15, check=True).stdout.strip()
        return int(said) * 2**20
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def _is_memory(error: BaseException) -> bool:
    if not isinstance(error, (RuntimeError, MemoryError)):
        return False
    from sojourn.train.ladder import is_memory_error

    return is_memory_error(error)


def _line(error: BaseException) -> str:
    kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
    return (kind + " ".join(str(error).split()))[:_LINE]


def task_file(task: Task) -> Path:
    """For `main`."""
    path = Path(f"{task.out}.task")
    path.write_text(json.dumps(asdict(task)), encoding="utf-8")
    return path
