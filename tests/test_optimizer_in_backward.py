"""`train.optimizer_in_backward` and `train.master_weights` in whole runs: results, faults, resuming."""

import math
import os
import signal

import pytest
import torch

from sojourn.config.load import load_run
from sojourn.errors import RunFailed, Stopped, UserError
from sojourn.storage.files import read_json
from sojourn.train.distributed.in_backward import InBackward
from sojourn.train.optim import low_memory_adamw
from sojourn.train.optim.low_memory_adamw import LowMemoryAdamW
from sojourn.train.step import Stepper
from tiny import events, losses, run_train, same_weights, stop_after, weights

pytestmark = pytest.mark.filterwarnings("ignore:mkldnn", "ignore:.*bf16")
FULL = ("method.kind=full", "train.lr=1e-3", "train.clip=0", "train.micro_batch=8", "train.steps=6",
        "advanced.cpu_kernels=off")  # fmt: skip
IN_BACKWARD = (*FULL, "train.optimizer_in_backward=on")
TWO_ROWS = ("train.precision=bf16", "train.global_batch=2", "train.micro_batch=2", "train.steps=4")  # slow on a CPU
BF16 = (*FULL, *TWO_ROWS, "train.master_weights=bf16")


def _host_states_of_small_models(monkeypatch):
    monkeypatch.setattr(low_memory_adamw, "MIN_HOST_ELEMENTS", 4096)
    monkeypatch.setattr(low_memory_adamw, "host_buffers", lambda *given: (2048, 5))


def test_updates_in_the_backward_are_the_updates_after_it(tiny):
    apart, inside = tiny.whole(*FULL), tiny.whole(*IN_BACKWARD)
    assert losses(apart) == losses(inside) and same_weights(apart, inside)
    norms = [[line["grad_norm"] for line in run.read_metrics() if line["kind"] == "train"] for run in (apart, inside)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5) and min(norms[0]) > 0


def test_tied_embeddings_are_updated_once_with_the_whole_gradient(tiny):
    words = ("train.clip=0", "train.micro_batch=8", "train.steps=3", "advanced.cpu_kernels=off",
             "model.tie_embeddings=true")  # fmt: skip
    apart, inside = (run_train(tiny.words(*words, *more)) for more in ((), ("train.optimizer_in_backward=on",)))
    assert losses(apart) == losses(inside) and same_weights(apart, inside)


def test_no_more_than_one_gradient_exists_at_a_time(tiny, monkeypatch):
    real, most = InBackward._apply, []

    def counted(self, parameter):
        most.append(sum(p.grad is not None for p in self.optimizer.parameters))
        real(self, parameter)

    monkeypatch.setattr(InBackward, "_apply", counted)
    run_train(tiny.words(*IN_BACKWARD, "train.steps=2"))
    assert max(most) == 1


@pytest.mark.parametrize("masters", ["bf16", pytest.param("bf16_kahan", marks=pytest.mark.slow)])
def test_bf16_weights_train_as_fp32_weights_do(tiny, masters, monkeypatch):
    _host_states_of_small_models(monkeypatch)
    fp32 = tiny.whole(*FULL, *TWO_ROWS)
    small = ("train.optimizer=paged_adamw_8bit", "train.optimizer_in_backward=on", f"train.master_weights={masters}")
    found = run_train(tiny.words(*BF16, *small, "train.activation_checkpointing=full"))
    assert losses(found)[-1] < losses(found)[0] - 0.05
    assert losses(found) == pytest.approx(losses(fp32), rel=0.01)
    assert {tensor.dtype for tensor in weights(found).values()} == {torch.bfloat16}
    assert read_json(found.final / "config.json")["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    "words",
    [pytest.param(("train.master_weights=bf16",), marks=pytest.mark.slow),
     ("train.master_weights=bf16_kahan", "train.optimizer=paged_adamw_8bit", "train.optimizer_in_backward=on"),
     pytest.param(("train.master_weights=bf16_kahan", "train.offload=optimizer"), marks=pytest.mark.slow)],
    ids=["bf16", "kahan 8-bit in backward", "kahan offloaded"],
)  # fmt: skip
def test_a_resumed_run_is_the_same_run(tiny, monkeypatch, words):
    _host_states_of_small_models(monkeypatch)
    words = tiny.words(*BF16, *words)
    whole = run_train(words)
    again = [*words, f"name={whole.path.name}-again"]
    with monkeypatch.context() as patch, pytest.raises(Stopped):
        stop_after(patch, 2)
        run_train(again)
    resumed = run_train(again)
    assert losses(whole) == losses(resumed) and same_weights(whole, resumed)


