"""One step that memory running out, wrong numbers and a stop in its midst cannot spoil.

Until the update nothing has changed, so the gradients of a step can be thrown away and made again: with fewer rows at a
time when memory ran out, and once more when the result looks wrong. A fault of the machine rarely strikes twice in the
same place; a bad batch does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from sojourn.data.artefact import Batch
from sojourn.errors import RunFailed
from sojourn.launch.verdict import RestartNeeded
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
    free_memory,
    is_oom,
    next_fallback,
    save_fallback,
)
from sojourn.train.session import Session
from sojourn.train.step import SpeculativeStep

_EXACT = {"cpu": 0.0}
_GPU_NOISE = 1e-2  # sums on a GPU come out in another order each time

T = TypeVar("T")


@dataclass(frozen=True)
class Done:
    """A step's loss and gradient norm, its real tokens, and the seconds that it waited for data."""

    loss: float
    norm: float
    tokens: int
    waited: float
    skipped: bool = False


@dataclass
class FaultTolerantStep:
    session: Session
    guard: Guard
    saver: Saver
    ahead: Prefetcher
    say: Say
    begun: SpeculativeStep | None = None

    def step(self) -> Done | None:
        """The next global step. None: the run went back to its last checkpoint instead."""
        progress, stepper = self.session.progress, self.session.stepper
        step, random = progress.step, get_rng_state()
        if step in progress.skipped_steps:
            return Done(float("nan"), float("nan"), 0, 0.0, skipped=True)
        try:
            with self.guard.interruptible(self.guard.step_seconds):
                batches, waited = self._taken(step)
            found, done = self._computed(batches, random)
            if self._judged(found) != "good":
                self._drop()
                found = self._again(found, random)
                verdict = self._judged(found)
                if verdict == "spike" and self.session.config.train.on_spike == "keep":
                    self._spike(found)
                elif verdict == "not finite" and not self.sound():
                    return None
                elif verdict != "good":
                    return self._without(step, verdict, found)
        except (Interrupted, OomFallback, NoFallbackLeft):
            self._drop()
            set_rng_state(random)
            raise
        if not done:
            self._changing(stepper.update)
        progress.recent_losses = [*progress.recent_losses, found[0]][-LOSS_WINDOW:]
        return Done(*found, self.session.tokens(step), waited)

    def _taken(self, step: int) -> tuple[list[Batch], float]:
        begun = self.begun
        if begun is not None and (begun.step, begun.micro_batch) == (step, self.session.stepper.batcher.micro_batch):
            return begun.batches, begun.data_wait
        if begun is not None:
            self._drop()
        return self.ahead.take(step)

    def _computed(self, batches: list[Batch], random: dict[str, Any]) -> tuple[tuple[float, float], bool]:
        """Loss and norm, and whether the weights have changed already.

        Where the device itself can see if a step is good, it is told to go on at once, with the update and with the
        next step, and the answer is read while it works. Until then signals wait: saving would have to wait as well.
        """
        stepper = self.session.stepper
        if self.session.config.advanced.async_step == "off" or not stepper.engine.supports_async_step:
            return self._gradients(batches, random, stepper.gradients), False
        found = self._gradients(batches, random, lambda given: stepper.launch_gradients(given, self.begun))
        self.begun = None
        most = spike_threshold(self.session.progress.recent_losses)
        answer = self._changing(lambda: stepper.update_if_good(found, most))
        self._begin_next()
        loss, norm, changed = answer.read()
        return (loss, norm), bool(changed)

    def _begin_next(self) -> None:
        """The next step's first forward pass. Not where chance plays a part: its numbers are drawn in the order of
        steps that are known to be good."""
        session, stepper = self.session, self.session.stepper
        step = session.progress.step + 1
        if stepper.network.has_dropout or step >= session.total or step in session.progress.skipped_steps:
            return
        if not self.ahead.has(step):
            return
        batches, waited = self.ahead.take(step)
        part = None
        try:
            part = stepper.speculative_forward(batches)
        except RuntimeError as error:
            if not is_oom(error):
                raise
        self.begun = SpeculativeStep(step, batches, waited, stepper.batcher.micro_batch, part)

    def put_down(self) -> None:
        """Frees the memory of what is begun, for work between steps."""
        if self.begun is not None:
            self.begun = replace(self.begun, loss_share=None)
            self.session.stepper.discard()

    def make_room(self) -> None:
        """For passes of another kind: recordings hold the memory of a pass, and are soon made again."""
        if self.session.stepper.cuda_graphs is not None:
            self.session.stepper.cuda_graphs.release()

    def _drop(self) -> None:
        """What is begun, with gradients that it may have made already."""
        self.begun = None
        self.session.stepper.discard()

    def _changing(self, work: Callable[[], T]) -> T:
        """Work that changes the weights, and may have changed some of them when memory runs out."""
        try:
            return work()
        except (RuntimeError, MemoryError) as error:
            if not is_oom(error):
                raise
            why = str(error)
        raise self._down(True, why) or RuntimeError(why)  # outside, since the error holds on to memory

    def rehearse(self) -> None:
        """The longest rows there are, forward and back, before anything is paid for; then as if nothing had been."""
        rows = self.session.artefact.train
        random, batcher = get_rng_state(), self.session.stepper.batcher
        longest = np.argsort(-np.diff(rows.rows), kind="stable")
        compute = self.session.stepper.gradients
        self._gradients([], random, compute, lambda: list(batcher.batches(rows, longest[: batcher.micro_batch])))
        self.session.stepper.discard()
        set_rng_state(random)
        if batcher.device == "cuda":
            free_memory()

    def retried(self, work: Callable[[], T], usual: float | None = None) -> T:
        """Work that changes nothing, with fewer rows at a time if memory runs out."""
        while True:
            try:
                with self.guard.interruptible(usual):
                    return work()
            except (RuntimeError, MemoryError) as error:
                if not is_oom(error):
                    raise
                why = str(error)
            down = self._down(False, why)  # outside, since the error holds on to the memory of where it happened
            if down is not None:
                raise down

    def ease(self, why: str) -> None:
        """Gives up recordings, or takes fewer rows at a time, before memory really runs out."""
        if self.session.stepper.engine.syncs_every_micro_batch:
            return
        if self.session.stepper.has_cuda_graphs or self.session.stepper.batcher.micro_batch > 1:
            down = self._down(False, why)
            if down is not None:
                raise down

    def _gradients(
        self,
        batches: list[Batch],
        random: dict[str, Any],
        compute: Callable[[list[Batch]], T],
        read: Callable[[], list[Batch]] | None = None,
    ) -> T:
        session, step = self.session, self.session.progress.step
        read = read or (lambda: session.batches(step))
        cut = session.stepper.batcher.micro_batch if batches else None

        def make() -> T:
            nonlocal batches, cut
            if cut != session.stepper.batcher.micro_batch:  # a rung was taken: cut the same rows into smaller pieces
                session.stepper.discard()
                set_rng_state(random)
                batches, cut = read(), session.stepper.batcher.micro_batch
            return compute(batches)

        return self.retried(make, self.guard.step_seconds)

    def _down(self, in_update: bool, why: str) -> OomFallback | None:
        """Takes the next rung. Fewer rows at a time need nothing more; anything else has the run built anew."""
        session = self.session
        batcher = session.stepper.batcher
        train = session.config.train.model_copy(update={"micro_batch": batcher.micro_batch})
        rung = next_fallback(
            session.config.model_copy(update={"train": train}), in_update, session.stepper.has_cuda_graphs
        )
        step, says = session.progress.step + 1, why.strip().split("\n")[0][:200]
        if rung is None:
            raise NoFallbackLeft(
                f"step {step}: out of memory with everything given up that can be ({says}); use a GPU with more "
                "memory, a shorter data.max_length, or method.kind=qlora in a new run: name=NEW",
                clean=not in_update,
            )
        syncs_every_micro_batch = session.stepper.engine.syncs_every_micro_batch
        if syncs_every_micro_batch or session.run.is_main_process:
            save_fallback(session.run, rung, session.device_name)
        session.run.event("out_of_memory", step=step, message=says, now=rung)
        if syncs_every_micro_batch:  # the others wait for this process in the midst of a pass
            raise RestartNeeded(f"step {step}: out of memory ({says}); restarting with {format_fallback(rung)}")
        self.say(f"step {step}: memory is short ({says}); going on with {format_fallback(rung)}")
        self._drop()
        self.make_room()
        if set(rung) != {"train.micro_batch"} or in_update:
            return OomFallback(rung, clean=not in_update)
        batcher.micro_batch = rung["train.micro_batch"]
        self.ahead.discard()
        free_memory()
        return None

    def _judged(self, found: tuple[float, float]) -> LossVerdict:
        return check_loss(*found, self.session.progress.recent_losses, self.session.stepper.engine.uses_loss_scaling)

    def _again(self, found: tuple[float, float], random: dict[str, Any]) -> tuple[float, float]:
        """Does a suspicious step once more, with the same random numbers; another result says much of the machine."""
        session, stepper = self.session, self.session.stepper
        stepper.discard()
        set_rng_state(random)
        again = self._gradients(session.batches(session.progress.step), random, stepper.gradients)
        if not is_reproduced(found, again, _EXACT.get(stepper.batcher.device, _GPU_NOISE)):
            step = session.progress.step + 1
            session.run.event("suspect_hardware", step=step, loss=_text(found[0]), again=_text(again[0]))
            self.say(
                f"warning: step {step} came out as {found[0]:.4g} and, done again, as {again[0]:.4g}: suspect the "
                "hardware (memory errors, heat); if this comes again, use another machine"
            )
        return again

    def _spike(self, found: tuple[float, float]) -> None:
        step = self.session.progress.step
        self.session.run.event("spike", step=step + 1, loss=_text(found[0]), rows=self.session.rows(step))
        self.say(f"note: step {step + 1}: a spike, loss {found[0]:.4f} (train.on_spike=skip leaves such batches out)")

    def _without(self, step: int, verdict: LossVerdict, found: tuple[float, float]) -> Done | None:
        """Goes on without this batch, here or from the last checkpoint, as the policy says."""
        session = self.session
        progress, train, stepper = session.progress, session.config.train, session.stepper
        stepper.discard()
        policy = train.on_nan if verdict == "not finite" else train.on_spike
        what = f"the loss is {found[0]:.4g}, the gradient's norm {found[1]:.4g}"
        progress.bad_steps += 1
        if policy == "stop" or progress.bad_steps > train.max_bad_steps:
            scaled = stepper.engine.uses_loss_scaling
            try_this = "train.precision=fp32" if scaled else f"a smaller rate: train.lr={float(train.lr) / 3:.1g}"
            often = "" if policy == "stop" else f", after {train.max_bad_steps} bad steps (train.max_bad_steps)"
            raise RunFailed(f"step {step + 1}: {what}{often}, so nothing more is saved; try {try_this} --fork NEWNAME")
        session.run.event("bad_step", step=step + 1, why=verdict, policy=policy, loss=_text(found[0]),
                          norm=_text(found[1]), rows=session.rows(step))  # fmt: skip
        progress.skipped_steps = [*progress.skipped_steps, step]
        if policy == "rollback" and self._go_back():
            self.say(f"step {step + 1}: {what}; back to step {progress.step}, and on without that batch")
            return None
        self.say(f"step {step + 1}: {what}; going on without that batch")
        return Done(*found, 0, 0.0, skipped=True)

    def sound(self) -> bool:
        """Whether the weights can be saved. Ones that are no numbers must not replace good ones: the run goes back."""
        session, progress = self.session, self.session.progress
        if session.training_state.is_finite():
            return True
        session.stepper.discard()
        step = progress.step
        session.run.event("bad_weights", step=step)
        progress.bad_steps += 1
        if progress.bad_steps > session.config.train.max_bad_steps or not self._go_back():
            raise RunFailed(
                f"step {step}: some weights are no longer numbers, so nothing more is saved; try a smaller rate, "
                f"train.lr={float(session.config.train.lr) / 3:.1g}, from the last checkpoint: --fork NEWNAME"
            )
        self.say(f"warning: step {step}: some weights are no longer numbers; back to step {progress.step}")
        return False

    def _go_back(self) -> bool:
        session = self.session
        self.saver.finish()
        session.stepper.ranks.barrier()
        sync_checkpoint(session.run, session.stepper.ranks, self.say)
        newest = load_newest(session.run.checkpoints)
        if newest is None:
            return False
        progress, kept = session.progress, (session.progress.bad_steps, session.progress.skipped_steps)
        before = session.training_state.restore(newest[0])
        for name in vars(before):
            setattr(progress, name, getattr(before, name))
        progress.bad_steps, progress.skipped_steps = kept
        session.stepper.ranks.seed_other_ranks(session.config.train.seed, progress.step)
        self.ahead.discard()
        self._drop()
        return True


def _text(value: float) -> float | str:
    """JSON has no NaN."""
    return value if abs(value) < float("inf") else str(value)
