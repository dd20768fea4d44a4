"""Training, from a configuration to `final/`: one loop for every device. A second call on the same run continues it.

The order of things: resolve what the machine decides → the prepared data → the model → the newest good checkpoint, if
any → steps, with saves between them → the final model. A signal or a limit ends the loop; so does memory that runs out
for good, and then everything is built again one rung down the ladder.
"""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import replace
from pathlib import Path

from sojourn.config.load import read_config
from sojourn.config.schema import RunConfig
from sojourn.errors import Stopped, UserError
from sojourn.machine.precision import choose_device
from sojourn.run.folder import RunFolder
from sojourn.run.ledger import Ledger
from sojourn.train.calibration import note_run
from sojourn.train.checkpoint.checkpoint import cost_so_far
from sojourn.train.checkpoint.config_changes import requests_no_change
from sojourn.train.checkpoint.mirroring import fetch_run_files, mirror_warning, open_run_mirror
from sojourn.train.faults.guard import Guard, Interrupted
from sojourn.train.faults.limits import session_end, with_catalogue_price
from sojourn.train.faults.oom_fallback import (
    NoFallbackLeft,
    OomFallback,
    format_fallback,
    free_memory,
    is_oom,
    load_fallbacks,
    next_fallback,
    save_fallback,
)
from sojourn.train.metrics.environment import device_name
from sojourn.train.metrics.trackers import refuse_missing_trackers
from sojourn.train.ranks import Ranks, join_process_group, leave_process_group
from sojourn.train.resolve import resolve_here
from sojourn.train.session import Session, open_session, say
from sojourn.train.steps import run_steps, stop

_TORCH_CACHE = "TORCHINDUCTOR_CACHE_DIR"
_OTHER_CACHES = {"QUACK_CACHE_DIR": "quack", "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": "flash"}
_FLASH_KEEPS = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"


def train(config: RunConfig, run: RunFolder) -> None:
    """Trains `config` in `run` until it is done (returns) or stopped early but resumable (raises Stopped)."""
    began = time.monotonic()
    refuse_missing_trackers(config.log.trackers)
    config = with_catalogue_price(config)
    ranks = join_process_group(use_device(config), config)
    run = replace(run, is_main_process=ranks.is_main)
    run.acquire()
    began_again(run, ranks)
    try:
        mirror = open_run_mirror(config, run)
        if mirror is not None and ranks.is_main:
            warning = mirror_warning(config)
            if warning is not None:
                say(f"warning: {warning}")
            fetch_run_files(mirror, run)
        with (
            _apart(run, ranks) if not run.is_main_process else nullcontext(),
            Ledger.open(run.ledger, config.limits.price_per_hour, began, run.is_main_process) as ledger,
            Guard(config.limits, ledger, session_end(config.limits), distributed=ranks.world_size > 1) as guard,
            _told(run, guard),
            _compiled_kept(config, run),
        ):
            while not _trained(config, run, ranks, guard):
                free_memory()
    finally:
        run.release()
    leave_process_group()


def _trained(config: RunConfig, run: RunFolder, ranks: Ranks, guard: Guard) -> bool:
    """Opens everything and trains to the end; False when it must be done again, one rung down."""
    was = run.status()
    if was and was.state == "done" and run.has_final() and requests_no_change(read_config(run.config), config):
        guard.ledger.catch_up(*cost_so_far(run.checkpoints))
        _already_done(run, was.step)
        return True
    try:
        with guard.interruptible(even_if_distributed=True):
            session = open_session(config, run, ranks)
    except (RuntimeError, MemoryError) as error:
        if ranks.world_size > 1 or not is_oom(error):
            raise
        why = str(error)
    else:
        return _run_to_its_end(session, guard)
    _lower(config, run, ranks, why)
    return False


def _lower(config: RunConfig, run: RunFolder, ranks: Ranks, why: str) -> None:
    """Memory ran out while opening, where only moments in the host's memory would help."""
    named = device_name(ranks.device)
    resolved = resolve_here(config, oom_fallback=load_fallbacks(run, named)).config
    rung, says = next_fallback(resolved, in_optimizer_step=True), why.strip().split("\n")[0][:200]
    if rung != {"train.offload": "optimizer"}:
        raise NoFallbackLeft(
            f"out of memory while opening ({says}); use a GPU with more memory, or method.kind=qlora", clean=False
        )
    save_fallback(run, rung, named)
    run.event("out_of_memory", step=0, message=says, now=rung)
    say(f"memory is short ({says}); going on with {format_fallback(rung)}")


