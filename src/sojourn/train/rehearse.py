"""Rehearses a run in about a minute: the longest rows, a few real steps, a checkpoint written and read back.

It uses a scratch folder beside the run folder, on the same disk, and the code of training. Each finding is ok, a
warning, or a failure: a reason not to start.
"""

from __future__ import annotations

import math
import os
import shutil
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from sojourn.config.load import with_settings
from sojourn.config.quantities import Duration
from sojourn.config.schema import RunConfig
from sojourn.errors import RunFailed
from sojourn.estimate.memory import memory as planned_memory
from sojourn.machine.out_of_memory import free_memory
from sojourn.run.checkpoints import list_checkpoints
from sojourn.run.folder import RunFolder
from sojourn.run.ledger import Ledger
from sojourn.storage.disk import remove_folder
from sojourn.train.batcher import Prefetcher
from sojourn.train.calibration import measure_unknown_card, record_rehearsal, workload_of_session
from sojourn.train.checkpoint.checkpoint import load_newest
from sojourn.train.checkpoint.mirroring import open_run_mirror
from sojourn.train.checkpoint.saving import Saver
from sojourn.train.fault_tolerant_step import FaultTolerantStep
from sojourn.train.faults.guard import Guard
from sojourn.train.faults.limits import session_end, with_catalogue_price
from sojourn.train.faults.oom_fallback import OomFallback, format_fallback
from sojourn.train.optim.optimizers import learning_rate
from sojourn.train.ranks import Ranks
from sojourn.train.session import Session, open_session, print_line

_GIB = 2**30
_MIN_STEPS = 3  # the first one includes start-up costs
_MAX_STEPS = 8  # CUDA graphs are captured within these, if ever


@dataclass(frozen=True)
class Finding:
    level: Literal["ok", "warn", "fail"]
    name: str
    message: str


@dataclass
class Report:
    findings: list[Finding] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    def add(self, level: Literal["ok", "warn", "fail"], name: str, message: str) -> None:
        self.findings.append(Finding(level, name, message))

    @property
    def refused(self) -> str | None:
        """Why the run must not start, if so."""
        reasons = [f"{one.name}: {one.message}" for one in self.findings if one.level == "fail"]
        return "; ".join(reasons) if reasons else None


def rehearse(config: RunConfig, run: RunFolder, ranks: Ranks) -> Report:
    """Trains a few steps of `config` in a scratch folder beside `run`, and removes the folder."""
    config = with_catalogue_price(config)
    named = ranks.run_on_main(lambda: f".rehearsal-{os.getpid()}-{run.path.name}")
    scratch = RunFolder(run.path.with_name(named), is_main_process=ranks.is_main)
    scratch.path.mkdir(parents=True, exist_ok=True)
    report = Report()
    try:
        while not _try_once(config, run, scratch, ranks, report):
            free_memory()
            remove_folder(scratch.checkpoints)
            report.findings.clear()
    except (RunFailed, RuntimeError) as error:
        report.add("fail", "run", str(error).split("\n")[0])
    else:
        ranks.barrier()
    finally:
        remove_folder(scratch.path)
    return report


