"""The steps of a run, from where it is to its end, with evaluations and saves between them.

Signals (`STOP_SIGNALS`) and limits (`limits.time`, `limits.session`, `limits.budget`) all end in `stop`: save, mirror,
mark the run resumable, exit code 3. All ranks agree on a stop, and on a save, before every step.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from sojourn.errors import RunFailed, Stopped
from sojourn.run.folder import RunFolder
from sojourn.run.lock import OwnershipLost
from sojourn.train.batcher import Prefetcher
from sojourn.train.checkpoint.checkpoint import Retention
from sojourn.train.checkpoint.final_model import write_final_model
from sojourn.train.checkpoint.mirroring import Mirroring
from sojourn.train.checkpoint.rescue import write_elsewhere
from sojourn.train.checkpoint.saving import Saver
from sojourn.train.evaluation import Evaluator
from sojourn.train.fault_tolerant_step import FaultTolerantStep, StepResult
from sojourn.train.faults.folder_watch import FolderWatch
from sojourn.train.faults.guard import Guard, Interrupted
from sojourn.train.faults.memory_pressure import MemoryPressure
from sojourn.train.faults.oom_fallback import NoFallbackLeft, OomFallback
from sojourn.train.metrics.meters import Meters
from sojourn.train.optim.optimizers import learning_rate
from sojourn.train.session import Session, print_line

_STATUS_SECONDS = 2.0


def run_steps(session: Session, guard: Guard) -> None:
    """Trains to the end and writes `final/`. Raises Stopped, or OomFallback if the run must be built again."""
    config, run, progress, stepper = session.config, session.run, session.progress, session.stepper
    parameters = list(stepper.network.model.parameters())
    run.event("start", step=progress.step, total_steps=session.total_steps, device=stepper.batcher.device,
              precision=stepper.batcher.precision, attention=stepper.network.attention_backend or "transformers",
              processes=stepper.ranks.world_size, parameters=sum(p.numel() for p in parameters),
              trained=sum(p.numel() for p in parameters if p.requires_grad))  # fmt: skip
    run.set_status("running", progress.step, session.total_steps)
    with Meters(run, config, session.total_steps, progress.step, session.mfu_inputs) as meters:
        epoch_rows = len(session.artefact.train)
        saver = Saver(
            config, run, session.training_state, progress, session.total_steps, epoch_rows, meters.say, session.mirror,
            session.identity,
        )  # fmt: skip
        try:
            with Prefetcher(session.batches, session.total_steps) as prefetcher:
                step = FaultTolerantStep(session, guard, saver, prefetcher, meters.say)
                evaluator = Evaluator(config, run, session.artefact, stepper)
                watch = FolderWatch(run)
                loop = _StepLoop(session, guard, meters, saver, step, evaluator, watch, progress.step)
                unsaved = _train_and_save(loop)
            guard.save_seconds = saver.seconds
            loop.keep_folder()
            with guard.interruptible():
                _write_final(session, saver)
            if unsaved is not None:
                raise RunFailed(f"{unsaved}; the finished model is in {run.final}")
        except Interrupted:
            stop(run, guard.reason or "a signal", progress.step, session.total_steps)
        finally:
            saver.close()
    run.event("done", step=progress.step, tokens=progress.tokens, seconds=round(guard.ledger.seconds, 1))


@dataclass
class _StepLoop:
    session: Session
    guard: Guard
    meters: Meters
    saver: Saver
    step: FaultTolerantStep
    evaluator: Evaluator
    watch: FolderWatch
    first_step: int  # of this call of `train`
    early_stop: str | None = None  # why the run ended before its last step
    status_written: float = 0.0  # as time.monotonic

    def run(self) -> None:
        """Until the run is finished. Raises Interrupted where a rank must stop."""
        session, pressure = self.session, MemoryPressure(self.session.stepper.batcher.device)
        if session.config.train.rehearse == "on" and not session.is_finished:
            self.step.try_longest_rows()
        while True:
            save_due = self._agree_on_stop_and_save()
            evaluation_due = self.evaluator.is_due(session.progress, session.total_steps)
            with self.meters.paused():
                if save_due or evaluation_due:
                    self.step.release_speculative_forward()
                if evaluation_due:
                    self._evaluate()
                if (save_due or session.is_finished) and not self.step.check_weights():
                    continue  # the run is back at its last checkpoint
                if save_due:
                    self.saver.save()
                self.saver.poll()
            if session.is_finished:
                return
            if save_due or evaluation_due:
                self._agree_on_stop_and_save()  # it took time, in which a signal may have come
            self._run_step(pressure)

    def _agree_on_stop_and_save(self) -> bool:
        """Whether a save is due. Raises Interrupted if any rank must stop. All ranks agree."""
        session, ranks = self.session, self.session.stepper.ranks
        self.keep_folder()
        # Each call makes one step at least: else a limit that leaves no time for one would stop every call.
        is_first = session.progress.step == self.first_step
        reason = self.guard.reason if is_first else self.guard.should_stop()
        must_stop, save_due = ranks.sum(reason is not None, ranks.is_main and self.saver.due())
        if must_stop and not session.is_finished:
            raise Interrupted
        return save_due > 0

    def keep_folder(self) -> None:
        """Goes on in a new folder where the run's own is gone."""
        restored = self.watch.restore()
        if restored is None:
            return
        self.saver.forget_saves()
        self.meters.say(f"warning: {restored.message}")
        self.session.run.event("folder_gone", step=self.session.progress.step, message=restored.message)
        self.session.run.set_status("running", self.session.progress.step, self.session.total_steps)
        if restored.displaced and self.guard.reason is None:
            self.guard.reason = "another run in its folder"

    def _evaluate(self) -> None:
        self.step.release_cuda_graphs()
        evaluator, progress = self.evaluator, self.session.progress
        self.early_stop = self.step.retry_on_oom(lambda: evaluator.evaluate(progress, self.meters), evaluator.seconds)

    def _run_step(self, pressure: MemoryPressure) -> None:
        session, guard, progress = self.session, self.guard, self.session.progress
        guard.save_seconds, began = self.saver.seconds, time.monotonic()
        rate = learning_rate(progress.step, session.total_steps, session.config.train)
        session.stepper.engine.set_learning_rate(rate)
        result = self.step.step()
        if result.outcome == "rolled_back":
            return
        _count_step(session, guard, self.meters, result)
        guard.step_seconds = time.monotonic() - began
        self._keep_status()
        if result.outcome == "done" and self._is_logged(progress.step):
            epoch = progress.step * session.config.train.global_batch / len(session.artefact.train)
            numbers = (result.loss, rate, result.grad_norm, epoch, progress.tokens)
            self.meters.log(progress.step, *numbers, guard.ledger.spent)
            pressure.check(self.step, self.saver)
        warning = guard.warning()
        if warning is not None:
            session.run.event("budget", message=warning)
            self.meters.say(f"warning: {warning}")

    def _keep_status(self) -> None:
        """status.json follows the run within seconds, however rarely it saves. Without fsync: it takes up to a second
        where other programs write to the disk."""
        now, progress = time.monotonic(), self.session.progress
        if now - self.status_written >= _STATUS_SECONDS:
            self.status_written = now
            self.session.run.set_status("running", progress.step, self.session.total_steps, durable=False)

    def _is_logged(self, step: int) -> bool:
        return step % self.session.config.log.every_steps == 0 or step in (1, self.session.total_steps)


