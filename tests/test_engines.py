"""One run with every engine: the same losses and weights, checkpoints that every engine resumes from, and the same
handling of faults."""

from __future__ import annotations

import io
import json

import numpy as np
import pytest
import torch

from conftest import called
from fork_server import needs_fork
from sojourn.infer.load import load_model
from sojourn.run.checkpoints import list_checkpoints
from sojourn.storage.files import read_json
from tiny import LORA, events, losses, run_of, run_train, saved_steps, weights

pytestmark = needs_fork

METHODS = {
    "pretrain": (),
    "full": ("method.kind=full", "train.lr=1e-3"),
    "lora": LORA,
    "qlora": ("method.kind=qlora", "method.rank=4", "train.lr=1e-3"),
}
RUN = (
    "train.micro_batch=2",
    "data.eval_fraction=0.03",
    "train.eval_every=4",
    "train.steps=8",
    "train.sample_tokens=4",
)


def _engine(name: str, home) -> str:
    """`zero1` … are DeepSpeed's, each from a file; a star: offloaded to host memory."""
    if not name.startswith("zero"):
        return f"parallel.engine={name}"
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    stage, host = int(name[4]), {"device": "cpu"}
    zero = {"stage": stage, **({"offload_optimizer": host} if name.endswith("*") else {})}
    zero |= {"offload_param": host} if name == "zero3*" else {}
    path = home / f"{name.replace('*', '-offload')}.json"
    path.write_text(json.dumps({"train_batch_size": "auto", "zero_optimization": zero}))
    return f"parallel.deepspeed={path}"


def _curve(run, kind="train"):
    return [line["loss"] for line in run.read_metrics() if line["kind"] == kind]


def _samples(run):
    return [line["text"] for line in run.read_metrics() if line["kind"] == "sample"]


def _same(run, whole):
    assert len(losses(run)) == len(losses(whole)) and run.status().state == "done"
    for kind in ("train", "eval"):
        assert _curve(run, kind) == pytest.approx(_curve(whole, kind), rel=1e-5)
    mine, theirs = weights(run), weights(whole)
    assert mine.keys() == theirs.keys()
    assert all(np.allclose(mine[key], theirs[key], rtol=1e-3, atol=1e-5) for key in theirs)


def _slow(*cases):
    """Those that `make test-parallel` adds."""
    return [pytest.param(*case, marks=pytest.mark.slow) for case in cases]


@pytest.mark.parametrize(
    ("method", "engine", "size"),
    [
        # Quantised weights, which engines shard each in its way, and four ranks once; make test-parallel adds the rest.
        # What the runs of the test below go through is not repeated here.
        ("pretrain", "ddp", 4),
        ("qlora", "fsdp", 2), ("qlora", "zero2", 2),
        *_slow(("qlora", "ddp", 2), ("full", "fsdp", 2), ("pretrain", "fsdp", 2), ("pretrain", "zero2", 2),
               ("lora", "ddp", 2), ("lora", "fsdp", 2), ("lora", "zero2", 2),
               ("pretrain", "ddp", 2), ("pretrain", "fsdp", 4), ("lora", "ddp", 4), ("lora", "fsdp", 4),
               ("qlora", "ddp", 4), ("qlora", "fsdp", 4),
               ("full", "ddp", 2), ("full", "zero2", 2), ("pretrain", "ddp", 3), ("lora", "fsdp", 3),
               ("pretrain", "ddp", 1), ("pretrain", "fsdp", 1), ("lora", "zero2", 1), ("pretrain", "zero1", 2),
               ("lora", "zero3", 2), ("pretrain", "zero2*", 2), ("full", "zero3*", 2)),
    ],
)  # fmt: skip
def test_every_engine_has_the_losses_of_a_single_rank(tiny, fork_server, method, engine, size):
    whole = tiny.whole(*METHODS[method], *RUN)
    words = tiny.words(*METHODS[method], *RUN, _engine(engine, tiny.home))
    done = fork_server.run_ranks(size, words)
    assert done.codes == [0] * size, done
    _same(run_of(words), whole)
    assert events(run_of(words), "start")[0]["processes"] == size
    assert _samples(run_of(words)) == _samples(whole) != []


@pytest.mark.parametrize(
    ("method", "engine"), _slow(("lora", "fsdp"), ("full", "ddp"), ("full", "fsdp"), ("qlora", "ddp"))
)
def test_offloaded_layer_inputs_change_nothing(tiny, fork_server, method, engine):
    words = tiny.words(*METHODS[method], *RUN, _engine(engine, tiny.home), "train.activation_checkpointing=offload")
    assert fork_server.run_ranks(2, words).codes == [0, 0]
    _same(run_of(words), tiny.whole(*METHODS[method], *RUN))


