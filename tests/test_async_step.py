"""Async steps: launched before the loss of the step before is read; the same losses, and as safe."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sojourn.errors import Stopped
from sojourn.train import step as step_module
from sojourn.train.batcher import Prefetcher
from sojourn.train.distributed import open as engines
from sojourn.train.fault_tolerant_step import FaultTolerantStep
from sojourn.train.optim.optimizers import Optimizer
from tiny import LORA, events, losses, run_train, same_weights, stop_after, weights

AHEAD = "advanced.async_step=on"
DROPOUT = (*LORA, "method.dropout=0.3")


@pytest.fixture
def ahead(tiny, monkeypatch):
    """The CPU's AdamW has the same kernel as the GPU's. Returns the speculative steps."""
    for kind in ((), LORA, DROPOUT):
        tiny.whole(*kind)  # steps one after another, to compare with
    monkeypatch.setattr(engines, "has_cpu_kernels", lambda model: False)  # as on a GPU: torch's fused AdamW
    monkeypatch.setattr(Optimizer, "fuses_clipping", property(lambda self: bool(self.torch.defaults.get("fused"))))
    monkeypatch.setattr(Prefetcher, "has", lambda self, step: self._next is not None and self._next[0] == step)
    launched, real = [], FaultTolerantStep._launch_speculative_step

    def launch(self, step):
        real(self, step)
        if self.speculative is not None:
            launched.append(self.speculative.step)

    monkeypatch.setattr(FaultTolerantStep, "_launch_speculative_step", launch)
    return launched


@pytest.mark.parametrize("kind", [(), LORA], ids=["pretrain", "lora"])
def test_async_steps_have_the_losses_of_synchronous_steps(tiny, ahead, kind):
    run = run_train(tiny.words(*kind, AHEAD))
    assert losses(run) == pytest.approx(losses(tiny.whole(*kind)), rel=1e-6)
    assert ahead == list(range(2, 12))  # before the first there are no optimizer states yet


def test_dropout_disables_speculative_steps(tiny, ahead):
    run = run_train(tiny.words(*DROPOUT, AHEAD))
    assert losses(run) == pytest.approx(losses(tiny.whole(*DROPOUT)), rel=1e-6) and not ahead


def test_a_run_that_was_stopped_ends_with_the_same_weights(tiny, ahead, monkeypatch):
    whole, words = run_train(tiny.words(AHEAD)), tiny.words(AHEAD, "save.every_steps=4")
    with monkeypatch.context() as patch, pytest.raises(Stopped):
        stop_after(patch, 6)
        run_train(words)
    run = run_train(words)
    assert losses(run) == losses(whole) and same_weights(run, whole)


def _spoil(monkeypatch, tiny, times, into):
    """The loss of the sixth step's rows comes out wrong so many times."""
    rows, real, calls = [], step_module.Stepper._loss_sum, []

    def spoiled(self, batch):
        rows.append(batch.ids.tobytes())
        return real(self, batch)

    monkeypatch.setattr(step_module.Stepper, "_loss_sum", spoiled)
    run_train(tiny.words(AHEAD, "train.rehearse=off"))
    wrong = rows[len(rows) // 12 * 5]

    def spoiled(self, batch):
        if batch.ids.tobytes() == wrong:
            calls.append(1)
        bad = batch.ids.tobytes() == wrong and len(calls) <= times
        return real(self, batch) * (into if bad else 1.0)

    monkeypatch.setattr(step_module.Stepper, "_loss_sum", spoiled)
    return calls


@pytest.mark.parametrize("into", [math.nan, math.inf], ids=str)
def test_a_wrong_loss_changes_no_weight_and_the_step_is_replayed(tiny, ahead, monkeypatch, into):
    whole = tiny.whole()
    _spoil(monkeypatch, tiny, 1, into)
    run = run_train(tiny.words(AHEAD, "train.rehearse=off"))
    assert [event["step"] for event in events(run, "suspect_hardware")] == [6] and not events(run, "bad_step")
    assert losses(run) == pytest.approx(losses(whole), rel=1e-6)
    assert all(torch.isfinite(tensor).all() for tensor in weights(run).values())


def test_a_batch_that_is_always_bad_is_skipped(tiny, ahead, monkeypatch):
    _spoil(monkeypatch, tiny, 99, math.nan)
    run = run_train(tiny.words(AHEAD, "train.rehearse=off"))
    (event,) = events(run, "bad_step")
    assert event["step"] == 6 and run.status().state == "done"
    assert all(torch.isfinite(tensor).all() for tensor in weights(run).values())


def test_running_out_of_memory_in_a_speculative_step_costs_a_fallback_and_nothing_else(tiny, ahead, monkeypatch):
    whole = tiny.whole()
    real, calls = step_module.Stepper._loss_sum, []

    def tight(self, batch):
        calls.append(len(batch.ids))
        if len(calls) >= 8 and len(batch.ids) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return real(self, batch)

    monkeypatch.setattr(step_module.Stepper, "_loss_sum", tight)
    run = run_train(tiny.words(AHEAD))
    assert events(run, "out_of_memory") and run.status().state == "done"
    assert losses(run) == pytest.approx(losses(whole), rel=1e-5)


class _Synchronizations(TorchDispatchMode):
    """Counts reads of a value from the device."""

    count = 0

    def __torch_dispatch__(self, operation, kinds, given=(), named=None):
        type(self).count += "_local_scalar_dense" in str(operation)
        return operation(*given, **(named or {}))


def test_launching_work_never_synchronizes_with_the_device(tiny, ahead, monkeypatch):
    monkeypatch.setattr(_Synchronizations, "count", 0)
    for name in ("launch_gradients", "update_if_good", "speculative_forward"):
        real = getattr(step_module.Stepper, name)

        def watched(self, *given, real=real):
            with _Synchronizations():
                return real(self, *given)

        monkeypatch.setattr(step_module.Stepper, name, watched)
    run_train(tiny.words(AHEAD, "train.rehearse=off"))
    assert ahead and not _Synchronizations.count


@pytest.mark.skipif(not torch.cuda.is_available(), reason="only a GPU answers while it works")
def test_an_async_read_does_not_wait_for_work_launched_after_it():
    answer = step_module.AsyncRead(torch.tensor([1.5, 2.0], device="cuda") * 2)
    torch.cuda._sleep(2_000_000_000)  # cycles: about a second
    assert answer.read() == [3.0, 4.0] and not torch.cuda.current_stream().query()
    torch.cuda.synchronize()


@pytest.mark.parametrize("how", ["selective", "full"])
def test_activation_checkpointing_recomputes_with_the_same_dropout_masks(tiny, how):
    run = run_train(tiny.words(*DROPOUT, f"train.activation_checkpointing={how}"))
    assert losses(run) == pytest.approx(losses(tiny.whole(*DROPOUT)), rel=1e-5)
