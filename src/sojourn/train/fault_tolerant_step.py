"""One global step that out-of-memory errors, wrong losses and signals cannot spoil.

Nothing has changed before the update, so the gradients of a step can be discarded and computed again, with the random
state put back:

- out of memory: the same global batch in smaller micro batches. If that does not help, the run is built again with
  settings that need less memory (`faults/oom_fallback.py`); an update that ran out of memory may have changed some
  weights, so then the run also goes back to its last checkpoint;
- a loss that is not finite, or a spike: the step is replayed once. Hardware faults rarely repeat; a bad batch does, and
  is then skipped, kept, or ends the run, as `train.on_nan` and `train.on_spike` say;
- a signal: `Interrupted` leaves the step where it stands, if there is no time to finish it.

With `train.optimizer_in_backward=on` the update includes the backward: the loss is checked before it, a signal waits
for its end, and a gradient that is not finite leaves its parameter unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import numpy as np

from sojourn.data.artefact import Batch
from sojourn.errors import RunFailed
from sojourn.launch.verdict import RestartNeeded
from sojourn.machine.out_of_memory import free_memory, is_oom
from sojourn.train.batcher import Prefetcher
from sojourn.train.checkpoint.checkpoint import load_newest
from sojourn.train.checkpoint.rng_state import get_rng_state, set_rng_state
from sojourn.train.checkpoint.saving import Saver, Say
from sojourn.train.checkpoint.sync import sync_checkpoint
from sojourn.train.faults.guard import Guard, Interrupted
from sojourn.train.faults.loss_spikes import LOSS_WINDOW, LossVerdict, check_loss, is_reproduced, spike_threshold
from sojourn.train.faults.oom_fallback import (
    NoFallbackLeft,
    OomFallback,
    format_fallback,
    next_fallback,
    save_fallback,
)
from sojourn.train.session import Session
from sojourn.train.step import SpeculativeStep, Stepper

_REPLAY_TOLERANCE = {"cpu": 0.0}
_GPU_REPLAY_TOLERANCE = 1e-2  # a GPU sums in another order each time

RngState = dict[str, Any]
T = TypeVar("T")


@dataclass(frozen=True)
class StepResult:
    """`rolled_back`: the run went back to its last checkpoint. `tokens`: without padding. `data_wait`: in seconds."""

    outcome: Literal["done", "skipped", "rolled_back"]
    loss: float = float("nan")
    grad_norm: float = float("nan")
    tokens: int = 0
    data_wait: float = 0.0


@dataclass(frozen=True)
class _Attempt:
    """A step's result, before it is judged. `updated`: the device has found it good and updated the weights."""

    loss: float
    grad_norm: float
    data_wait: float
    updated: bool


