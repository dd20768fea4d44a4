"""Memory that runs out, anywhere: the run goes on one rung down, and nothing of its result changes but rounding."""

import pytest
import torch

from sojourn.errors import RunFailed, Stopped
from sojourn.model import loss as model_loss
from sojourn.storage.files import read_json, write_json
from sojourn.train.batcher import Batcher, DeviceBatch
from sojourn.train.distributed import open as open_module
from sojourn.train.faults.memory_pressure import MemoryPressure
from sojourn.train.optim.optimizers import Optimizer
from sojourn.train.step import Stepper
from tiny import LORA, events, losses, run_of, run_train, same_weights, saved_steps, stop_after, weights

PRETRAIN: tuple[str, ...] = ()
DROPOUT = (*LORA, "method.dropout=0.3")


def _full():
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def _rows_seen(monkeypatch):
    """The rows of each micro batch that goes to the device."""
    real, rows = Batcher.to_device, []

    def seen(self, batch):
        rows.append(len(batch.ids))
        return real(self, batch)

    monkeypatch.setattr(Batcher, "to_device", seen)
    return rows


def _forward(monkeypatch, full):
    """Memory runs out in a forward pass whenever `full(rows, call)` says so."""
    real, calls = Stepper._loss_sum, []

    def tight(self, batch):
        calls.append(len(batch.ids))
        if full(len(batch.ids), len(calls)):
            raise _full()
        return real(self, batch)

    monkeypatch.setattr(Stepper, "_loss_sum", tight)
    return calls


def _backward(monkeypatch, full):
    """The same in a backward pass, when the head has its gradient already and the layers have none yet."""
    real, calls, rows = DeviceBatch.target_hidden, [], _rows_seen(monkeypatch)

    def tight(self, network):
        hidden = real(self, network)
        if hidden.requires_grad:
            calls.append(rows[-1])
            count, number = rows[-1], len(calls)

            def hook(grad):
                if full(count, number):
                    raise _full()

            hidden.register_hook(hook)
        return hidden

    monkeypatch.setattr(DeviceBatch, "target_hidden", tight)
    return calls


def _update(monkeypatch, full):
    """The same in the optimizer, when some weights have changed already."""
    real, calls = torch.amp.GradScaler.step, []

    def tight(self, optimizer):
        calls.append(1)
        if full(len(calls)):
            with torch.no_grad():
                optimizer.param_groups[0]["params"][0].mul_(3.0)
            raise _full()
        return real(self, optimizer)

    monkeypatch.setattr(torch.amp.GradScaler, "step", tight)
    return calls


def _evaluation(monkeypatch, full):
    real, calls, rows = model_loss.loss_and_correct, [], _rows_seen(monkeypatch)

    def tight(*arguments):
        calls.append(rows[-1])
        if full(rows[-1], len(calls)):
            raise _full()
        return real(*arguments)

    monkeypatch.setattr(model_loss, "loss_and_correct", tight)
    return calls


def _same_result(run, whole):
    ours, theirs = losses(run), losses(whole)
    assert len(ours) == len(theirs) == 12
    assert ours == pytest.approx(theirs, rel=1e-6)
    mine, others = weights(run), weights(whole)
    assert mine.keys() == others.keys()
    for key in mine:
        torch.testing.assert_close(mine[key], others[key], rtol=1e-4, atol=1e-6)
    status = run.status()
    assert (status.state, status.step) == ("done", 12)


@pytest.mark.parametrize(
    ("kind", "where"), [(PRETRAIN, _forward), (LORA, _backward)], ids=["pretrain, forward", "lora, backward"]
)
def test_a_step_that_does_not_fit_is_done_with_fewer_rows_at_a_time(tiny, monkeypatch, kind, where):
    whole, words = tiny.whole(*kind), tiny.words(*kind)
    rows = where(monkeypatch, lambda rows, call: rows > 4 and call > 5)
    run = run_train(words)
    assert set(rows) == {8, 4}
    assert read_json(run.ladder) == {"device": "cpu", "train.micro_batch": 4}
    assert [event["now"] for event in events(run, "out_of_memory")] == [{"train.micro_batch": 4}]
    _same_result(run, whole)


@pytest.mark.parametrize("where", [_forward, _backward], ids=["forward", "backward"])
def test_memory_that_runs_out_in_the_midst_of_a_batch_counts_no_row_twice(tiny, monkeypatch, where):
    whole, words = tiny.whole(), tiny.words("train.micro_batch=4")
    where(monkeypatch, lambda rows, call: call == 8)  # a step's second part: the first has left its gradients
    run = run_train(words)
    assert read_json(run.ladder)["train.micro_batch"] == 2
    _same_result(run, whole)


