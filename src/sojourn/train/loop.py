"""Training, from a configuration to `final/`: one loop for every device. A second call on the same run continues it.

The order of things: resolve what the machine decides → the prepared data → the model → the newest good checkpoint, if
any → steps, with saves between them → the final model. A signal or a limit ends the loop; so does memory that runs out
for good, and then everything is built again one rung down the ladder.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NoReturn

from sojourn.config.schema import RunConfig
from sojourn.errors import RunFailed, Stopped, UserError
from sojourn.machine.precision import choose_device
from sojourn.run.folder import RunFolder
from sojourn.run.ledger import Ledger
from sojourn.train.assess import Assessor
from sojourn.train.careful import Careful, Done
from sojourn.train.copies import fetch_beginnings, mirror_of
from sojourn.train.feed import Ahead
from sojourn.train.final import write_final
from sojourn.train.guard import Abandoned, Guard
from sojourn.train.ladder import NoRungLeft, OneRungDown, free_memory
from sojourn.train.limits import priced, session_end
from sojourn.train.meters import Meters
from sojourn.train.optim import learning_rate
from sojourn.train.pressure import Pressure
from sojourn.train.ranks import Ranks, join, leave
from sojourn.train.saving import Saver
from sojourn.train.session import Session, open_session, say
from sojourn.train.trackers import refuse_missing_trackers


def train(config: RunConfig, run: RunFolder) -> None:
    """Trains `config` in `run` until it is done (returns) or stopped early but resumable (raises Stopped)."""
    began = time.monotonic()
    _refuse_what_is_not_here(config)
    refuse_missing_trackers(config.log.trackers)
    config = priced(config)
    ranks = join(use_device(config), config.train.global_batch)
    run = replace(run, silent=not ranks.first)
    run.acquire()
    try:
        mirror = mirror_of(config, run)
        if mirror is not None and ranks.first:
            fetch_beginnings(mirror, run)
        with (
            Ledger.open(run.ledger, config.limits.price_per_hour, began, run.silent) as ledger,
            Guard(config.limits, ledger, session_end(config.limits), together=ranks.size > 1) as guard,
            _told(run, guard),
        ):
            while not _trained(config, run, ranks, guard):
                free_memory()
    finally:
        run.release()
        leave()


def _trained(config: RunConfig, run: RunFolder, ranks: Ranks, guard: Guard) -> bool:
    """Opens everything and trains to the end; False when it must be done again, one rung down."""
    with guard.abandonable():
        session = open_session(config, run, ranks)
    guard.ledger.catch_up(session.progress.seconds, session.progress.money)
    if session.ended and run.has_final():
        done = session.progress.step
        say(f"{run.path}: already done ({done} steps); to train longer, begin another run: --fork NEWNAME")
    else:
        try:
            _run(session, guard)
        except OneRungDown:
            return False
    run.set_status("done", session.progress.step, session.progress.step, resumable=False)
    return True


@contextmanager
def _told(run: RunFolder, guard: Guard) -> Iterator[None]:
    """However a run ends, its status says so."""
    try:
        yield
    except Abandoned:  # while opening: nothing was begun that is not saved
        _stop(run, guard.reason or "a signal", 0, 0)
    except BaseException as error:
        status = run.status()
        if status and status.state in ("starting", "running"):
            says = f"{type(error).__name__}: {error}"
            run.set_status("failed", status.step, status.total_steps, says)
            run.event("failed", error=says)
        raise


def _refuse_what_is_not_here(config: RunConfig) -> None:
    parallel = config.parallel
    several = isinstance(parallel.gpus, list) and len(parallel.gpus) > 1
    if parallel.engine not in ("auto", "single") or several or parallel.deepspeed is not None:
        raise UserError("parallel: this version trains on one device; use --gpus 0 and leave parallel.engine at auto")


def use_device(config: RunConfig) -> str:
    """Makes the chosen device current and returns torch's name for it."""
    import torch

    device = choose_device(config.train.device)
    if device == "cuda" and isinstance(config.parallel.gpus, list):
        number, there = config.parallel.gpus[0], torch.cuda.device_count()
        if number >= there:
            raise UserError(f"parallel.gpus: there is no GPU {number}; this machine has {there}, counted from 0")
        torch.cuda.set_device(number)
    if config.train.deterministic == "on":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch asks for it
        torch.use_deterministic_algorithms(True)
    return device