def _run_to_its_end(session: Session, guard: Guard) -> bool:
    run = session.run
    guard.ledger.catch_up(session.progress.seconds, session.progress.money)
    if session.ended and run.has_final():
        _already_done(run, session.progress.step)
    else:
        try:
            run_steps(session, guard)
        except OomFallback:
            return False
        note_run(session)
    run.set_status("done", session.progress.step, session.progress.step, resumable=False)
    return True


def _already_done(run: RunFolder, steps: int) -> None:
    say(f"{run.path}: already done ({steps} steps); to train longer, begin another run: --fork NEWNAME")


@contextmanager
def _apart(run: RunFolder, ranks: Ranks) -> Iterator[None]:
    """One process speaks for all; what the others say is kept in files."""
    run.logs.mkdir(parents=True, exist_ok=True)
    with (run.logs / f"process-{ranks.rank}.log").open("a", encoding="utf-8", buffering=1) as log, redirect_stdout(log):
        try:
            yield
        except BaseException:
            traceback.print_exc(file=log)
            raise


@contextmanager
def _compiled_kept(config: RunConfig, run: RunFolder) -> Iterator[None]:
    """What is compiled lies in the run's folder, or where it was said, so that nothing is compiled again after a
    restart or on another machine of the kind. torch finds it by what was compiled, for which device and version."""
    given = config.advanced.compile_cache
    if _TORCH_CACHE in os.environ and given is None:
        yield
        return
    place = Path(given).expanduser().absolute() if given else run.compile_cache.absolute()
    wanted = {_TORCH_CACHE: place, **{name: place / folder for name, folder in _OTHER_CACHES.items()}}
    was = {name: os.environ.get(name) for name in (*wanted, _FLASH_KEEPS)}
    os.environ.update({name: str(path) for name, path in wanted.items()}, **{_FLASH_KEEPS: "1"})
    try:
        yield
    finally:
        for name, before in was.items():
            os.environ.pop(name, None)
            if before is not None:
                os.environ[name] = before


@contextmanager
def _told(run: RunFolder, guard: Guard) -> Iterator[None]:
    """However a run ends, its status says so."""
    try:
        yield
    except Interrupted:  # while opening: nothing was begun that is not saved
        stop(run, guard.reason or "a signal", 0, 0)
    except BaseException as error:
        status = run.status()
        if status and status.state in ("starting", "running"):
            says = f"{type(error).__name__}: {error}"
            run.set_status("failed", status.step, status.total_steps, says)
            run.event("failed", error=says)
        raise


def began_again(run: RunFolder, ranks: Ranks) -> None:
    """torchrun starts ended processes again, also those that ended on purpose."""
    count = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if count == 0 or ranks.world_size == 1:
        return
    import psutil

    was = run.status()
    if was and was.state == "stopped" and run.status_written_at() > psutil.Process(os.getppid()).create_time():
        raise Stopped(
            f"stopped by {was.message} at step {was.step} of {was.total_steps}; run the same command to resume"
        )
    run.event("restarted", restart=count)
    if ranks.is_main:
        say(f"began again after a process had ended (restart {count})")


def use_device(config: RunConfig) -> str:
    """Makes the chosen device current and returns torch's name for it."""
    import torch

    device, gpus = choose_device(config.train.device), config.parallel.gpus
    local, here = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if isinstance(gpus, list) and len(gpus) != here:
        raise UserError(f"parallel.gpus: {len(gpus)} GPUs are named, but torchrun started {here} processes here")
    if device == "cuda":
        number, there = gpus[local] if isinstance(gpus, list) else local, torch.cuda.device_count()
        if number >= there:
            raise UserError(f"parallel.gpus: there is no GPU {number}; this machine has {there}, counted from 0")
        torch.cuda.set_device(number)
        torch.cuda.init()  # or others would choose the first one again
        if gpus == "auto" and here == 1 and there > 1:
            say(f"note: 1 of the {there} GPUs here is used; all of them: --gpus all")
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if device == "cuda" else "cpu")  # else it wonders aloud
    if config.train.deterministic == "on":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch asks for it
        torch.use_deterministic_algorithms(True)
    return device