def test_a_row_at_a_time_is_found_by_the_rehearsal_before_the_first_step(tiny, monkeypatch):
    whole, words = tiny.whole(), tiny.words("train.rehearse=on")
    rows = _forward(monkeypatch, lambda rows, call: rows > 1)
    run = run_train(words)
    assert rows[:4] == [8, 4, 2, 1] and set(rows[4:]) == {1}
    assert [event["step"] for event in events(run, "out_of_memory")] == [1, 1, 1]
    _same_result(run, whole)


@pytest.mark.parametrize("kind", [LORA], ids=["lora"])
def test_when_a_single_row_does_not_fit_activations_are_recomputed(tiny, monkeypatch, kind):
    """Fewer rows, then selective, then full recomputation: in the midst of a run that has saved nothing yet."""
    whole, words = tiny.whole(*kind), tiny.words(*kind)
    run = run_of(words)
    full = {"device": "cpu", "train.micro_batch": 1, "train.activation_checkpointing": "full"}
    _forward(monkeypatch, lambda rows, call: call > 6 and read_json(run.ladder) != full)
    run_train(words)
    said = [event["now"] for event in events(run, "out_of_memory")]
    assert said == [{"train.micro_batch": n} for n in (4, 2, 1)] + [
        {"train.activation_checkpointing": c} for c in ("selective", "full")
    ]
    assert len(events(run, "start")) == 3
    _same_result(run, whole)


@pytest.mark.parametrize("kind", [DROPOUT], ids=["lora with dropout"])
def test_a_step_done_again_draws_the_same_random_numbers(tiny, monkeypatch, kind):
    one = (*kind, "train.global_batch=2", "train.micro_batch=1")
    whole, words = tiny.whole(*one), tiny.words(*one)
    run = run_of(words)
    _backward(monkeypatch, lambda rows, call: call > 7 and not run.ladder.exists())  # the 2nd row of step 4
    run_train(words)
    assert read_json(run.ladder) == {"device": "cpu", "train.activation_checkpointing": "selective"}
    _same_result(run, whole)


def test_the_chunked_loss_is_the_fallback_after_full_activation_checkpointing(tiny, monkeypatch):
    two = ("train.global_batch=2", "train.micro_batch=1")
    whole = tiny.whole(*two)
    words = tiny.words(*two, "train.activation_checkpointing=full", "advanced.chunked_loss=off")
    run = run_of(words)
    _forward(
        monkeypatch, lambda rows, call: call > 5 and (read_json(run.ladder) or {}).get("train.offload") != "optimizer"
    )
    run_train(words)
    assert [event["now"] for event in events(run, "out_of_memory")] == [
        {"advanced.chunked_loss": "on"},
        {"train.offload": "optimizer"},
    ]
    _same_result(run, whole)


@pytest.mark.parametrize(
    ("kind", "every"),
    [(DROPOUT, []), (PRETRAIN, []), (PRETRAIN, ["save.every_steps=3"])],
    ids=["lora with dropout", "before any checkpoint", "after one"],
)
def test_an_update_that_does_not_fit_goes_back_and_keeps_the_moments_in_the_hosts_memory(
    tiny, monkeypatch, kind, every
):
    whole, words = tiny.whole(*kind), tiny.words(*kind, *every)
    _update(monkeypatch, lambda call: call == 5)
    run = run_train(words)
    assert read_json(run.ladder) == {"device": "cpu", "train.offload": "optimizer"}
    started = [event["step"] for event in events(run, "start")]
    assert started == [0, 3 if every else 0]
    _same_result(run, whole)


def test_an_update_of_another_optimizer_gives_up_rows(tiny, monkeypatch):
    whole, words = tiny.whole("train.optimizer=muon"), tiny.words("train.optimizer=muon", "save.every_steps=2")
    from sojourn.train.optim.muon import Muon

    real, calls = Muon.step, []

    def tight(self, closure=None):
        calls.append(1)
        if len(calls) == 4:
            raise _full()
        return real(self, closure)

    monkeypatch.setattr(Muon, "step", tight)
    run = run_train(words)
    assert read_json(run.ladder) == {"device": "cpu", "train.micro_batch": 4}
    _same_result(run, whole)


