"""A run from start to finish: killed, stopped, continued, refused, and opened by plain transformers."""

import hashlib
import json
import math
import os
import signal
import time

import pytest

from conftest import called
from sojourn.config.load import load_run
from sojourn.errors import RunFailed, Stopped, UserError
from sojourn.run.checkpoints import list_checkpoints
from sojourn.run.folder import RunFolder
from sojourn.run.home import run_folder
from sojourn.run.lock import RunLock
from sojourn.train.distributed.engine import Engine
from sojourn.train.loop import train


def _train(words: list[str]) -> RunFolder:
    config = load_run(words).config
    run = run_folder(config.name)
    train(config, run)
    return run


def _weights(run: RunFolder) -> str:
    return hashlib.sha256((run.final / "model.safetensors").read_bytes()).hexdigest()


def _losses(run: RunFolder) -> list[float]:
    return [line["loss"] for line in run.read_metrics() if line["kind"] == "train"]


def test_the_run_folder_holds_what_is_promised(words):
    run = _train([*words, "train.precision=auto", "log.tensorboard=on"])
    for name in ("run.yaml", "environment.json", "status.json", "metrics.jsonl", "events.jsonl", "checkpoints/latest"):
        assert (run.path / name).is_file(), name
    for name in (
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ):
        assert (run.final / name).is_file(), name
    assert list(run.logs.glob("events.out.tfevents.*"))
    status = run.status()
    assert (status.state, status.step, status.resumable) == ("done", 12, False)
    losses = _losses(run)
    assert len(losses) == 12 and losses[-1] < losses[0]
    auto = json.loads(run.environment.read_text())["auto"]
    assert {"train.device", "train.precision", "train.lr", "model.ffn_size", "data.template"} <= auto.keys()
    kept = load_run([str(run.config)]).config
    undecided = [key for section in (kept.model, kept.train) for key, value in section if value == "auto"]
    assert undecided == []


def test_the_same_seed_gives_the_same_weights_and_another_seed_others(words):
    first, second = _train(words), _train([*words, "name=u"])
    other = _train([*words, "name=v", "train.seed=1"])
    assert _weights(first) == _weights(second) != _weights(other)


def test_a_run_killed_between_checkpoints_ends_with_the_weights_of_an_undisturbed_one(words, fork_server):
    whole = _train([*words, "train.steps=50"])
    killed = [*words, "name=k", "train.steps=50", "save.every_steps=3"]
    process = fork_server.start("train", *killed)
    run = run_folder("k")
    while not list_checkpoints(run.checkpoints):
        assert process.poll() is None, "the run ended before it could be killed"
        time.sleep(0.005)
    process.kill()
    process.wait()
    assert run.status().state == "failed" and run.status().resumable
    again = called("train", *killed)
    assert again.returncode == 0, again.stderr
    assert "resuming from step" in again.stdout
    assert _weights(run) == _weights(whole)
    assert _losses(run) == _losses(whole)


def test_ctrl_c_saves_says_how_to_go_on_and_the_same_command_continues(words, fork_server):
    long = [*words, "train.steps=5000", "name=c"]
    process = fork_server.start("train", *long)
    run = run_folder("c")
    while not run.read_metrics():
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 3
    assert "stopped by Ctrl-C at step" in said and "run the same command to resume" in said and "Traceback" not in said
    status = run.status()
    assert status.state == "stopped" and status.resumable
    reached = status.step
    with pytest.raises(Stopped):
        _train([*long, "limits.time=0.05s"])
    assert run.status().step > reached


def test_a_budget_stops_the_run_and_counts_earlier_sessions(words):
    paid = [*words, "train.steps=100000", "limits.price_per_hour=3600 CNY", "limits.budget=0.3 CNY"]
    with pytest.raises(Stopped, match=r"the budget of ¥0\.3"):
        _train(paid)
    run = run_folder("t")
    first = run.status().step
    with pytest.raises(Stopped, match=r"the budget of ¥0\.3"):
        _train(paid)
    assert run.status().step == first + 1