_STOP = """
from sojourn.train import steps
from sojourn.train.faults.guard import Guard
count, made = steps._count_step, []
def counted(*given):
    count(*given)
    made.append(1)
steps._count_step = counted
Guard.should_stop = lambda self: "a test" if len(made) >= {} else None
"""


@pytest.mark.parametrize(
    ("method", "legs"),
    [
        # Every engine writes a checkpoint, and every engine resumes from another's.
        ("pretrain", [("fsdp", 4), ("zero2", 2), ("single", 1)]),
        ("lora", [("single", 1), ("ddp", 2), ("fsdp", 2)]),
        *_slow(
            ("pretrain", [("fsdp", 4), ("single", 1), ("zero2", 2), ("fsdp", 2), ("ddp", 2), ("zero2", 2), ("ddp", 1)]),
            ("lora", [("ddp", 2), ("fsdp", 2), ("zero2", 2), ("single", 1), ("fsdp", 2)]),
            ("qlora", [("zero2", 2), ("ddp", 2), ("single", 1), ("fsdp", 2), ("single", 1)]),
            ("full", [("single", 1), ("zero3*", 2), ("single", 1), ("zero2*", 2), ("fsdp", 4)]),
            ("lora", [("zero3", 2), ("fsdp", 3), ("zero3", 2), ("ddp", 2)]),
        ),
    ],
)
def test_every_engine_resumes_from_the_checkpoint_of_any_other(tiny, fork_server, method, legs):
    each = 2  # steps
    steps = (f"train.steps={each * len(legs)}", "train.eval_every=1")
    whole = tiny.whole(*METHODS[method], *RUN, *steps)
    words = tiny.words(*METHODS[method], *RUN, *steps)
    run = run_of(words)
    for number, (engine, size) in enumerate(legs):
        last = number == len(legs) - 1
        done = fork_server.run_ranks(size, [*words, _engine(engine, tiny.home)], "" if last else _STOP.format(each))
        assert done.codes == [0 if last else 3] * size, f"{engine} on {size}: {done}"
        if not last:
            assert saved_steps(run)[-1] == each * (number + 1)
            names = {path.name for path in list_checkpoints(run.checkpoints)[-1].iterdir()}
            files = {"model.safetensors", "optimizer.safetensors", "random.safetensors"}
            assert names == {*files, "state.json", "manifest.json"}
    _same(run, whole)
    starts = [(event["step"], event["processes"]) for event in events(run, "start")]
    assert starts == [(each * number, size) for number, (_, size) in enumerate(legs)]
    assert _samples(run) == _samples(whole) and len(_curve(run, "eval")) == each * len(legs) <= len(_samples(run))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["pretrain", "lora"])
def test_generate_and_chat_open_the_checkpoint_of_a_run_stopped_under_fsdp(tiny, fork_server, monkeypatch, method):
    words = tiny.words(*METHODS[method], *RUN)
    done = fork_server.run_ranks(2, [*words, "parallel.engine=fsdp"], _STOP.format(4))
    assert done.codes == [3, 3], done
    run, prompt = run_of(words), "What colour is the cat of house 3?"
    said = called("generate", run.path.name, "--prompt", prompt, "--max-tokens", "5", "--json")
    assert said.returncode == 0 and "opened at step 4" in said.stderr, said.stderr
    answer = json.loads(said.stdout)[0]["completion"]
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{prompt}\n"))
    chat = called("chat", run.path.name, "--max-tokens", "5")
    assert chat.returncode == 0 and answer.strip() and answer.strip() in chat.stdout, (answer, chat)
    alone = tiny.whole(*METHODS[method], *RUN, "save.every_steps=4", "save.keep=9").path.name
    ours, theirs = (load_model(name, "cpu", "4").model.state_dict() for name in (run.path.name, alone))
    assert ours.keys() == theirs.keys()
    assert all(torch.allclose(ours[name], theirs[name], rtol=1e-3, atol=1e-5) for name in theirs)


_SIGNAL = """
from sojourn.train.step import Stepper
update, made = Stepper.update, []
def struck(self):
    made.append(1)
    update(self)
    if rank == 1 and len(made) == 5:
        os.kill(os.getpid(), signal.SIGTERM)
Stepper.update = struck
"""


@pytest.mark.parametrize("engine", ["ddp", *_slow(("zero2",), ("fsdp",))])
def test_a_signal_to_one_rank_stops_all_after_the_same_step_and_nothing_is_lost(tiny, fork_server, engine):
    whole = tiny.whole(*RUN)
    words = tiny.words(*RUN, _engine(engine, tiny.home))
    done = fork_server.run_ranks(2, words, _SIGNAL)
    assert done.codes == [3, 3], done
    assert run_of(words).status().state == "stopped" and saved_steps(run_of(words)) == [5]
    assert fork_server.run_ranks(2, words).codes == [0, 0]
    _same(run_of(words), whole)