def test_an_evaluation_that_does_not_fit_is_made_with_fewer_rows(tiny, monkeypatch):
    held_out = ("data.eval_fraction=0.1", "train.eval_every=4")
    whole, words = tiny.whole(*held_out), tiny.words(*held_out)
    rows = _evaluation(monkeypatch, lambda rows, call: rows > 2)
    run = run_train(words)
    assert rows[0] == 8 and rows[-1] <= 2
    found, wanted = (
        [(line["step"], line["loss"]) for line in one.read_metrics() if line["kind"] == "eval"] for one in (run, whole)
    )
    assert [step for step, _ in found] == [step for step, _ in wanted] == [4, 8, 12]
    assert [loss for _, loss in found] == pytest.approx([loss for _, loss in wanted], rel=1e-5)
    _same_result(run, whole)


def test_an_evaluation_for_which_the_run_is_built_anew_is_made_once(tiny, monkeypatch):
    held_out = ("data.eval_fraction=0.05", "train.eval_every=4", "train.global_batch=2", "train.micro_batch=1")
    whole, words = tiny.whole(*held_out), tiny.words(*held_out)
    run = run_of(words)
    _evaluation(monkeypatch, lambda rows, call: not run.ladder.exists())
    run_train(words)
    assert saved_steps(run) == [4, 12]  # nothing was lost: the four steps before it were saved
    assert [event["step"] for event in events(run, "start")] == [0, 4]
    assert [event["step"] for event in events(run, "best")] == [event["step"] for event in events(whole, "best")]
    _same_result(run, whole)


def test_other_libraries_words_for_it_are_understood(tiny, monkeypatch):
    words = tiny.words()
    said = iter(
        [
            RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)"),
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."),
            MemoryError(),
        ]
    )
    real = Stepper._loss_sum

    def tight(*arguments):
        error = next(said, None)
        if error is not None:
            raise error
        return real(*arguments)

    monkeypatch.setattr(Stepper, "_loss_sum", tight)
    run = run_train(words)
    assert read_json(run.ladder)["train.micro_batch"] == 1


def test_an_error_that_is_not_about_memory_is_not_taken_for_one(tiny, monkeypatch):
    words = tiny.words()

    def breaks(*arguments):
        raise RuntimeError("the size of tensor a (3) must match the size of tensor b (4)")

    monkeypatch.setattr(Stepper, "_loss_sum", breaks)
    with pytest.raises(RuntimeError, match="size of tensor"):
        run_train(words)
    run = run_of(words)
    assert not run.ladder.exists() and run.status().state == "failed"


def _stopped_after(words, monkeypatch, steps):
    with monkeypatch.context() as patch, pytest.raises(Stopped):
        stop_after(patch, steps)
        run_train(words)


def test_the_next_call_starts_with_the_fallback(tiny, monkeypatch):
    whole, words = tiny.whole(), tiny.words()
    with monkeypatch.context() as patch:
        _forward(patch, lambda rows, call: rows > 2)
        _stopped_after(words, patch, 4)
    rows = _forward(monkeypatch, lambda rows, call: rows > 2)
    run = run_train(words)
    assert set(rows) == {2} and len(events(run, "out_of_memory")) == 2
    reason = read_json(run.environment)["auto"]["train.micro_batch"]
    assert reason.startswith("2: memory ran out with more")
    _same_result(run, whole)


def test_another_kind_of_device_ignores_the_fallback(tiny, monkeypatch):
    words = tiny.words()
    _stopped_after(words, monkeypatch, 4)
    run = run_of(words)
    write_json(
        run.ladder,
        {"device": "NVIDIA A100-SXM4-80GB", "train.micro_batch": 1, "train.activation_checkpointing": "full"},
    )
    rows = _forward(monkeypatch, lambda rows, call: False)
    run_train(words)
    assert set(rows) == {8}
    _same_result(run, tiny.whole())


def test_a_spoiled_ladder_file_is_no_obstacle(tiny):
    words = tiny.words()
    run = run_of(words)
    run.path.mkdir(parents=True)
    run.ladder.write_text('{"device": "cpu", "micro_ba')
    assert run_train(words).status().state == "done"


def test_a_user_who_gives_up_more_than_the_ladder_is_not_given_it_back(tiny):
    words = tiny.words("train.activation_checkpointing=full", "train.micro_batch=2")
    run = run_of(words)
    run.path.mkdir(parents=True)
    write_json(run.ladder, {"device": "cpu", "train.micro_batch": 4, "train.activation_checkpointing": "selective"})
    run_train(words)
    auto = (run.config).read_text()
    assert "micro_batch: 2" in auto and "checkpointing: full" in auto