def _train_and_save(loop: _StepLoop) -> RunFailed | None:
    """Runs the loop; however it ends, what was trained is saved if the weights are whole. At the end of the run, the
    reason why the last checkpoint is not in the run folder is returned: the model can still be written."""
    session, saver = loop.session, loop.saver
    try:
        loop.run()
    except Interrupted:
        _save_and_stop(session, loop.guard, saver)
    except OomFallback as fallback:
        _save_if_clean(session, saver, fallback.clean)
        raise OomFallback(fallback.fallback, fallback.clean) from None  # a new one: its traceback would hold memory
    except NoFallbackLeft as end:
        _save_if_clean(session, saver, end.clean)
        raise
    except OSError:  # the data can no longer be read, perhaps only by this rank
        if session.stepper.ranks.world_size == 1:
            _save_if_clean(session, saver, clean=True)
        raise
    unsaved = None
    try:
        saver.save(must=True)
    except OwnershipLost:
        raise
    except RunFailed as error:
        unsaved = error
    saver.finish()
    if loop.early_stop is not None:
        loop.meters.say(f"ended early by {loop.early_stop}")
        session.run.event("ended_early", step=session.progress.step, why=loop.early_stop)
    return unsaved


def _save_if_clean(session: Session, saver: Saver, clean: bool, timeout: float | None = None) -> None:
    """`clean`: no update was interrupted. `timeout`: seconds to wait for the mirror."""
    if clean and session.progress.step and session.training_state.is_finite():
        saver.save(must=True)
    saver.finish(timeout)