_KILL = """
from sojourn.train.step import Stepper
update, made = Stepper.update, []
def struck(self):
    made.append(1)
    if rank == 1 and len(made) == 7:
        os.kill(os.getpid(), signal.SIGKILL)
    update(self)
Stepper.update = struck
"""


@pytest.mark.parametrize("engine", ["zero2", *_slow(("ddp",), ("fsdp",))])
def test_a_killed_rank_ends_the_others_and_the_next_start_resumes_from_the_checkpoint(tiny, fork_server, engine):
    whole = tiny.whole(*RUN)
    words = tiny.words(*RUN, _engine(engine, tiny.home), "save.every_steps=4")
    done = fork_server.run_ranks(2, words, _KILL)
    assert done.codes[1] == -9 and done.codes[0] == 1, done
    assert "rank 0 lost the connection to another rank" in done.said[0]
    again = fork_server.run_ranks(2, words, TORCHELASTIC_RESTART_COUNT="1")
    assert again.codes == [0, 0], again
    assert "restarted after a rank had ended" in again.said[0] and "resuming from step 4" in again.said[0]
    _same(run_of(words), whole)


# On one rank of two, once; `backward`: during the last backward of the step, while gradients are reduced.
_TIGHT = """
import torch
from sojourn.train.batcher import DeviceBatch
from sojourn.train.step import Stepper
from sojourn.train.distributed.engine import Engine
calls = []
def full(where, when):
    calls.append(where)
    if rank == 1 and calls.count(where) == when:
        raise torch.OutOfMemoryError("CUDA out of memory.")
place = "PLACE"
if place == "forward":
    inner = Stepper._loss_sum
    def loss_sum(*given):
        full("forward", 9)
        return inner(*given)
    Stepper._loss_sum = loss_sum
elif place == "backward":
    inner = DeviceBatch.target_hidden
    def target_hidden(*given):
        hidden = inner(*given)
        if hidden.requires_grad:
            hidden.register_hook(lambda grad: full("backward", 10))
        return hidden
    DeviceBatch.target_hidden = target_hidden
elif place == "update":
    from sojourn.train.distributed.deepspeed import DeepSpeed
    def fails(inner):
        def step(*given):
            full("update", 4)
            return inner(*given)
        return step
    torch.amp.GradScaler.step = fails(torch.amp.GradScaler.step)
    DeepSpeed.optimizer_step = fails(DeepSpeed.optimizer_step)  # DeepSpeed asks no scaler of ours
elif place == "evaluation":
    from sojourn.model import loss
    inner = loss.loss_and_correct
    def score(*given):
        full("evaluation", 1)
        return inner(*given)
    loss.loss_and_correct = score
"""


@pytest.mark.parametrize(
    ("engine", "place"),
    [
        ("ddp", "forward"), ("zero2", "backward"),
        *_slow(("ddp", "backward"), ("ddp", "update"), ("ddp", "evaluation"), ("fsdp", "forward"), ("fsdp", "backward"),
               ("fsdp", "update"), ("fsdp", "evaluation"), ("zero2", "forward"), ("zero2", "update"),
               ("zero2", "evaluation")),
    ],
)  # fmt: skip
def test_memory_that_runs_out_on_one_rank_costs_no_step_or_restarts_one_fallback_down(tiny, fork_server, engine, place):
    whole = tiny.whole(*RUN)
    words = tiny.words(*RUN, _engine(engine, tiny.home), "save.every_steps=4")
    run, wrong = run_of(words), _TIGHT.replace("PLACE", place)
    done = fork_server.run_ranks(2, words, wrong)
    if engine == "ddp":  # all ranks agree, and replay the step
        assert done.codes == [0, 0], done
    else:  # the others wait in a collective
        assert done.codes[1] == 1 and done.codes[0] != 0, done
        assert run.status().state == "failed"
        again = fork_server.run_ranks(2, words)
        assert again.codes == [0, 0], again
    rung = read_json(run.ladder)
    assert rung.items() >= ({"train.offload": "optimizer"} if place == "update" else {"train.micro_batch": 1}).items()
    _same(run, whole)


_NAN = """
from sojourn.train import step as step_module
inner = step_module.Stepper._loss_sum
seen = {}
def bad(self, batch):
    made = inner(self, batch)
    key = batch.ids.tobytes()
    return made * float("nan") if PICK else made
step_module.Stepper._loss_sum = bad
"""


NAN_RUN = (*RUN, "train.on_nan=skip", "train.micro_batch=1")


def _nan_in_rows(*numbers):
    return _NAN.replace("PICK", f"rank == 0 and seen.setdefault(key, len(seen)) in {numbers}")