def _run(session: Session, guard: Guard) -> None:
    """From where the run is to its end."""
    config, run, total, live = session.config, session.run, session.total, session.live
    progress, stepper = session.progress, session.stepper
    parameters = list(live.model.parameters())
    run.event("start", step=progress.step, total_steps=total, device=stepper.feed.device,
              precision=stepper.feed.precision, attention=stepper.network.backend or "its own",
              processes=stepper.ranks.size, parameters=sum(p.numel() for p in parameters),
              trained=sum(p.numel() for p in parameters if p.requires_grad))  # fmt: skip
    run.set_status("running", progress.step, total)
    with Meters(run, config, total, progress.step, session.work) as meters:
        saver = Saver(config, run, live, progress, total, len(session.artefact.train), meters.say)
        try:
            with Ahead(session.batches, total) as ahead:
                careful = Careful(session, guard, saver, ahead, meters.say)
                assessor = Assessor(config, run, session.artefact, stepper.network, stepper.feed, stepper.ranks)
                _steps(session, guard, meters, saver, careful, assessor)
            guard.save_seconds = saver.seconds
            with guard.abandonable():
                if stepper.ranks.first:
                    write_final(live.model, session.artefact, run.final, config)
                    if saver.copies is not None:
                        saver.copies.bring_home(run.final, run.best)
        except Abandoned:
            _stop(run, guard.reason or "a signal", progress.step, total)
        finally:
            saver.close()
    run.event("done", step=progress.step, tokens=progress.tokens, seconds=round(guard.ledger.seconds, 1))


def _steps(session: Session, guard: Guard, meters: Meters, saver: Saver, careful: Careful, assessor: Assessor) -> None:
    config, run, progress, total = session.config, session.run, session.progress, session.total
    train, ranks, pressure = config.train, session.stepper.ranks, Pressure(session.stepper.feed.device)
    enough, first = None, progress.step

    def stop_if_told() -> None:
        # A limit that leaves no time for a single step would never let the run get on: one is always made.
        stop = guard.reason if progress.step == first else guard.should_stop()
        if not session.ended and ranks.any(stop is not None):
            raise Abandoned

    try:
        if train.rehearse == "on" and not session.ended:
            careful.rehearse()
        while True:
            with meters.paused():
                if assessor.due(progress, total):
                    stop_if_told()
                    enough = careful.retried(lambda: assessor.assess(progress, meters), assessor.seconds)
                if saver.due():
                    saver.save()
                saver.look()
            if session.ended:
                break
            stop_if_told()
            guard.save_seconds, began = saver.seconds, time.monotonic()
            rate = learning_rate(progress.step, total, train)
            session.live.optimizer.set_learning_rate(rate)
            done = careful.step()
            if done is None:
                continue
            _count(session, guard, meters, done)
            guard.step_seconds = time.monotonic() - began
            last, every = progress.step == total, config.log.every_steps
            if not done.skipped and (progress.step % every == 0 or progress.step == 1 or last):
                epoch = progress.step * train.global_batch / len(session.artefact.train)
                meters.log(progress.step, done.loss, rate, done.norm, epoch, guard.ledger.spent)
                pressure.look(careful, saver)
            warning = guard.warning()
            if warning is not None:
                run.event("budget", says=warning)
                meters.say(f"warning: {warning}")
    except Abandoned:
        _save_and_stop(session, guard, saver)
    except OneRungDown as down:
        if down.clean:
            saver.save(must=True)
        raise OneRungDown(down.rung, down.clean) from None
    except NoRungLeft as end:
        if end.clean:
            saver.save(must=True)
            saver.finish()
        raise
    saver.save(must=True)
    saver.finish()
    if enough is not None:
        meters.say(f"ended early by {enough}")
        run.event("ended_early", step=progress.step, why=enough)


def _count(session: Session, guard: Guard, meters: Meters, done: Done) -> None:
    progress = session.progress
    meters.count(done.tokens, done.waited)
    progress.step += 1
    progress.tokens += done.tokens
    progress.seconds, progress.money = guard.ledger.seconds, guard.ledger.spent or guard.ledger.paid


def _save_and_stop(session: Session, guard: Guard, saver: Saver) -> NoReturn:
    """Saved, in the mirror if there is one, and only then told."""
    step = session.progress.step
    if step:
        saver.save(must=True)
    saver.finish()
    session.stepper.ranks.wait()  # who leaves first has torchrun kill the others
    failed = saver.copies.failed if saver.copies is not None else None
    _stop(session.run, guard.reason or "another process", step, session.total, failed)


def _stop(run: RunFolder, why: str, step: int, total: int, not_mirrored: str | None = None) -> NoReturn:
    status = run.status()
    step, total = (step, total) if total or status is None else (status.step, status.total_steps)
    run.set_status("stopped", step, total, why)
    run.event("stopped", step=step, why=why)
    if step == 0:
        raise Stopped(f"stopped by {why} before the first step; the same command begins again")
    if not_mirrored is not None:
        raise RunFailed(
            f"stopped by {why} at step {step} of {total}, saved in {run.path}, but not mirrored: {not_mirrored}"
        )
    raise Stopped(f"stopped by {why} at step {step} of {total}, saved in {run.path}; the same command continues")
