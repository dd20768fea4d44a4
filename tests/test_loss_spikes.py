"""NaN losses and loss spikes: replayed, skipped, rolled back, or the end of the run, as set."""

import contextlib
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sojourn.errors import RunFailed, Stopped
from sojourn.storage.files import read_json
from sojourn.train.checkpoint.checkpoint import load_newest
from sojourn.train.distributed.engine import Engine
from sojourn.train.fault_tolerant_step import FaultTolerantStep
from sojourn.train.faults.loss_spikes import LOSS_WINDOW, check_loss, is_reproduced
from sojourn.train.step import Stepper
from tiny import LORA, events, losses, run_of, run_train, same_weights, saved_steps, stop_after, weights

DROPOUT = (*LORA, "method.dropout=0.3")

_numbers = st.floats(min_value=1e-3, max_value=1e3)


@given(
    st.lists(_numbers, max_size=LOSS_WINDOW), st.sampled_from([math.nan, math.inf, -math.inf]), _numbers, st.booleans()
)
def test_a_nan_or_infinite_loss_is_never_good(recent, loss, norm, scaled):
    assert check_loss(loss, norm, recent, scaled) == "not finite"


@given(st.lists(_numbers, max_size=31), _numbers, st.sampled_from([math.nan, math.inf]))
def test_an_infinite_gradient_is_normal_only_with_loss_scaling(recent, loss, norm):
    assert check_loss(loss, norm, recent, scaled=False) == "not finite"
    assert check_loss(loss, norm, recent, scaled=True) == "good"


@given(st.lists(_numbers, max_size=31), _numbers, _numbers)
def test_no_loss_is_a_spike_before_there_are_enough_recent_losses(recent, loss, norm):
    assert check_loss(loss, norm, recent, scaled=False) == "good"