def test_when_nothing_is_left_to_give_up_one_line_says_so_and_nothing_is_lost(tiny, monkeypatch):
    words = tiny.words()
    with monkeypatch.context() as patch:
        _forward(patch, lambda rows, call: call > 4)
        with pytest.raises(
            RunFailed, match=r"step 5: out of memory .*no setting is left that would save memory"
        ) as told:
            run_train(words)
    assert "\n" not in str(told.value) and "use a GPU with more memory" in str(told.value)
    run = run_of(words)
    assert read_json(run.ladder) == {
        "device": "cpu", "train.micro_batch": 1, "train.activation_checkpointing": "full", "train.offload": "optimizer"
    }  # fmt: skip
    assert run.status().state == "failed" and run.status().resumable and saved_steps(run) == [4]
    run_train(words)  # on a machine whose memory is not full
    _same_result(run, tiny.whole())


def test_a_run_that_has_given_up_everything_before_still_saves_its_steps(tiny, monkeypatch):
    words = tiny.words(
        "train.global_batch=2",
        "train.micro_batch=1",
        "train.activation_checkpointing=full",
        "advanced.chunked_loss=on",
        "train.offload=optimizer",
    )
    _forward(monkeypatch, lambda rows, call: call > 9)
    with pytest.raises(RunFailed, match="out of memory"):
        run_train(words)
    assert saved_steps(run_of(words)) == [4]


def test_time_and_money_are_counted_once_however_often_the_run_is_built_anew(tiny, monkeypatch):
    import time

    words = tiny.words("train.global_batch=2", "train.micro_batch=1", "limits.price_per_hour=3600 CNY")
    run = run_of(words)
    want = [
        {"train.activation_checkpointing": "selective"},
        {"train.activation_checkpointing": "full"},
        {"train.offload": "optimizer"},
    ]
    _forward(monkeypatch, lambda rows, call: call > 5 and len(events(run, "out_of_memory")) < len(want))
    began = time.monotonic()
    run_train(words)
    took = time.monotonic() - began
    assert [event["now"] for event in events(run, "out_of_memory")] == want
    books = read_json(run.ledger)
    assert 0 < books["seconds"] <= took and books["money"] == pytest.approx(books["seconds"], abs=0.1)


def test_memory_that_runs_out_while_a_run_is_opened_keeps_the_moments_in_the_hosts_memory(tiny, monkeypatch):
    """On a smaller card than before: the model fits, but not with its optimizer's moments."""
    words = tiny.words()
    _stopped_after(words, monkeypatch, 4)
    real, calls = Optimizer.load_state_tensors, []

    def tight(self, tensors):
        calls.append(1)
        if len(calls) == 1:
            raise _full()
        return real(self, tensors)

    monkeypatch.setattr(Optimizer, "load_state_tensors", tight)
    run = run_train(words)
    assert [event["now"] for event in events(run, "out_of_memory")] == [{"train.offload": "optimizer"}]
    _same_result(run, tiny.whole())


def test_a_model_that_does_not_fit_at_all_is_one_line(tiny, monkeypatch):
    def tight(*arguments):
        raise _full()

    monkeypatch.setattr(open_module, "build_network", tight)
    words = tiny.words()
    with pytest.raises(RunFailed, match="out of memory") as told:
        run_train(words)
    assert "\n" not in str(told.value) and run_of(words).status().state == "failed"


def test_an_undisturbed_run_has_no_ladder_and_is_the_same_twice(tiny):
    run = run_train(tiny.words())
    assert not run.ladder.exists() and same_weights(run, tiny.whole())


def test_an_allocator_that_fights_for_memory_gets_fewer_rows_in_time(tiny, monkeypatch):
    """Which is seen by how often torch had to try again between two logged steps."""
    tried = [0]

    def stats():
        tried[0] += 12
        return {"num_alloc_retries": min(tried[0], 36)}

    def on_gpu(self, device):
        self._device, self._retries, self._warned = "cuda", 0, False

    whole = tiny.whole()
    monkeypatch.setattr(MemoryPressure, "__init__", on_gpu)
    monkeypatch.setattr(torch.cuda, "memory_stats", stats)
    run = run_train(tiny.words("train.micro_batch=8", "log.every_steps=1"))
    assert [event["now"] for event in events(run, "out_of_memory")] == [
        {"train.micro_batch": rows} for rows in (4, 2, 1)
    ]
    assert losses(run)[-1] == pytest.approx(losses(whole)[-1], rel=1e-4)
