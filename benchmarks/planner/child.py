"""One case in a process of its own: a real session on made data, real optimizer steps, and what they took."""

from __future__ import annotations

import json
import math
import os
import socket
import statistics
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.planner.fast_opening import shorten_opening
from benchmarks.planner.phases import phases
from benchmarks.planner.protocol import ASK, DONE, GO, LEAVE, OPENED, READY, Line, die_with, wait_for_calm
from sojourn.config.load import dump
from sojourn.config.schema import RunConfig
from sojourn.errors import UserError
from sojourn.machine.measure import launch_us

_WARM, _WARM_SECONDS = 2, 0.3  # steps that start everything up, and the clocks of a GPU
_MOST, _LEAST, _SECONDS = 30, 5, 2.5  # steps that are timed, and about how long
_FEW, _LONG = 2, 10.0  # enough of steps that take so long together
_CAPTURED = 8  # steps within which CUDA graphs are captured, if they can be
_LINE = 300

Found = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """`cap`: bytes that torch may take from the device in the first steps; None: as many as it wants."""

    name: str
    config: dict[str, Any]
    folder: str
    out: str
    log: str
    cap: int | None = None


def work(task: Task, line: Line) -> None:
    """The process: it speaks into its log, leaves its findings as JSON, and ends."""
    log = os.open(task.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    found: Found = {}
    try:
        _run(task, line, found)
    except BaseException as error:
        traceback.print_exc()
        found["measured"] = _failure(error)
    sys.stdout.flush()
    partial = Path(f"{task.out}.part")
    partial.write_text(json.dumps(found), encoding="utf-8")
    partial.rename(task.out)
    if "failed" not in found["measured"]:  # what it holds is weighed when it lets go
        line.say(DONE)
        line.wait_for(LEAVE)


def main() -> None:
    """Where forking is not possible: the task's file, the line's number and the parent's process."""
    path, number, parent = sys.argv[1:]
    die_with(int(parent))
    work(Task(**json.loads(Path(path).read_text(encoding="utf-8"))), Line(socket.socket(fileno=int(number))))
    os._exit(0)  # nothing here needs tidying up


def _run(task: Task, line: Line, found: Found) -> None:
    config = RunConfig.model_validate(task.config)
    from sojourn.run.folder import RunFolder
    from sojourn.train.calibration import workload_of_session
    from sojourn.train.loop import use_device
    from sojourn.train.ranks import Ranks
    from sojourn.train.session import open_session

    device = use_device(config)
    shorten_opening(device)
    run = RunFolder(Path(task.folder) / "home" / "runs" / f"{task.name}-{os.getpid()}")
    run.path.mkdir(parents=True)
    session = open_session(config, run, Ranks(device=device))
    loading, held = _loaded(device)
    line.say(OPENED)
    session.stepper.engine.set_learning_rate(float(session.config.train.lr))
    found |= {
        "config": dump(session.config), "document": workload_of_session(session).document_length,
        "gpu": session.device_name,
    }  # fmt: skip
    batches = [session.batches(step) for step in range(2)]
    if session.config.train.compile == "on":
        _compile(session, batches)
        _begin_anew(device)
    line.say(READY)
    line.wait_for(GO)
    if task.cap is not None:
        found["capped"] = _capped(session, batches, task.cap)
    if "failed" in found.get("capped", {"failed": ""}):
        _first(session, batches)
    pieces = _pieces(session, held) if device == "cuda" else {}
    _begin_anew(device)
    line.say(ASK)
    line.wait_for(GO)
    waited = wait_for_calm() if device == "cuda" else 0.0
    before = launch_us(device)
    times, loss = _timed(session, batches)
    found["measured"] = {
        "parameters": sum(p.numel() for p in session.stepper.network.model.parameters()),
        "attention": session.stepper.network.attention_backend, "loading": loading, "loss": loss,
        "tokens": session.tokens(0),
        "step_seconds": statistics.median(times), "steps": [round(one, 5) for one in times],
        "recorded": session.stepper.has_cuda_graphs,
        "waited": round(waited, 3), "cpu_us": round(min(before, launch_us(device)), 2),
        **_memory(device, loading), **pieces,
    }  # fmt: skip


def _compile(session: Any, batches: list[Any]) -> None:
    """Passes of two blocks alone: all share their graphs, but for the first one, whose input may need no gradient. So
    the memory of a whole step is not needed while the compiler works."""
    settings = session.stepper.network.decoder.config
    layers, settings.num_hidden_layers = settings.num_hidden_layers, 2
    try:
        for some in batches:
            session.stepper.speculative_forward(some).backward()
    finally:
        settings.num_hidden_layers = layers
        session.stepper.discard()


def _capped(session: Any, batches: list[Any], cap: int) -> Found:
    """What the first steps come to under a cap; running out of memory is an answer."""
    import torch

    torch.cuda.set_per_process_memory_fraction(min(1.0, cap / torch.cuda.get_device_properties(0).total_memory))
    try:
        return {"cap": cap, **_first(session, batches)}
    except (RuntimeError, MemoryError) as error:
        found = _failure(error)
        if not found["out_of_memory"]:
            raise
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    session.stepper.discard()  # outside, since the error holds on to memory
    _begin_anew("cuda")
    return {"cap": cap, **found}


def _first(session: Any, batches: list[Any]) -> Found:
    """Two steps, or as many as it takes until CUDA graphs are replayed."""
    import torch

    loss, settled = math.nan, False
    for number in range(_CAPTURED):
        loss = session.stepper.step(batches[number % 2])[0]
        if settled:
            break
        settled = session.stepper.is_settled
    peak = {"allocated": int(torch.cuda.max_memory_allocated())} if session.stepper.batcher.device == "cuda" else {}
    return {"loss": loss, **peak}


def _pieces(session: Any, held: int) -> Found:
    """A detail that must not cost the row."""
    if session.stepper.cuda_graphs is not None:
        session.stepper.cuda_graphs.release()
    with suppress(RuntimeError):
        return {"phases": phases(replace(session.stepper, cuda_graphs=None), session.batches(0), held)}
    session.stepper.discard()
    return {}


def _begin_anew(device: str) -> None:
    """Nothing kept for later, and peaks counted from here."""
    if device != "cuda":
        return
    import torch

    from sojourn.machine.out_of_memory import free_memory

    torch.cuda.synchronize()
    free_memory()
    torch.cuda.reset_peak_memory_stats()


def _timed(session: Any, batches: list[Any]) -> tuple[list[float], float]:
    """Seconds from the end of one step to the end of the next, as the loop has them: a step ends when its loss is read.
    Rows are read before, as the loop reads them ahead."""
    count, times, speculative = 0, list[float](), list[Any]()
    began = last = time.perf_counter()
    warm = False
    while True:
        loss = _step(session, batches[count % 2], batches[(count + 1) % 2], speculative)
        now, count = time.perf_counter(), count + 1
        enough = _WARM if session.stepper.is_settled else _CAPTURED
        if warm:
            times.append(now - last)
        last, warm = now, warm or (count >= enough and now - began >= _WARM_SECONDS)
        least = _LEAST if sum(times) < _LONG else _FEW
        if len(times) >= _MOST or (len(times) >= least and sum(times) >= _SECONDS):
            return times, loss


def _step(session: Any, now: list[Any], then: list[Any], speculative: list[Any]) -> float:
    """The loss of a step, as the loop computes it: the next step's first forward is launched before this loss is read.
    `speculative` holds it until then."""
    from sojourn.train.step import SpeculativeStep

    stepper = session.stepper
    if session.config.advanced.async_step == "off" or not stepper.engine.supports_async_step:
        return float(stepper.step(now)[0])
    answer = stepper.update_if_good(stepper.launch_gradients(now, speculative.pop() if speculative else None), math.inf)
    part = None if stepper.network.has_dropout else stepper.speculative_forward(then)
    speculative.append(SpeculativeStep(0, then, 0.0, stepper.batcher.micro_batch, part))
    return float(answer.read()[0])


def _loaded(device: str) -> tuple[int | None, int]:
    """Bytes at the peak so far, and those that are held now."""
    import torch

    if device != "cuda":
        return None, 0
    return int(torch.cuda.max_memory_allocated()), int(torch.cuda.memory_allocated())


def _memory(device: str, loading: int | None) -> Found:
    """The peaks; `device` is known when the process has gone."""
    import torch

    if device != "cuda":
        return {"allocated": None, "reserved": None, "device": None}
    torch.cuda.synchronize()
    steps = int(torch.cuda.max_memory_allocated())
    return {"allocated": max(steps, loading or 0), "reserved": int(torch.cuda.max_memory_reserved()), "device": None}


def _failure(error: BaseException) -> Found:
    kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
    return {"failed": (kind + " ".join(str(error).split()))[:_LINE], "out_of_memory": _is_memory(error)}


def _is_memory(error: BaseException) -> bool:
    if not isinstance(error, (RuntimeError, MemoryError)):
        return False
    from sojourn.machine.out_of_memory import is_oom

    return is_oom(error)


def task_file(task: Task) -> Path:
    """For `main`."""
    path = Path(f"{task.out}.task")
    path.write_text(json.dumps(asdict(task)), encoding="utf-8")
    return path