def test_a_checkpoint_has_bf16_weights_and_the_compensation(tiny):
    from sojourn.train.checkpoint.checkpoint import load_newest

    run = run_train(tiny.words(*BF16, "train.master_weights=bf16_kahan", "train.steps=2"))
    checkpoint = load_newest(run.checkpoints)[0]
    assert {tensor.dtype for tensor in checkpoint.model.values() if tensor.is_floating_point()} == {torch.bfloat16}
    kinds = {name.rsplit("/", 1)[1] for name in checkpoint.optimizer}
    assert kinds == {"step", "exp_avg", "exp_avg_sq", "compensation"}


def _spoil_loss(monkeypatch, at):
    """The loss of this call of a forward, counted from 0, is not a number."""
    real, calls = Stepper._loss_sum, []

    def spoiled(self, batch):
        calls.append(1)
        loss = real(self, batch)
        return loss * math.nan if len(calls) - 1 in at else loss

    monkeypatch.setattr(Stepper, "_loss_sum", spoiled)


def test_a_nan_loss_is_seen_before_anything_changes(tiny, monkeypatch):
    _spoil_loss(monkeypatch, {3})
    run = run_train(tiny.words(*IN_BACKWARD))
    assert events(run, "suspect_hardware") and same_weights(run, tiny.whole(*IN_BACKWARD))


def test_a_batch_whose_loss_stays_nan_is_skipped(tiny, monkeypatch):
    _spoil_loss(monkeypatch, {3, 4})
    run = run_train(tiny.words(*IN_BACKWARD))
    assert [event["why"] for event in events(run, "bad_step")] == ["not finite"]
    assert not same_weights(run, tiny.whole(*IN_BACKWARD)) and len(losses(run)) == 5


def _spoil_gradient(monkeypatch, at):
    real, calls = InBackward._apply, []

    def spoiled(self, parameter):
        if parameter is self.optimizer.parameters[0]:
            calls.append(1)
            if len(calls) in at:
                parameter.grad.fill_(math.inf)
        real(self, parameter)

    monkeypatch.setattr(InBackward, "_apply", spoiled)


def test_a_gradient_that_is_not_finite_leaves_its_parameter_and_is_counted(tiny, monkeypatch, capsys):
    _spoil_gradient(monkeypatch, {3})
    run = run_train(tiny.words(*IN_BACKWARD))
    assert [event["parameters"] for event in events(run, "bad_gradients")] == [1]
    assert "the gradients of 1 parameters are not finite" in capsys.readouterr().out
    assert all(tensor.isfinite().all() for tensor in weights(run).values()) and len(losses(run)) == 6


def test_a_gradient_that_is_not_finite_goes_back_or_ends_the_run_where_set(tiny, monkeypatch):
    _spoil_gradient(monkeypatch, {3})
    with pytest.raises(RunFailed, match="gradients of 1 parameters are not finite"):
        run_train(tiny.words(*IN_BACKWARD, "train.on_nan=stop"))
    _spoil_gradient(monkeypatch, {3})
    run = run_train(tiny.words(*IN_BACKWARD, "train.on_nan=rollback", "save.every_steps=2"))
    assert events(run, "bad_gradients") and len(losses(run)) >= 5