@dataclass
class FaultTolerantStep:
    session: Session
    guard: Guard
    saver: Saver
    prefetcher: Prefetcher
    say: Say
    speculative: SpeculativeStep | None = None

    @property
    def stepper(self) -> Stepper:
        return self.session.stepper

    def step(self) -> StepResult:
        progress, train = self.session.progress, self.session.config.train
        step = progress.step
        if step in progress.skipped_steps:
            return StepResult("skipped")
        if self.stepper.network.has_dropout:  # checkpoints have the random state of rank 0 only
            self.stepper.ranks.seed_other_ranks(train.seed, step)
        rng_state = get_rng_state()
        with self._undo_if_abandoned(rng_state):
            attempt = self._attempt(step, rng_state)
            if self._check(attempt) != "good":
                attempt = self._replay(attempt, rng_state)
        verdict = self._check(attempt)
        if verdict == "spike" and train.on_spike == "keep":
            self._note_spike(attempt)
        elif verdict == "not finite" and not self.check_weights():
            return StepResult("rolled_back")
        elif verdict != "good":
            return self._skip_batch(step, verdict, attempt)
        if not attempt.updated:
            self._run_update(self.stepper.update)
        applied = self.stepper.engine.applied
        if applied is not None:
            attempt = replace(attempt, grad_norm=applied.norm)
            if applied.not_finite and not self._continue_after_bad_gradients(step, applied.not_finite):
                return StepResult("rolled_back")
        progress.recent_losses = [*progress.recent_losses, attempt.loss][-LOSS_WINDOW:]
        return StepResult("done", attempt.loss, attempt.grad_norm, self.session.tokens(step), attempt.data_wait)

    @contextmanager
    def _undo_if_abandoned(self, rng_state: RngState) -> Iterator[None]:
        """A step that is left before its update leaves nothing behind."""
        try:
            yield
        except (Interrupted, OomFallback, NoFallbackLeft):
            self._discard()
            set_rng_state(rng_state)
            raise

    def _attempt(self, step: int, rng_state: RngState) -> _Attempt:
        """Loss and gradient norm; with an async step the update too, and the next step's first forward.

        Signals wait until an async step is read: saving would have to wait for the device as well.
        """
        with self.guard.interruptible(self.guard.step_seconds):
            batches, data_wait = self._take_batches(step)
        stepper = self.stepper
        if self.session.config.advanced.async_step == "off" or not stepper.engine.supports_async_step:
            loss, norm = self._gradients(stepper.gradients, rng_state, batches)
            return _Attempt(loss, norm, data_wait, updated=False)
        launched = self._gradients(lambda given: stepper.launch_gradients(given, self.speculative), rng_state, batches)
        self.speculative = None
        max_loss = spike_threshold(self.session.progress.recent_losses)
        result = self._run_update(lambda: stepper.update_if_good(launched, max_loss))
        self._launch_speculative_step(step + 1)
        loss, norm, updated = result.read()
        return _Attempt(loss, norm, data_wait, bool(updated))

    def _take_batches(self, step: int) -> tuple[list[Batch], float]:
        ahead = self.speculative
        if ahead is not None:
            if (ahead.step, ahead.micro_batch) == (step, self.stepper.batcher.micro_batch):
                return ahead.batches, ahead.data_wait
            self._discard()
        return self.prefetcher.take(step)

    def _launch_speculative_step(self, step: int) -> None:
        """Its first forward. Not with dropout: random numbers are drawn in the order of good steps."""
        session, stepper = self.session, self.stepper
        if stepper.network.has_dropout or step >= session.total_steps or step in session.progress.skipped_steps:
            return
        if not self.prefetcher.has(step):
            return
        batches, data_wait = self.prefetcher.take(step)
        loss_share = None
        try:
            loss_share = stepper.speculative_forward(batches)
        except RuntimeError as error:
            if not is_oom(error):
                raise
        self.speculative = SpeculativeStep(step, batches, data_wait, stepper.batcher.micro_batch, loss_share)

    def release_speculative_forward(self) -> None:
        """Frees its memory, for work between steps; its micro batches stay."""
        if self.speculative is not None:
            self.speculative = replace(self.speculative, loss_share=None)
            self.stepper.discard()

    def release_cuda_graphs(self) -> None:
        """Frees their memory; they are captured again soon."""
        if self.stepper.cuda_graphs is not None:
            self.stepper.cuda_graphs.release()

    def _discard(self) -> None:
        """The gradients, and the speculative step, which may have made gradients already."""
        self.speculative = None
        self.stepper.discard()

    def try_longest_rows(self) -> None:
        """Forward and backward of the longest rows, so that memory runs out now if ever; changes nothing."""
        rows, batcher, rng_state = self.session.artefact.train, self.stepper.batcher, get_rng_state()
        longest = np.argsort(-np.diff(rows.rows), kind="stable")

        def read() -> list[Batch]:
            return list(batcher.batches(rows, longest[: batcher.micro_batch], self.session.progress.step))

        self._gradients(self.stepper.gradients_without_update, rng_state, read=read)
        self.stepper.discard()
        set_rng_state(rng_state)
        if batcher.device == "cuda":
            free_memory()

    def _gradients(
        self,
        compute: Callable[[list[Batch]], T],
        rng_state: RngState,
        batches: list[Batch] | None = None,
        read: Callable[[], list[Batch]] | None = None,
    ) -> T:
        """`compute` on `batches`; on what `read` returns if there are none, or if the micro batch has become smaller.

        `read`: this step's micro batches, if None.
        """
        session, stepper = self.session, self.stepper
        read = read or (lambda: session.batches(session.progress.step))
        micro_batch = stepper.batcher.micro_batch

        def attempt() -> T:
            nonlocal batches, micro_batch
            if batches is None or micro_batch != stepper.batcher.micro_batch:
                stepper.discard()
                set_rng_state(rng_state)
                batches, micro_batch = read(), stepper.batcher.micro_batch
            return compute(batches)

        return self.retry_on_oom(attempt, self.guard.step_seconds)

    def retry_on_oom(self, work: Callable[[], T], usual_seconds: float | None = None) -> T:
        """Work that changes nothing, again with a smaller micro batch if memory runs out."""
        while True:
            try:
                with self.guard.interruptible(usual_seconds):
                    return work()
            except (RuntimeError, MemoryError) as error:
                if not is_oom(error):
                    raise
                message = str(error)
            self._fall_back(message)  # outside `except`: the error's traceback holds memory

    def _run_update(self, update: Callable[[], T]) -> T:
        """If memory runs out in it, some weights may have changed: the run goes back to its last checkpoint."""
        try:
            return update()
        except (RuntimeError, MemoryError) as error:
            if not is_oom(error):
                raise
            message = str(error)
        self._fall_back(message, in_update=True)  # outside `except`, as above
        raise RuntimeError(message)

    def relieve_memory_pressure(self, message: str) -> None:
        """Falls back before memory really runs out: releases CUDA graphs, or makes the micro batch smaller."""
        if self.stepper.engine.syncs_every_micro_batch or self.stepper.engine.updates_in_backward:
            return
        if self.stepper.has_cuda_graphs or self.stepper.batcher.micro_batch > 1:
            self._fall_back(message)

    def _fall_back(self, message: str, in_update: bool = False) -> None:
        """Takes the next OOM fallback. Returns if it is a smaller micro batch; else raises: the run must be rebuilt."""
        session, batcher = self.session, self.stepper.batcher
        train = session.config.train.model_copy(update={"micro_batch": batcher.micro_batch})
        config = session.config.model_copy(update={"train": train})
        without_activations = in_update and not self.stepper.engine.updates_in_backward
        fallback = next_fallback(config, without_activations, self.stepper.has_cuda_graphs)
        step, message = session.progress.step + 1, message.strip().split("\n")[0][:200]
        if fallback is None:
            raise NoFallbackLeft(
                f"step {step}: out of memory ({message}), and no setting is left that would save memory; use a GPU "
                "with more memory, a shorter data.max_length, or method.kind=qlora in a new run: name=NEW",
                clean=not in_update,
            )
        must_restart = self.stepper.engine.syncs_every_micro_batch  # the other ranks wait inside a collective
        if must_restart or session.run.is_main_process:
            save_fallback(session.run, fallback, session.device_name)
        session.run.event("out_of_memory", step=step, message=message, now=fallback)
        if must_restart:
            raise RestartNeeded(f"step {step}: out of memory ({message}); restarting with {format_fallback(fallback)}")
        self.say(f"step {step}: out of memory ({message}); continuing with {format_fallback(fallback)}")
        self._discard()
        self.release_cuda_graphs()
        if set(fallback) != {"train.micro_batch"} or in_update:
            raise OomFallback(fallback, clean=not in_update)
        batcher.micro_batch = fallback["train.micro_batch"]
        self.prefetcher.discard()
        free_memory()

    def _check(self, attempt: _Attempt) -> LossVerdict:
        recent, scaled = self.session.progress.recent_losses, self.stepper.engine.uses_loss_scaling
        return check_loss(attempt.loss, attempt.grad_norm, recent, scaled)

    def _replay(self, first: _Attempt, rng_state: RngState) -> _Attempt:
        """The same step again, with the same random numbers. Another result points at the hardware."""
        self._discard()
        loss, norm = self._gradients(self.stepper.gradients, rng_state)
        tolerance = _REPLAY_TOLERANCE.get(self.stepper.batcher.device, _GPU_REPLAY_TOLERANCE)
        if not is_reproduced((first.loss, first.grad_norm), (loss, norm), tolerance):
            step = self.session.progress.step + 1
            self.session.run.event("suspect_hardware", step=step, loss=_to_json(first.loss), again=_to_json(loss))
            self.say(
                f"warning: step {step} gave loss {first.loss:.4g}, and {loss:.4g} when replayed: suspect the hardware "
                "(memory errors, heat); if this happens again, use another machine"
            )
        return _Attempt(loss, norm, first.data_wait, updated=False)

    def _note_spike(self, attempt: _Attempt) -> None:
        step = self.session.progress.step
        self.session.run.event("spike", step=step + 1, loss=_to_json(attempt.loss), rows=self.session.rows(step))
        self.say(f"note: step {step + 1}: loss spike, {attempt.loss:.4f} (to skip such batches: train.on_spike=skip)")

    def _skip_batch(self, step: int, verdict: LossVerdict, attempt: _Attempt) -> StepResult:
        """Continues without this batch, from here or from the last checkpoint, or ends the run, as configured."""
        session = self.session
        progress, train = session.progress, session.config.train
        self.stepper.discard()
        policy = train.on_nan if verdict == "not finite" else train.on_spike
        values = f"the loss is {attempt.loss:.4g}, the gradient norm {attempt.grad_norm:.4g}"
        progress.bad_steps += 1
        if policy == "stop" or progress.bad_steps > train.max_bad_steps:
            scaled = self.stepper.engine.uses_loss_scaling
            remedy = "train.precision=fp32" if scaled else f"a smaller rate: train.lr={float(train.lr) / 3:.1g}"
            limit = "" if policy == "stop" else f", after {train.max_bad_steps} bad steps (train.max_bad_steps)"
            raise RunFailed(f"step {step + 1}: {values}{limit}, so nothing more is saved; try {remedy} --fork NEWNAME")
        session.run.event("bad_step", step=step + 1, why=verdict, policy=policy, loss=_to_json(attempt.loss),
                          norm=_to_json(attempt.grad_norm), rows=session.rows(step))  # fmt: skip
        progress.skipped_steps = [*progress.skipped_steps, step]
        if policy == "rollback" and self._roll_back():
            self.say(f"step {step + 1}: {values}; back to step {progress.step}, and on without that batch")
            return StepResult("rolled_back")
        self.say(f"step {step + 1}: {values}; skipping that batch")
        return StepResult("skipped", attempt.loss, attempt.grad_norm)

    def _continue_after_bad_gradients(self, step: int, count: int) -> bool:
        """After an update in the backward, in which `count` parameters stayed as they were. False: the run went back to
        its last checkpoint."""
        progress, train = self.session.progress, self.session.config.train
        values = f"the gradients of {count} parameters are not finite"
        progress.bad_steps += 1
        if train.on_nan == "stop" or progress.bad_steps > train.max_bad_steps:
            rate = f"train.lr={float(train.lr) / 3:.1g}"
            raise RunFailed(
                f"step {step + 1}: {values}, so nothing more is saved; try a smaller rate: {rate} --fork NEWNAME"
            )
        self.session.run.event("bad_gradients", step=step + 1, parameters=count, policy=train.on_nan)
        if train.on_nan == "rollback":
            progress.skipped_steps = [*progress.skipped_steps, step]
            if self._roll_back():
                self.say(f"step {step + 1}: {values}; back to step {progress.step}, and on without that batch")
                return False
        self.say(f"step {step + 1}: {values}; these parameters are left unchanged")
        return True

    def check_weights(self) -> bool:
        """Whether all weights are finite, and may be saved. If not, the run goes back to its last checkpoint."""
        session, progress = self.session, self.session.progress
        if session.training_state.is_finite():
            return True
        self.stepper.discard()
        step = progress.step
        session.run.event("bad_weights", step=step)
        progress.bad_steps += 1
        if progress.bad_steps > session.config.train.max_bad_steps or not self._roll_back():
            raise RunFailed(
                f"step {step}: some weights are NaN or infinite, so nothing more is saved; try a smaller rate, "
                f"train.lr={float(session.config.train.lr) / 3:.1g}, from the last checkpoint: --fork NEWNAME"
            )
        self.say(f"warning: step {step}: some weights are NaN or infinite; back to step {progress.step}")
        return False

    def _roll_back(self) -> bool:
        """To the last checkpoint, if there is one. Bad and skipped steps stay noted."""
        session, progress = self.session, self.session.progress
        self.saver.finish()
        session.stepper.ranks.barrier()
        sync_checkpoint(session.run, session.stepper.ranks, self.say)
        newest = load_newest(session.run.checkpoints)
        if newest is None:
            return False
        bad_steps, skipped_steps = progress.bad_steps, progress.skipped_steps
        restored = session.training_state.restore(newest[0])
        for name in vars(restored):
            setattr(progress, name, getattr(restored, name))
        progress.bad_steps, progress.skipped_steps = bad_steps, skipped_steps
        session.stepper.ranks.seed_other_ranks(session.config.train.seed, progress.step)
        self.prefetcher.discard()
        self._discard()
        return True


def _to_json(value: float) -> float | str:
    """JSON has no NaN."""
    return value if abs(value) < float("inf") else str(value)
