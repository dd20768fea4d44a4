"""Training, from a configuration to `final/`: one loop for every method and device. Run again, it resumes.

`train` opens everything (`session.py`): resolves `auto` settings, prepares the data, builds the model, loads the newest
good checkpoint. Then it runs the steps (`steps.py`), each protected by `fault_tolerant_step.py`. When memory runs out
for good, everything is opened again with settings that need less (`faults/oom_fallback.py`).
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import replace

from sojourn.config.schema import RunConfig
from sojourn.errors import Stopped, UserError
from sojourn.expand_user import expand_user
from sojourn.machine.gpu_energy import EnergyMeter, energy_meter
from sojourn.machine.out_of_memory import free_memory, is_oom
from sojourn.machine.precision import choose_device
from sojourn.run.folder import RunFolder
from sojourn.run.identity import read_identity
from sojourn.run.ledger import Ledger
from sojourn.run.lock import RunLock
from sojourn.run.output import log_file
from sojourn.run.startup import Startup, add_killed_startups
from sojourn.run.unwritten import reported
from sojourn.storage.files import remove_temporary_files
from sojourn.storage.mirror_process import MirrorProcess
from sojourn.train.calibration import record_run
from sojourn.train.checkpoint.checkpoint import cost_so_far
from sojourn.train.checkpoint.config_changes import requests_no_change
from sojourn.train.checkpoint.mirroring import mirror_warning, open_run_mirror
from sojourn.train.checkpoint.recovery import join_mirror
from sojourn.train.faults.guard import Guard, Interrupted
from sojourn.train.faults.limits import session_end, with_catalogue_price
from sojourn.train.faults.oom_fallback import (
    NoFallbackLeft,
    OomFallback,
    format_fallback,
    load_fallbacks,
    next_fallback,
    save_fallback,
)
from sojourn.train.metrics.environment import device_name
from sojourn.train.metrics.trackers import refuse_missing_trackers
from sojourn.train.ranks import Ranks, join_process_group, leave_process_group
from sojourn.train.resolve import resolve_here
from sojourn.train.session import Session, open_session, previous_config, print_line
from sojourn.train.steps import mirror_finished_models, run_steps, stop

_TORCH_CACHE = "TORCHINDUCTOR_CACHE_DIR"
_OTHER_CACHES = {"QUACK_CACHE_DIR": "quack", "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": "flash"}
_FLASH_CACHE_SWITCH = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"


def train(config: RunConfig, run: RunFolder, startup: Startup | None = None) -> None:
    """Trains `config` in `run` until it is done (returns) or stopped early but resumable (raises Stopped). `startup`:
    the time that this process has used already."""
    startup = startup or Startup()
    refuse_missing_trackers(config.log.trackers)
    config = with_catalogue_price(config)
    ranks = join_process_group(use_device(config), config)
    lock = RunLock(run.path) if ranks.is_main else None
    run = replace(run, is_main_process=ranks.is_main, lock=lock)
    mirror = None
    try:
        note_restart(run, ranks)
        mirror = _open_mirror(config, run) if ranks.is_main else None
        with (
            nullcontext() if ranks.is_main else _output_to_log_file(run, ranks),
            reported(lambda counts: run.event("not_written", times=counts)),
            _open_ledger(config, run, ranks, startup) as ledger,
            Guard(config.limits, ledger, session_end(config.limits), distributed=ranks.world_size > 1) as guard,
            _status_on_failure(run, guard),
            _compile_cache(config, run),
        ):
            while not _open_and_train(config, run, ranks, guard, mirror):
                free_memory()
    finally:
        if mirror is not None:
            mirror.close()
        if lock is not None:
            lock.release()
    leave_process_group()


def _gpu_energy(config: RunConfig, ranks: Ranks) -> EnergyMeter:
    """Of the GPUs that train this run, by rank 0; not across machines."""
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if ranks.device != "cuda" or not ranks.is_main or ranks.world_size != here:
        return EnergyMeter([])
    import torch

    given = config.parallel.gpus
    indices = given if isinstance(given, list) else range(here)
    return energy_meter([str(torch.cuda.get_device_properties(index).uuid) for index in indices])


@contextmanager
def _open_ledger(config: RunConfig, run: RunFolder, ranks: Ranks, startup: Startup) -> Iterator[Ledger]:
    """It counts from where the process started, and knows of processes killed while starting."""
    at_least = cost_so_far(run.checkpoints)
    price, identity = config.limits.price_per_hour, read_identity(run.identity)
    ledger = Ledger.open(run.ledger, price, startup.began, run.is_main_process, at_least, identity)
    ledger.may_write = lambda: run.writable
    ledger.energy = _gpu_energy(config, ranks)
    with ledger:
        startup.end()
        if run.is_main_process:
            add_killed_startups(run.path, ledger)
        yield ledger


def _open_mirror(config: RunConfig, run: RunFolder) -> MirrorProcess | None:
    """By rank 0, after it has locked the run."""
    remove_temporary_files(run.path)
    mirror = open_run_mirror(config, run)
    if mirror is not None:
        warning = mirror_warning(config)
        if warning is not None:
            print_line(f"warning: {warning}")
        join_mirror(mirror, run, print_line)
    return mirror


def _open_and_train(
    config: RunConfig, run: RunFolder, ranks: Ranks, guard: Guard, mirror: MirrorProcess | None
) -> bool:
    """True when the run is done; False when memory ran out, and it must be opened again with the OOM fallback."""
    status, before = run.status(), previous_config(run)
    if status and status.state == "done" and run.has_final() and before and requests_no_change(before, config):
        guard.ledger.catch_up(*cost_so_far(run.checkpoints))
        _print_already_done(run, status.step)
        return True
    try:
        with guard.interruptible(even_if_distributed=True):
            session = open_session(config, run, ranks, mirror)
    except (RuntimeError, MemoryError) as error:
        if ranks.world_size > 1 or not is_oom(error):
            raise
        message = str(error)
    else:
        return _train(session, guard)
    _fall_back_to_offload(config, run, ranks, message)
    return False


def _fall_back_to_offload(config: RunConfig, run: RunFolder, ranks: Ranks, message: str) -> None:
    """Memory ran out while opening: only optimizer states in host memory would help."""
    device = device_name(ranks.device)
    resolved = resolve_here(config, oom_fallback=load_fallbacks(run, device)).config
    fallback, message = next_fallback(resolved, in_optimizer_step=True), message.strip().split("\n")[0][:200]
    if fallback != {"train.offload": "optimizer"}:
        raise NoFallbackLeft(
            f"out of memory while loading ({message}); use a GPU with more memory, or method.kind=qlora", clean=False
        )
    save_fallback(run, fallback, device)
    run.event("out_of_memory", step=0, message=message, now=fallback)
    print_line(f"out of memory ({message}); continuing with {format_fallback(fallback)}")


def _train(session: Session, guard: Guard) -> bool:
    """False: the run must be opened again with the OOM fallback."""
    run, progress = session.run, session.progress
    guard.ledger.catch_up(progress.seconds, progress.money)
    guard.ledger.mark = session.identity.mark
    if session.is_finished and run.has_final():
        mirror_finished_models(session)
        _print_already_done(run, progress.step)
    else:
        try:
            run_steps(session, guard)
        except OomFallback:
            return False
        record_run(session)
    run.set_status("done", progress.step, progress.step, resumable=False)
    return True


def _print_already_done(run: RunFolder, steps: int) -> None:
    longer = f"train.steps={2 * steps} --fork NEWNAME"
    print_line(f"{run.path}: already done ({steps} steps); to train on from there in another run: {longer}")


@contextmanager
def _output_to_log_file(run: RunFolder, ranks: Ranks) -> Iterator[None]:
    """Only rank 0 prints."""
    with log_file(run.logs / f"process-{ranks.rank}.log") as log, redirect_stdout(log):
        try:
            yield
        except BaseException:
            traceback.print_exc(file=log)
            raise


@contextmanager
def _compile_cache(config: RunConfig, run: RunFolder) -> Iterator[None]:
    """Compiled kernels are kept in the run folder, or in `advanced.compile_cache`: a restart, or another machine with
    the same GPU, does not compile them again. torch's key has the code, the device and the versions."""
    given = config.advanced.compile_cache
    if _TORCH_CACHE in os.environ and given is None:
        yield
        return
    cache = expand_user(given).absolute() if given else run.compile_cache.absolute()
    paths = {_TORCH_CACHE: cache, **{name: cache / folder for name, folder in _OTHER_CACHES.items()}}
    before = {name: os.environ.get(name) for name in (*paths, _FLASH_CACHE_SWITCH)}
    os.environ.update({name: str(path) for name, path in paths.items()}, **{_FLASH_CACHE_SWITCH: "1"})
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