def _try_once(config: RunConfig, run: RunFolder, scratch: RunFolder, ranks: Ranks, report: Report) -> bool:
    """False if memory ran out: to be opened again with the OOM fallback that was saved."""
    isolated = with_settings(config, {"save.mirror": None, "save.resume": "auto", "log.trackers": []})
    began = time.monotonic()
    session = open_session(isolated, scratch, ranks)
    opening = time.monotonic() - began
    ledger = Ledger(None, config.limits.price_per_hour)
    guard = Guard(config.limits, ledger, session_end(config.limits))
    saver = Saver(
        session.config, scratch, session.training_state, session.progress, session.total_steps, 1 << 60, print_line
    )
    try:
        with Prefetcher(session.batches, session.total_steps) as prefetcher:
            step = FaultTolerantStep(session, guard, saver, prefetcher, print_line)
            step.try_longest_rows()
            seconds = _run_steps(session, step, report)
            step.try_longest_rows()  # again, now that the optimizer states are allocated
        _memory(session, report)
        saving = _save(session, scratch, saver, report)
    except OomFallback as error:
        report.facts["fallback"] = format_fallback(error.fallback)
        return False
    finally:
        saver.close()
    report.facts |= {"opening_seconds": round(opening, 1), "step_seconds": round(seconds, 4),
                     "micro_batch": session.stepper.batcher.micro_batch}  # fmt: skip
    if not ranks.is_main:
        return True
    record_rehearsal(session, seconds, report.facts.get("memory"))
    if session.stepper.batcher.device == "cuda" and (measured := measure_unknown_card(scratch.path)):
        report.add("ok", "card", measured)
    if "checkpoint_bytes" in report.facts:
        _disk(session, run, report)
    _time(session, guard, seconds, saving, report)
    _mirror(config, run, scratch, report)
    if "fallback" in report.facts:
        report.add("warn", "memory", f"ran out at first; fits with {report.facts['fallback']} (set it to be safe)")
    return True


def _run_steps(session: Session, step: FaultTolerantStep, report: Report) -> float:
    """Runs real steps; returns the seconds of the last."""
    vocabulary, seconds, losses = session.artefact.vocab_size, 0.0, list[float]()
    settled = 0
    while len(losses) < min(_MAX_STEPS, session.total_steps) and (len(losses) < _MIN_STEPS or settled < 2):
        began = time.monotonic()
        session.stepper.engine.set_learning_rate(
            learning_rate(session.progress.step, session.total_steps, session.config.train)
        )
        result = step.step()
        if result.outcome != "done":
            report.add("fail", "loss", "is NaN or infinite; try a smaller train.lr, or train.precision=fp32")
            return seconds
        losses.append(result.loss)
        session.progress.step += 1
        session.progress.tokens += result.tokens
        seconds = time.monotonic() - began
        settled += session.stepper.is_settled
    level: Literal["ok", "warn"] = "warn" if losses[0] > 1.5 * math.log(vocabulary) else "ok"
    chance = f"guessing among {vocabulary:,} tokens would be {math.log(vocabulary):.2f}"
    report.add(level, "loss", f"{losses[0]:.4f} at first, {losses[-1]:.4f} after {len(losses)} steps; {chance}")
    targets = int(session.stepper.ranks.sum(sum(batch.targets for batch in session.batches(0)))[0])
    tokens = session.tokens(0)
    share = targets / max(1, tokens)
    if targets == 0:
        report.add("fail", "data", "the first step has nothing to learn from; look at it: sojourn prepare RUN")
    else:
        level = "warn" if share < 0.02 else "ok"
        report.add(level, "data", f"{targets:,} of {tokens:,} tokens of a step are targets ({share:.0%})")
    return seconds


def _memory(session: Session, report: Report) -> None:
    batcher = session.stepper.batcher
    if batcher.device != "cuda":
        report.add("ok", "memory", f"{batcher.micro_batch} rows at a time, on the {batcher.device}")
        return
    import torch

    used, total = torch.cuda.max_memory_allocated(), torch.cuda.get_device_properties(0).total_memory
    reserved = torch.cuda.max_memory_reserved()
    planned = planned_memory(workload_of_session(session)).allocated
    report.facts |= {"memory": used, "memory_reserved": reserved, "memory_planned": planned}
    level: Literal["ok", "warn"] = "warn" if reserved > 0.95 * total else "ok"
    report.add(level, "memory", f"{used / _GIB:.1f} GiB of {total / _GIB:.0f} at the peak with {batcher.micro_batch} "
               f"rows at a time ({reserved / _GIB:.1f} reserved, {planned / _GIB:.1f} planned)")  # fmt: skip