@pytest.fixture(scope="module")
def nan_alone(tiny, fork_server):
    """One rank; the rows of step 4 give a NaN loss."""
    words = tiny.words(*NAN_RUN)
    assert fork_server.run_ranks(1, words, _nan_in_rows(24, 25)).codes == [0]
    return run_of(words)


@pytest.mark.parametrize("engine", ["fsdp", *_slow(("zero2",), ("ddp",), ("zero3",), ("zero2*",))])
def test_a_nan_step_is_skipped_by_every_engine(tiny, fork_server, nan_alone, engine):
    """The rows of step 3 give a NaN loss on whichever rank reads them; the run skips them."""
    words = tiny.words(*NAN_RUN, _engine(engine, tiny.home))
    # Of two ranks the first has read 12 rows before those of step 4.
    done = fork_server.run_ranks(2, words, _nan_in_rows(12, 13))
    assert done.codes == [0, 0], done
    skipped = [event["step"] for event in events(run_of(words), "bad_step")]
    assert skipped == [event["step"] for event in events(nan_alone, "bad_step")] == [4]
    assert losses(run_of(words)) == pytest.approx(losses(nan_alone), rel=1e-5)


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        (("parallel.gpus=0,1,2",), "3 GPUs are named, but torchrun started 2 ranks on this machine"),
        *_slow(
            (("parallel.engine=single",), "single is for one rank, but 2 were started"),
            (("parallel.engine=fsdp", "train.optimizer=muon"), "muon needs full tensors"),
            (("parallel.engine=ddp", "train.offload=all"), "all needs parallel.engine=fsdp or deepspeed"),
            (("train.global_batch=1",), "1 rows are fewer than the 2 ranks; use at least 2"),
            (("train.optimizer_in_backward=on", "train.clip=0"), "on is for one GPU, but 2 were started"),
        ),
    ],
)
def test_unsupported_settings_of_an_engine_are_refused_in_one_line_by_all_ranks(tiny, fork_server, extra, says):
    done = fork_server.run_ranks(2, tiny.words(*extra))
    assert done.codes == [2, 2], done
    errors = [line for line in done.said[0].splitlines() if line.startswith("sojourn: ")]
    assert len(errors) == 1 and says in errors[0]


@pytest.mark.parametrize("size", [2, *_slow((1,))])
def test_gathered_weights_are_resharded_where_no_backward_does_it(tiny, fork_server, size):
    """After the parity check of a base model, and after evaluations: else a copy would be trained and saved."""
    words = tiny.words(*METHODS["full"], *RUN, "parallel.engine=fsdp", "advanced.reshard_after_forward=false")
    done = fork_server.run_ranks(size, words)
    assert done.codes == [0] * size, done
    _same(run_of(words), tiny.whole(*METHODS["full"], *RUN))


def test_offloaded_weights_give_the_same_losses(tiny, fork_server):
    words = tiny.words(*RUN, "train.offload=all")
    done = fork_server.run_ranks(2, words)
    assert done.codes == [0, 0], done
    _same(run_of(words), tiny.whole(*RUN))
    assert "fsdp: train.offload=all" in read_json(run_of(words).environment)["auto"]["parallel.engine"]


@pytest.mark.slow
@pytest.mark.parametrize("masters", ["bf16", "bf16_kahan"])
def test_bf16_weights_under_ddp_have_the_losses_of_a_single_rank(tiny, fork_server, masters):
    """Each rank rounds alike, so that all keep the same weights."""
    few = ("train.precision=bf16", f"train.master_weights={masters}", "train.global_batch=4", "train.steps=4")
    words = tiny.words(*METHODS["full"], *few, "parallel.engine=ddp")
    done = fork_server.run_ranks(2, words)
    assert done.codes == [0, 0], done
    alone = run_train(tiny.words(*METHODS["full"], *few))
    assert losses(run_of(words)) == pytest.approx(losses(alone), rel=2e-3)


def test_deepspeed_compiles_nothing_for_a_cpu(tiny, fork_server, tmp_path):
    """A process that is killed meanwhile would leave a lock that all later ones wait for."""
    words = tiny.words("train.steps=1", _engine("zero2", tiny.home))
    done = fork_server.run_ranks(1, words, TORCH_EXTENSIONS_DIR=str(tmp_path))
    assert done.codes == [0] and not any(tmp_path.iterdir()), done


def test_an_engine_with_one_rank_equals_a_run_without_one(tiny):
    """Without any launcher."""
    whole = tiny.whole(*RUN)
    for engine in ("ddp", "fsdp"):
        run = run_train(tiny.words(*RUN, f"parallel.engine={engine}"))
        assert losses(run) == pytest.approx(losses(whole), rel=1e-6)