@contextmanager
def _status_on_failure(run: RunFolder, guard: Guard) -> Iterator[None]:
    """However a run ends, `status.json` has it."""
    try:
        yield
    except Interrupted:  # while opening: there is nothing to save
        stop(run, guard.reason or "a signal", 0, 0)
    except BaseException as error:
        status = run.status()
        if status and status.state in ("starting", "running"):
            message = f"{type(error).__name__}: {error}"
            run.set_status("failed", status.step, status.total_steps, message)
            run.event("failed", error=message)
        raise


def note_restart(run: RunFolder, ranks: Ranks) -> None:
    """torchrun restarts ranks that ended, also those that stopped on purpose: these stop again."""
    count = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if count == 0 or ranks.world_size == 1:
        return
    import psutil

    status = run.status()
    if status and status.state == "stopped" and run.status_written_at() > psutil.Process(os.getppid()).create_time():
        raise Stopped(
            f"stopped by {status.message} at step {status.step} of {status.total_steps}; run the same command to resume"
        )
    run.event("restarted", restart=count)
    if ranks.is_main:
        print_line(f"restarted after a rank had ended (restart {count})")


def use_device(config: RunConfig) -> str:
    """Makes the chosen device current and returns torch's name for it."""
    import torch

    device, gpus = choose_device(config.train.device), config.parallel.gpus
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if isinstance(gpus, list) and len(gpus) != local_world_size:
        raise UserError(
            f"parallel.gpus: {len(gpus)} GPUs are named, but torchrun started {local_world_size} ranks on this machine"
        )
    if device == "cuda":
        index, count = gpus[local_rank] if isinstance(gpus, list) else local_rank, torch.cuda.device_count()
        if index >= count:
            raise UserError(f"parallel.gpus: there is no GPU {index}; this machine has {count}, counted from 0")
        torch.cuda.set_device(index)
        torch.cuda.init()  # else libraries would choose the first GPU again
        if gpus == "auto" and local_world_size == 1 and count > 1:
            print_line(f"note: using 1 of {count} GPUs; to use all: --gpus all")
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if device == "cuda" else "cpu")  # else it prints a warning
    if config.train.deterministic == "on":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # required by torch
        torch.use_deterministic_algorithms(True)
    return device