@given(st.lists(_numbers, min_size=32, max_size=LOSS_WINDOW), _numbers, _numbers)
def test_a_loss_no_higher_than_a_recent_one_is_good(recent, loss, norm):
    middle = sorted(recent)[len(recent) // 2]
    assert check_loss(min(loss, middle), norm, recent, scaled=False) == "good"


@given(_numbers, st.integers(32, LOSS_WINDOW))
def test_a_steady_run_allows_for_some_noise_and_calls_the_rest_a_spike(usual, count):
    recent = [usual] * count
    assert check_loss(usual * 1.19, 1.0, recent, scaled=False) == "good"
    assert check_loss(usual * 1.21, 1.0, recent, scaled=False) == "spike"


@given(st.lists(st.floats(min_value=2.0, max_value=3.0), min_size=32, max_size=LOSS_WINDOW))
def test_however_noisy_the_run_a_loss_of_ten_times_the_usual_is_a_spike(recent):
    assert check_loss(30.0, 1.0, recent, scaled=False) == "spike"


@given(_numbers, _numbers, st.sampled_from([0.0, 1e-2]))
def test_a_replayed_step_is_the_same_if_loss_and_norm_are(loss, norm, within):
    assert is_reproduced((loss, norm), (loss, norm), within)
    assert is_reproduced((math.nan, norm), (math.inf, norm), within)
    assert not is_reproduced((loss, norm), (math.nan, norm), within)
    assert not is_reproduced((loss, math.inf), (loss, norm), within)
    assert not is_reproduced((loss, norm), (loss * 1.02, norm), within)
    assert is_reproduced((loss, norm), (loss * 1.005, norm), 1e-2) and not is_reproduced(
        (loss, norm), (loss * 1.005, norm), 0.0
    )


def _spoil(monkeypatch, wrong, into=math.nan):
    """The loss of a micro batch, and with it every gradient, comes out wrong whenever `wrong(step, time)` says so.

    `step` counts from 0; `time`: how often this step has been tried.
    """
    tried: dict[int, int] = {}
    at: list[int] = []
    gradients, loss_sum, real = Stepper.gradients, Stepper._loss_sum, FaultTolerantStep.step

    def seen(self, batches):
        step = at[-1]
        tried[step] = tried.get(step, 0) + 1
        return gradients(self, batches)

    def spoiled(*arguments):
        step = at[-1]
        return loss_sum(*arguments) * (into if wrong(step, tried[step]) else 1.0)

    def step(self):
        at.append(self.session.progress.step)
        return real(self)

    monkeypatch.setattr(FaultTolerantStep, "step", step)
    monkeypatch.setattr(Stepper, "gradients", seen)
    monkeypatch.setattr(Stepper, "_loss_sum", spoiled)
    return tried


@pytest.mark.parametrize(
    ("into", "kind"),
    [
        pytest.param(math.nan, DROPOUT, id="nan-lora with dropout"),
        pytest.param(math.inf, (), id="inf-pretrain"),
        pytest.param(math.nan, (), id="nan-pretrain", marks=pytest.mark.slow),
        pytest.param(math.inf, DROPOUT, id="inf-lora with dropout", marks=pytest.mark.slow),
    ],
)
def test_a_wrong_loss_that_is_right_when_replayed_changes_nothing_and_blames_the_hardware(
    tiny, monkeypatch, capsys, kind, into
):
    whole, words = tiny.whole(*kind), tiny.words(*kind)
    _spoil(monkeypatch, lambda step, time: step == 5 and time == 1, into)
    run = run_train(words)
    assert [event["step"] for event in events(run, "suspect_hardware")] == [6]
    assert "suspect the hardware" in capsys.readouterr().out
    assert losses(run) == losses(whole) and same_weights(run, whole)
    assert not events(run, "bad_step")


def test_a_batch_that_is_always_bad_is_skipped_and_named(tiny, monkeypatch):
    words = tiny.words()
    _spoil(monkeypatch, lambda step, time: step == 5)
    run = run_train(words)
    (event,) = events(run, "bad_step")
    assert (event["step"], event["why"], event["policy"], event["loss"]) == (6, "not finite", "skip", "nan")
    assert len(event["rows"]) == 8
    steps = [line["step"] for line in run.read_metrics() if line["kind"] == "train"]
    assert steps == [1, 2, 3, 4, 5, 7, 8, 9, 10, 11, 12] and run.status().state == "done"
    assert all(torch.isfinite(tensor).all() for tensor in weights(run).values())
    assert losses(run)[:5] == losses(tiny.whole())[:5]
    assert not events(run, "suspect_hardware")


def test_a_gradient_that_is_always_infinite_is_skipped_too(tiny, monkeypatch):
    words = tiny.words()
    real, calls = Engine.clip_grad_norm, []

    def breaks(self, most):
        calls.append(1)
        if len(calls) in (4, 5):
            self.optimizer.parameters[0].grad.fill_(torch.inf)
        return real(self, most)

    monkeypatch.setattr(Engine, "clip_grad_norm", breaks)
    run = run_train(words)
    (event,) = events(run, "bad_step")
    assert event["step"] == 4 and event["norm"] == "inf"
    assert all(torch.isfinite(tensor).all() for tensor in weights(run).values())


def test_rollback_returns_to_the_last_checkpoint_and_skips_the_batch_deterministically(tiny, monkeypatch):
    runs = []
    for _ in range(2):
        words = tiny.words("train.on_nan=rollback", "save.every_steps=4", "save.keep=9")
        with monkeypatch.context() as patch:
            tried = _spoil(patch, lambda step, time: step == 6)
            runs.append(run_train(words))
        assert [tried[step] for step in (3, 4, 5, 6, 7)] == [1, 2, 2, 2, 1]
    run = runs[0]
    assert [event["policy"] for event in events(run, "bad_step")] == ["rollback"]
    assert saved_steps(run) == [4, 8, 12] and run.status().state == "done"
    assert same_weights(*runs) and losses(runs[0]) == losses(runs[1])
    assert losses(run)[:6] == losses(tiny.whole())[:6]
    assert read_json(run.checkpoints / "step-00000008" / "state.json")["skipped_steps"] == [6]


def test_rollback_before_any_checkpoint_skips_the_batch(tiny, monkeypatch):
    words = tiny.words("train.on_nan=rollback")
    tried = _spoil(monkeypatch, lambda step, time: step == 2)
    run = run_train(words)
    assert tried[1] == 1 and tried[2] == 2 and run.status().state == "done"
    assert [line["step"] for line in run.read_metrics()][:3] == [1, 2, 4]


def test_stop_ends_the_run_and_saves_nothing_wrong(tiny, monkeypatch):
    words = tiny.words("train.on_nan=stop", "save.every_steps=4")
    _spoil(monkeypatch, lambda step, time: step == 6)
    with pytest.raises(RunFailed, match=r"step 7: the loss is nan.*try a smaller rate.*--fork NEWNAME") as error:
        run_train(words)
    run = run_of(words)
    assert "\n" not in str(error.value) and saved_steps(run) == [4]
    assert run.status().state == "failed" and run.status().resumable


@pytest.mark.parametrize("policy", ["skip", "rollback"])
def test_too_many_bad_steps_end_the_run(tiny, monkeypatch, policy):
    words = tiny.words(f"train.on_nan={policy}", "train.max_bad_steps=2", "save.every_steps=2")
    _spoil(monkeypatch, lambda step, time: step in (3, 5, 6))
    with pytest.raises(RunFailed, match=r"step 7: .*after 2 bad steps \(train.max_bad_steps\)"):
        run_train(words)
    assert len(events(run_of(words), "bad_step")) == 2


def test_how_many_steps_were_bad_survives_a_stop(tiny, monkeypatch):
    words = tiny.words("train.max_bad_steps=1")
    _spoil(monkeypatch, lambda step, time: step in (2, 8))
    with monkeypatch.context() as patch, pytest.raises(Stopped):
        stop_after(patch, 5)
        run_train(words)
    state = read_json(run_of(words).checkpoints / "step-00000005" / "state.json")
    assert (state["bad_steps"], state["skipped_steps"], len(state["recent_losses"])) == (1, [2], 4)
    with pytest.raises(RunFailed, match=r"step 9: .*after 1 bad steps"):
        run_train(words)


def test_a_stopped_run_with_bad_steps_ends_like_one_that_was_not_stopped(tiny, monkeypatch):
    one, other = tiny.words("save.every_steps=3"), tiny.words("save.every_steps=3")
    _spoil(monkeypatch, lambda step, time: step in (2, 4))
    whole = run_train(one)
    with monkeypatch.context() as patch, pytest.raises(Stopped):
        stop_after(patch, 5)
        run_train(other)
    cut = run_train(other)
    assert same_weights(cut, whole) and losses(cut) == losses(whole)


LONG = ("train.steps=40", "train.lr=1e-4", "log.every_steps=1")


def _spike(monkeypatch, at=36):
    return _spoil(monkeypatch, lambda step, time: step == at, into=100.0)


def test_a_spike_is_kept_by_default_and_named(tiny, monkeypatch, capsys):
    words = tiny.words(*LONG)
    _spike(monkeypatch)
    run = run_train(words)
    (event,) = events(run, "spike")
    assert event["step"] == 37 and len(event["rows"]) == 8 and event["loss"] > 100
    assert "to skip such batches: train.on_spike=skip" in capsys.readouterr().out
    assert len(losses(run)) == 40 and max(losses(run)) == event["loss"]


def test_a_spike_is_skipped_or_rolled_back_if_set(tiny, monkeypatch):
    results = {}
    for policy in ("skip", "rollback"):
        words = tiny.words(*LONG, f"train.on_spike={policy}", "save.every_steps=34", "save.keep=9")
        with monkeypatch.context() as patch:
            tried = _spike(patch)
            run = results[policy] = run_train(words)
        (event,) = events(run, "bad_step")
        assert (event["step"], event["why"], event["policy"]) == (37, "spike", policy)
        assert (tried[34], tried[36]) == ((1, 2) if policy == "skip" else (2, 2))
        assert len(losses(run)) == 39 and max(losses(run)[1:]) < 10
    assert same_weights(*results.values())  # no dropout: replayed steps are identical


def test_a_spike_that_becomes_nan_when_replayed_is_not_kept(tiny, monkeypatch):
    words = tiny.words(*LONG)
    inner, calls = Stepper._loss_sum, []

    def worse(*arguments):
        calls.append(1)
        return inner(*arguments) * {37: 100.0, 38: math.nan}.get(len(calls), 1.0)

    monkeypatch.setattr(Stepper, "_loss_sum", worse)
    run = run_train(words)
    assert [event["step"] for event in events(run, "suspect_hardware")] == [37]
    assert [event["why"] for event in events(run, "bad_step")] == ["not finite"]
    assert all(torch.isfinite(tensor).all() for tensor in weights(run).values())


def test_running_out_of_memory_while_a_bad_step_is_replayed_is_no_bad_step(tiny, monkeypatch):
    whole, words = tiny.whole(), tiny.words()
    _spoil(monkeypatch, lambda step, time: step == 5 and time == 1)
    inner, calls = Stepper._loss_sum, []

    def tight(*arguments):
        calls.append(1)
        if len(calls) == 7:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return inner(*arguments)

    monkeypatch.setattr(Stepper, "_loss_sum", tight)
    run = run_train(words)
    assert events(run, "out_of_memory") and not events(run, "bad_step")
    assert losses(run) == pytest.approx(losses(whole), rel=1e-6)


@pytest.mark.parametrize(
    ("policy", "bad"),  # step 5 lies between two saves, 6 just before one
    [
        ("skip", 5), ("rollback", 6), ("stop", 5),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("skip", 6), ("rollback", 5), ("stop", 6))),
    ],
)  # fmt: skip
def test_corrupt_weights_are_never_saved_and_no_batch_is_blamed(tiny, monkeypatch, policy, bad):
    """A bit flips in the optimizer step: its loss was good, and every later one is NaN."""
    words = tiny.words("save.every_steps=2", "save.keep=1", "train.max_bad_steps=2", f"train.on_nan={policy}")
    real, made = Stepper.update, []

    def update(self):
        real(self)
        made.append(1)
        if len(made) == bad:
            with torch.no_grad():
                self.optimizer.parameters[0].fill_(math.nan)

    with monkeypatch.context() as patch:
        patch.setattr(Stepper, "update", update)
        with contextlib.suppress(RunFailed):
            run_train(words)
    run = run_of(words)
    found, _ = load_newest(run.checkpoints)
    assert found.step >= 4 and all(torch.isfinite(tensor).all() for tensor in found.model.values())
    if run.status().state != "done":
        run_train(words)
    assert all(torch.isfinite(tensor).all() for tensor in weights(run).values())
    assert same_weights(run, tiny.whole())  # nothing was wrong with any batch