def test_memory_that_runs_out_in_the_backward_goes_back_to_the_last_checkpoint(tiny, monkeypatch):
    real, calls = LowMemoryAdamW.update, []

    def tight(self, *given):
        calls.append(1)
        if len(calls) == 100:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        real(self, *given)

    monkeypatch.setattr(LowMemoryAdamW, "update", tight)
    run = run_train(tiny.words(*IN_BACKWARD, "save.every_steps=2"))
    (event,) = events(run, "out_of_memory")
    assert event["now"] == {"train.activation_checkpointing": "selective"}
    started = [event["step"] for event in events(run, "start")]
    assert started[0] == 0 and started[1] > 0 and started[1] == (event["step"] - 1) // 2 * 2
    assert losses(run)[-1] == pytest.approx(losses(tiny.whole(*IN_BACKWARD))[-1], rel=1e-5)


def test_a_signal_in_the_backward_waits_for_the_end_of_the_step(tiny, monkeypatch):
    real, calls = LowMemoryAdamW.update, []

    def signalled(self, *given):
        calls.append(1)
        if len(calls) == 50:
            os.kill(os.getpid(), signal.SIGTERM)
        real(self, *given)

    words = tiny.words(*IN_BACKWARD, "limits.grace=1")
    with monkeypatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(LowMemoryAdamW, "update", signalled)
        run_train(words)
    assert len(calls) % 50 != 0  # the backward went on
    assert same_weights(run_train(words), tiny.whole(*IN_BACKWARD))


def test_the_rehearsed_backward_changes_nothing(tiny):
    run = run_train(tiny.words(*IN_BACKWARD, "train.rehearse=on"))
    assert same_weights(run, tiny.whole(*IN_BACKWARD))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("train.optimizer_in_backward=on", "set train.clip=0"),
        ("train.optimizer_in_backward=on train.clip=0 train.micro_batch=4", "set train.micro_batch=8"),
        ("train.optimizer_in_backward=on train.clip=0 train.optimizer=muon", "muon updates several matrices at once"),
        ("train.optimizer_in_backward=on train.clip=0 train.precision=fp16 train.device=cuda", "use bf16"),
        ("train.optimizer_in_backward=on train.clip=0 train.cuda_graphs=on", "set train.cuda_graphs=off"),
        ("train.optimizer_in_backward=on train.clip=0 parallel.engine=ddp", "is for one GPU"),
        ("train.optimizer_in_backward=on train.clip=0 parallel.nodes=2 parallel.master=a", "is for one GPU"),
        ("train.master_weights=bf16 train.precision=fp32", "needs train.precision=bf16"),
        ("train.master_weights=bf16 train.optimizer=muon", "needs adamw or adamw_8bit"),
        ("train.master_weights=bf16 method.kind=lora", "is for method.kind=full, but it is lora"),
        ("train.master_weights=bf16_kahan parallel.engine=fsdp", "use parallel.engine=single or ddp"),
        ("train.master_weights=bf16 train.offload=all", "and not offload=all"),
    ],
)
def test_what_cannot_be_combined_is_one_line(tiny, words, message):
    base = ["model.base=x", "method.kind=full", "train.steps=1", "train.global_batch=8", "data.sources=y"]
    with pytest.raises(UserError, match=message) as refused:
        load_run([*base, *words.split()])
    assert "\n" not in str(refused.value)


def test_a_device_without_bf16_refuses_bf16_weights(tiny, monkeypatch):
    monkeypatch.setattr("sojourn.machine.precision.cpu_bf16_feature", lambda: None)
    with pytest.raises(UserError, match=r"needs train.precision=bf16, but here it is fp32"):
        run_train([w for w in tiny.words(*BF16, "train.precision=auto") if w != "train.precision=fp32"])


def test_resuming_with_other_master_weights_is_refused(tiny):
    words = tiny.words(*BF16, "train.steps=2")
    run_train(words)
    with pytest.raises(UserError, match="master_weights was"):
        run_train([*words, "train.master_weights=bf16_kahan"])