def test_a_finished_run_is_left_alone(words, capsys):
    run = _train(words)
    before = _weights(run)
    _train(words)
    assert "already done" in capsys.readouterr().out and _weights(run) == before and run.status().state == "done"


def test_a_changed_setting_that_matters_is_refused_and_nothing_is_lost(words):
    run = _train(words)
    with pytest.raises(UserError, match=r"train.lr was .*, now 0.5.*--fork NEWNAME"):
        _train([*words, "train.lr=0.5"])
    assert run.status().state == "done"
    _train([*words, "save.keep=5", "train.micro_batch=2"])


def test_two_trainers_in_one_folder_are_refused(words):
    lock = RunLock(run_folder("t").path)
    with pytest.raises(UserError, match=f"already being trained by the process with pid {os.getpid()}"):
        _train(words)
    lock.release()
    _train(words)


def test_a_lock_left_by_a_killed_process_is_no_obstacle(words):
    run = run_folder("t")
    run.path.mkdir(parents=True)
    (run.path / ".lock").write_text("[999999, 12.5]")
    assert _train(words).status().state == "done"


def test_a_checkpoint_can_be_named(words):
    run = _train([*words, "save.every_steps=5", "save.keep=9"])
    forked = _train([*words, "name=f", "--resume-from-checkpoint", str(run.checkpoints / "step-00000005")])
    assert _weights(forked) == _weights(run) and len(_losses(forked)) == 7


def test_naming_a_checkpoint_again_does_not_throw_away_what_came_after(words, capsys):
    run = _train([*words, "save.every_steps=5", "save.keep=9"])
    early = ["--resume-from-checkpoint", str(run.checkpoints / "step-00000005")]
    with pytest.raises(Stopped):
        _train([*words, "name=f", *early, "save.every_steps=1", "limits.time=0.001s"])
    _train([*words, "name=f", *early])
    said = capsys.readouterr().out
    assert "already further than step-00000005" in said and "resuming from step 6 " in said
    assert _weights(run_folder("f")) == _weights(run)


