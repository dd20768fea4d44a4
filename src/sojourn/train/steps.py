"""The steps of a run, from where it is to its end, with evaluations and saves between them."""

from __future__ import annotations

import time
from typing import NoReturn

from sojourn.errors import RunFailed, Stopped
from sojourn.run.folder import RunFolder
from sojourn.train.batcher import Prefetcher
from sojourn.train.checkpoint.final_model import write_final_model
from sojourn.train.checkpoint.saving import Saver
from sojourn.train.evaluation import Evaluator
from sojourn.train.fault_tolerant_step import Done, FaultTolerantStep
from sojourn.train.faults.guard import Guard, Interrupted
from sojourn.train.faults.memory_pressure import MemoryPressure
from sojourn.train.faults.oom_fallback import NoFallbackLeft, OomFallback
from sojourn.train.metrics.meters import Meters
from sojourn.train.optim.optimizers import learning_rate
from sojourn.train.session import Session


def run_steps(session: Session, guard: Guard) -> None:
    """From where the run is to its end."""
    config, run, total, training_state = session.config, session.run, session.total, session.training_state
    progress, stepper = session.progress, session.stepper
    parameters = list(stepper.network.model.parameters())
    run.event("start", step=progress.step, total_steps=total, device=stepper.batcher.device,
              precision=stepper.batcher.precision, attention=stepper.network.attention_backend or "its own",
              processes=stepper.ranks.world_size, parameters=sum(p.numel() for p in parameters),
              trained=sum(p.numel() for p in parameters if p.requires_grad))  # fmt: skip
    run.set_status("running", progress.step, total)
    with Meters(run, config, total, progress.step, session.mfu_inputs) as meters:
        saver = Saver(config, run, training_state, progress, total, len(session.artefact.train), meters.say)
        try:
            with Prefetcher(session.batches, total) as ahead:
                careful = FaultTolerantStep(session, guard, saver, ahead, meters.say)
                evaluator = Evaluator(config, run, session.artefact, stepper)
                _steps(session, guard, meters, saver, careful, evaluator)
            guard.save_seconds = saver.seconds
            with guard.interruptible():
                weights = stepper.engine.full_weights()
                if stepper.ranks.is_main:
                    write_final_model(stepper.network.model, weights, session.artefact, run.final, config)
                    if saver.mirroring is not None:
                        saver.mirroring.mirror_models(run.final, run.best)
        except Interrupted:
            stop(run, guard.reason or "a signal", progress.step, total)
        finally:
            saver.close()
    run.event("done", step=progress.step, tokens=progress.tokens, seconds=round(guard.ledger.seconds, 1))


def _steps(
    session: Session, guard: Guard, meters: Meters, saver: Saver, careful: FaultTolerantStep, evaluator: Evaluator
) -> None:
    config, run, progress, total = session.config, session.run, session.progress, session.total
    train, ranks, pressure = config.train, session.stepper.ranks, MemoryPressure(session.stepper.batcher.device)
    enough, first = None, progress.step

    def due_or_stopped() -> bool:
        """Whether to save now, agreed by all processes; raises where one of them was told to stop."""
        # A limit that leaves no time for a single step would never let the run get on: one is always made.
        why = guard.reason if progress.step == first else guard.should_stop()
        told, due = ranks.sum(why is not None, ranks.is_main and saver.due())
        if told and not session.ended:
            raise Interrupted
        return due > 0

    try:
        if train.rehearse == "on" and not session.ended:
            careful.rehearse()
        while True:
            due, paused = due_or_stopped(), False
            with meters.paused():
                if due or evaluator.is_due(progress, total):
                    careful.put_down()
                if evaluator.is_due(progress, total):
                    paused = True
                    careful.make_room()
                    enough = careful.retried(lambda: evaluator.evaluate(progress, meters), evaluator.seconds)
                if (due or session.ended) and not careful.sound():
                    continue
                if due:
                    paused = True
                    saver.save()
                saver.poll()
            if session.ended:
                break
            if paused:
                due_or_stopped()
            guard.save_seconds, began = saver.seconds, time.monotonic()
            rate = learning_rate(progress.step, total, train)
            session.stepper.engine.set_learning_rate(rate)
            done = careful.step()
            if done is None:
                continue
            _count(session, guard, meters, done)
            guard.step_seconds = time.monotonic() - began
            last, every = progress.step == total, config.log.every_steps
            if not done.skipped and (progress.step % every == 0 or progress.step == 1 or last):
                epoch = progress.step * train.global_batch / len(session.artefact.train)
                meters.log(progress.step, done.loss, rate, done.norm, epoch, guard.ledger.spent)
                pressure.check(careful, saver)
            warning = guard.warning()
            if warning is not None:
                run.event("budget", message=warning)
                meters.say(f"warning: {warning}")
    except Interrupted:
        _save_and_stop(session, guard, saver)
    except OomFallback as down:
        _keep(session, saver, down.clean)
        raise OomFallback(down.fallback, down.clean) from None
    except NoFallbackLeft as end:
        _keep(session, saver, end.clean)
        raise
    except OSError:  # the data can no longer be read; by this process, perhaps, and not by others
        if ranks.world_size == 1:
            _keep(session, saver, clean=True)
        raise
    saver.save(must=True)
    saver.finish()
    if enough is not None:
        meters.say(f"ended early by {enough}")
        run.event("ended_early", step=progress.step, why=enough)


def _keep(session: Session, saver: Saver, clean: bool) -> None:
    """What was trained before things went wrong."""
    if clean and session.progress.step and session.training_state.is_finite():
        saver.save(must=True)
        saver.finish()


def _count(session: Session, guard: Guard, meters: Meters, done: Done) -> None:
    progress = session.progress
    meters.count_step(done.tokens, done.waited)
    progress.step += 1
    progress.tokens += done.tokens
    progress.seconds, progress.money = guard.ledger.seconds, guard.ledger.spent or guard.ledger.paid


def _save_and_stop(session: Session, guard: Guard, saver: Saver) -> NoReturn:
    """Saved, in the mirror if there is one, and only then told."""
    step = session.progress.step
    _keep(session, saver, clean=True)
    saver.finish()
    session.stepper.ranks.barrier()  # who leaves first has torchrun kill the others
    failed = saver.mirroring.failed if saver.mirroring is not None else None
    stop(session.run, guard.reason or "another process", step, session.total, failed)


def stop(run: RunFolder, why: str, step: int, total: int, not_mirrored: str | None = None) -> NoReturn:
    status = run.status()
    step, total = (step, total) if total or status is None else (status.step, status.total_steps)
    run.set_status("stopped", step, total, why)
    run.event("stopped", step=step, why=why)
    if step == 0:
        raise Stopped(f"stopped by {why} before the first step; run the same command to start again")
    if not_mirrored is not None:
        raise RunFailed(
            f"stopped by {why} at step {step} of {total}, saved in {run.path}, but not mirrored: {not_mirrored}"
        )
    raise Stopped(f"stopped by {why} at step {step} of {total}, saved in {run.path}; run the same command to resume")