def _count_step(session: Session, guard: Guard, meters: Meters, result: StepResult) -> None:
    progress = session.progress
    meters.count_step(result.tokens, result.data_wait)
    progress.step += 1
    progress.tokens += result.tokens
    progress.seconds, progress.money = guard.ledger.seconds, guard.ledger.spent or guard.ledger.paid


def _write_final(session: Session, saver: Saver) -> None:
    weights = session.stepper.engine.full_weights()
    if session.stepper.ranks.is_main:
        session.run.check_ownership()
        mark = {**session.identity.mark, "step": session.progress.step}

        def write(folder: Path) -> Path:
            model = session.stepper.network.model
            write_final_model(model, weights, session.artefact, folder, session.config, mark)
            return folder

        try:
            write(session.run.final)
        except (OSError, RunFailed) as error:
            path = write_elsewhere(session.config.save, session.run, lambda folder: write(folder / "final"))
            reason = getattr(error, "strerror", None) or error
            raise RunFailed(
                f"{session.run.final}: could not be written ({reason}); the finished model is in {path} instead"
            ) from error
        if saver.mirroring is not None:
            _mirror_models(saver.mirroring, session.run)


def _mirror_models(mirroring: Mirroring, run: RunFolder) -> None:
    try:
        mirroring.mirror_models(run.final, run.best)
    except OwnershipLost:
        raise
    except RunFailed as error:
        run.event("mirror_failed", path="final", message=str(error))
        raise RunFailed(
            f"the finished model is in {run.final}, but not in the mirror: {error}; run the same command to mirror it"
        ) from error


def mirror_finished_models(session: Session) -> None:
    """Of a run that was finished before, but perhaps not mirrored: its checkpoints and its models."""
    if session.mirror is not None and session.stepper.ranks.is_main:
        mirroring, save = Mirroring(session.mirror, session.run, print_line), session.config.save
        try:
            mirroring.catch_up(Retention(save.keep, session.progress.best_step or None, save.milestones))
            _mirror_models(mirroring, session.run)
        finally:
            mirroring.close()


def _save_and_stop(session: Session, guard: Guard, saver: Saver) -> NoReturn:
    """Saved, and mirrored, before the run is marked as stopped."""
    step = session.progress.step
    _save_if_clean(session, saver, clean=True, timeout=guard.grace_left)
    session.stepper.ranks.barrier()  # torchrun kills the others when the first rank exits
    not_mirrored = saver.mirroring.failed if saver.mirroring is not None else None
    stop(session.run, guard.reason or "another rank", step, session.total_steps, not_mirrored)


def stop(run: RunFolder, reason: str, step: int, total_steps: int, not_mirrored: str | None = None) -> NoReturn:
    status = run.status()
    if not total_steps and status is not None:
        step, total_steps = status.step, status.total_steps
    run.set_status("stopped", step, total_steps, reason)
    run.event("stopped", step=step, why=reason)
    if step == 0:
        raise Stopped(f"stopped by {reason} before the first step; run the same command to start again")
    saved = f"stopped by {reason} at step {step} of {total_steps}, saved in {run.path}"
    if not_mirrored is not None:
        raise RunFailed(f"{saved}, but not mirrored: {not_mirrored}")
    raise Stopped(f"{saved}; run the same command to resume")