def test_epochs_read_every_row_and_save_at_each_epochs_end(words):
    words = [w for w in words if not w.startswith("train.steps")]
    run = _train([*words, "train.epochs=2", "save.every_steps=epoch", "save.keep=9"])
    rows = json.loads(next((run.path.parent.parent / "prepared").glob("*/report.json")).read_text())["train"]["rows"]
    total = run.status().total_steps
    assert total == -(-2 * rows // 8)
    saved = sorted(int(p.name[5:]) for p in run.checkpoints.glob("step-*"))
    assert saved == [-(-rows // 8), total]


def test_plain_transformers_opens_the_model_and_says_the_same_as_generate(words, fork_server):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run = _train([*words, "train.steps=40"])
    question = "What colour is the boat of house 1?"
    ours = fork_server.run("generate", "t", "--prompt", question, "--max-tokens", "24", "--json")
    assert ours.returncode == 0, ours.stderr
    tokenizer = AutoTokenizer.from_pretrained(run.final)
    model = AutoModelForCausalLM.from_pretrained(run.final)
    chat = [{"role": "user", "content": question}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.inference_mode():
        output = model.generate(**inputs, max_new_tokens=24, do_sample=False)
    text = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert json.loads(ours.stdout)[0]["completion"] == text


def test_chat_answers_line_by_line_and_leaves_at_the_end_of_input(words, fork_server):
    _train(words)
    said = fork_server.run("chat", "t", "--max-tokens", "8", input="hello\n/reset\nagain\n")
    assert said.returncode == 0, said.stderr
    assert said.stdout.count("model: ") == 2


def test_eval_reports_the_held_out_loss(words):
    _train([*words, "data.eval_fraction=0.2"])
    said = called("eval", "t", "--tasks", "0", "--json")
    assert said.returncode == 0, said.stderr
    scored = {row["metric"]: row for row in json.loads(said.stdout)["results"]}
    assert 0 < scored["loss"]["low"] < scored["loss"]["value"] < scored["loss"]["high"] < 10
    assert scored["perplexity"]["value"] == pytest.approx(math.exp(scored["loss"]["value"]))


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--train_file", "missing.jsonl"], "missing.jsonl: no such file or folder"),
        (["data.sources=[]"], "nothing to read"),
        (["train.device=cuda"], "doctor"),
        (["save.resume=nowhere"], "not a complete checkpoint"),
        (["data.tokenizer=nowhere"], "no such file or folder"),
    ],
)
def test_what_cannot_be_trained_is_one_line_that_says_what_to_do(words, extra, message):
    with pytest.raises(UserError, match=message):
        _train([*words, *extra])


def test_a_loss_that_is_no_number_ends_the_run_and_spoils_no_checkpoint(words, monkeypatch):
    from sojourn.train.step import Stepper

    real, calls = Stepper.gradients, []

    def breaks(*arguments):
        calls.append(1)
        loss, norm = real(*arguments)
        return (math.nan if len(calls) > 5 else loss), norm

    monkeypatch.setattr(Stepper, "gradients", breaks)
    with pytest.raises(RunFailed, match="step 6: the loss is nan"):
        _train([*words, "train.rehearse=off", "train.on_nan=stop", "save.every_steps=2", "save.keep=9"])
    run = run_folder("t")
    assert sorted(p.name for p in run.checkpoints.glob("step-*")) == ["step-00000002", "step-00000004"]
    assert run.status().state == "failed" and run.status().resumable


def test_an_infinite_gradient_ends_the_run_before_it_is_saved(words, monkeypatch):
    import torch

    real, calls = Engine.clip_grad_norm, []

    def breaks(self, most):
        calls.append(1)
        if len(calls) >= 4:
            self.optimizer.parameters[0].grad.fill_(torch.inf)
        return real(self, most)

    monkeypatch.setattr(Engine, "clip_grad_norm", breaks)
    with pytest.raises(RunFailed, match=r"step 4: .*the gradient norm inf"):
        _train([*words, "train.rehearse=off", "train.on_nan=stop", "save.every_steps=2", "save.keep=9"])
    assert sorted(p.name for p in run_folder("t").checkpoints.glob("step-*")) == ["step-00000002"]


def test_data_that_changed_since_is_refused(words, chats):
    with pytest.raises(Stopped):
        _train([*words, "train.steps=100000", "limits.time=0.5s"])
    before = chats.read_text()
    chats.write_text(before.replace("colour", "shape"))
    with pytest.raises(UserError, match=r"was started with other data .*name=NEWNAME"):
        _train([*words, "train.steps=100000", "limits.time=0.5s"])
    chats.write_text(before)
    with pytest.raises(Stopped):
        _train([*words, "train.steps=100000", "limits.time=0.5s"])


def test_a_disk_too_small_for_a_checkpoint_is_reported_before_training(words):
    with pytest.raises(RunFailed, match="free some space, or set save"):
        _train([*words, "save.min_free=100000TiB"])
    assert not run_folder("t").metrics.exists()


def test_a_resumed_run_keeps_the_precision_it_started_with(words, monkeypatch):
    from sojourn.train import local_device
    from sojourn.train.resolve import resolve_here

    config = load_run([*words, "train.precision=auto"]).config
    monkeypatch.setattr(local_device, "choose_precision", lambda device: ("bf16", "measured faster"))
    started = resolve_here(config).config
    monkeypatch.setattr(local_device, "choose_precision", lambda device: ("fp32", "measured otherwise"))
    assert started.train.precision == "bf16"
    assert resolve_here(config, started).config.train.precision == "bf16"
    assert resolve_here(config).config.train.precision == "fp32"