def _save(session: Session, scratch: RunFolder, saver: Saver, report: Report) -> float:
    """Writes a checkpoint, reads it back, and returns how long writing took."""
    if session.progress.step == 0:
        return 0.0
    saver.save(must=True)
    if not session.stepper.ranks.is_main:
        return 0.0
    newest = list_checkpoints(scratch.checkpoints)[-1]
    size = sum(file.stat().st_size for file in newest.iterdir())
    began = time.monotonic()
    if load_newest(scratch.checkpoints) is None:
        report.add("fail", "checkpoint", "cannot be read back as written; use another disk: save.folder=FOLDER")
        return saver.seconds
    reading = time.monotonic() - began
    report.facts |= {"checkpoint_bytes": size, "save_seconds": round(saver.seconds, 2),
                     "load_seconds": round(reading, 2)}  # fmt: skip
    every = float(session.config.save.every)
    level: Literal["ok", "warn"] = "warn" if saver.seconds > max(1.0, every / 2) else "ok"
    report.add(level, "checkpoint", f"{size / 2**20:,.0f} MiB, written in {saver.seconds:.1f} s, read back the same "
               f"in {reading:.1f} s")  # fmt: skip
    return saver.seconds


def _disk(session: Session, run: RunFolder, report: Report) -> None:
    how, size = session.config.save, int(report.facts["checkpoint_bytes"])
    kept = how.keep + 1 + (session.total_steps // how.milestones if how.milestones else 0)
    models = 2 if session.config.train.eval_every is not None else 1
    needed = (kept + models) * size + int(how.min_free)
    free = shutil.disk_usage(_existing(run.path)).free
    summary = f"{needed / _GIB:.1f} GiB for {kept} checkpoints and the model, {free / _GIB:.1f} GiB are free"
    least = 2 * size + int(how.min_free)
    if free < least:
        report.add("fail", "disk", f"{summary}; make room or set save.folder to another disk")
    else:
        report.add("warn" if free < needed else "ok", "disk", summary)


def _time(session: Session, guard: Guard, step: float, saving: float, report: Report) -> None:
    left = [(float(session.config.limits.time), "limits.time")] if session.config.limits.time is not None else []
    if guard.session_end is not None:
        left.append((guard.session_end - time.time(), "the platform's session"))
    whole = session.total_steps * step
    price = session.config.limits.price_per_hour
    cost = f", about {float(price.amount) * whole / 3600:.2f} {price.currency}".rstrip() if price is not None else ""
    report.facts["seconds"] = round(whole, 1)
    report.add(
        "ok", "time", f"{session.total_steps:,} steps of {step:.3g} s: about {Duration(max(1, round(whole)))}{cost}"
    )
    for seconds, name in left:
        if seconds < 2 * step + 1.5 * saving:
            report.add("fail", "time", f"{name} leaves {max(0.0, seconds):.0f} s, less than two steps and a save "
                       f"({2 * step + 1.5 * saving:.0f} s)")  # fmt: skip
    budget = session.config.limits.budget
    if budget is not None and price is not None and float(price.amount) * whole / 3600 > float(budget.amount):
        report.add("warn", "money", f"the whole run would cost more than the budget of {budget}; it will stop there")


def _mirror(config: RunConfig, run: RunFolder, scratch: RunFolder, report: Report) -> None:
    """Copies a small folder to the mirror and back."""
    mirror = open_run_mirror(config, replace(run, path=scratch.path))
    if mirror is None:
        return
    began, name = time.monotonic(), f"checkpoints/.rehearsal-{os.getpid()}"
    probe = scratch.path / "probe"
    probe.mkdir()
    (probe / "probe.txt").write_text("sojourn\n", encoding="utf-8")
    try:
        mirror.put(probe, name)
        mirror.fetch(name, scratch.path / "back")
        mirror.remove(name)
    except RunFailed as error:
        report.add("fail", "mirror", str(error))
        return
    report.add("ok", "mirror", f"{mirror.location}: write and read back in {time.monotonic() - began:.1f} s")


def _existing(path: Path) -> Path:
    while not path.exists():
        path = path.parent
    return path
