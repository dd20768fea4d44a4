"""Evaluation during training: scores, samples, the best model, and ending early."""

import json
import math

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from conftest import called
from shared import make_base
from sojourn.config.load import load_run
from sojourn.errors import UserError
from sojourn.run.folder import RunFolder
from sojourn.run.home import run_folder
from sojourn.train.loop import train


def _train(words: list[str]) -> RunFolder:
    config = load_run(words).config
    run = run_folder(config.name)
    train(config, run)
    return run


def _lines(run: RunFolder, kind: str) -> list[dict]:
    return [line for line in run.read_metrics() if line["kind"] == kind]


@pytest.fixture
def words(words):
    return [*words, "data.eval_fraction=0.2", "train.eval_every=4"]


def test_scores_are_those_of_plain_transformers(words):
    """Loss, perplexity, share of likeliest tokens and bits per byte, worked out anew from final/ and held-out rows."""
    run = _train([*words, "data.packing=off", "train.eval_rows=16"])
    from sojourn.data.artefact import Artefact

    artefact = Artefact(run_folder("t").path.parent.parent / json.loads(run.environment.read_text())["data"])
    model = AutoModelForCausalLM.from_pretrained(run.final).eval()
    tokenizer = AutoTokenizer.from_pretrained(run.final)
    nats = right = targets = size = 0
    for number in range(min(16, len(artefact.eval))):
        ids, mask, _ = artefact.eval.row(number)
        with torch.no_grad():
            logits = model(torch.tensor([[int(i) for i in ids]])).logits[0]
        spelled = [int(i) for i, m in zip(ids[1:], mask[1:], strict=True) if m]
        for t in range(1, len(ids)):
            if mask[t]:
                nats -= float(logits[t - 1].log_softmax(-1)[int(ids[t])])
                right += int(logits[t - 1].argmax()) == int(ids[t])
                targets += 1
        size += len(tokenizer.decode(spelled, skip_special_tokens=True).encode())
    last = _lines(run, "eval")[-1]
    assert last["step"] == 12
    assert last["loss"] == pytest.approx(nats / targets, rel=1e-5)
    assert last["perplexity"] == pytest.approx(math.exp(nats / targets), rel=1e-4)
    assert last["accuracy"] == pytest.approx(right / targets)
    assert last["bits_per_byte"] == pytest.approx(nats / math.log(2) / size, rel=1e-5)


def test_evaluating_changes_nothing_about_the_training(words):
    often, never = _train([*words, "train.eval_every=1", "name=often"]), _train([*words, "train.eval_every=null"])
    assert [line["loss"] for line in _lines(often, "train")] == [line["loss"] for line in _lines(never, "train")]


def test_the_model_answers_the_same_prompts_at_every_evaluation(words):
    run = _train([*words, "train.samples=What colour is the cat of house 3?", "train.sample_tokens=5"])
    samples = _lines(run, "sample")
    assert [line["step"] for line in samples] == [4, 8, 12]
    assert {line["prompt"] for line in samples} == {"What colour is the cat of house 3?"}
    said = called("generate", "t", "--prompt", samples[0]["prompt"], "--max-tokens", "5")
    assert said.stdout.strip() == samples[-1]["text"].strip()


def test_without_prompts_it_continues_held_out_chats(words):
    samples = _lines(_train(words), "sample")
    assert len(samples) == 6 and all("What colour" in line["prompt"] for line in samples)


def test_best_is_the_model_with_the_lowest_held_out_loss(words, monkeypatch):
    from sojourn.train import evaluation as assess

    losses = iter([3.0, 2.0, 2.5])
    monkeypatch.setattr(assess, "evaluate_rows", lambda *given: (next(losses), 0.5))
    run = _train([*words, "save.every_steps=4", "save.keep=9"])
    assert [line["best"] for line in _lines(run, "eval")] == [True, True, False]
    from safetensors.torch import load_file

    best, saved = (
        load_file(run.best / "model.safetensors"),
        load_file(run.checkpoints / "step-00000008/model.safetensors"),
    )
    assert all(torch.equal(best[name], saved[name]) for name in best)
    assert AutoModelForCausalLM.from_pretrained(run.best) is not None
    said = called("generate", str(run.best), "--prompt", "hello", "--max-tokens", "2")
    assert said.returncode == 0, said.stderr


def test_patience_ends_a_run_that_gets_no_better_and_a_second_call_leaves_it_alone(words, monkeypatch, capsys):
    from sojourn.train import evaluation as assess

    losses = iter([3.0, 3.1, 3.2, 3.3])
    monkeypatch.setattr(assess, "evaluate_rows", lambda *given: (next(losses), 0.5))
    patient = [*words, "train.steps=100", "train.patience=2"]
    run = _train(patient)
    status = run.status()
    assert (status.state, status.step) == ("done", 12) and run.has_final()
    assert "no better held-out loss in 2 evaluations (best 3.0000 at step 4)" in capsys.readouterr().out
    _train(patient)
    assert "already done (12 steps)" in capsys.readouterr().out


def test_patience_survives_a_restart(words, monkeypatch):
    from sojourn.errors import Stopped
    from sojourn.train import evaluation as assess
    from sojourn.train.faults.guard import Guard

    losses = iter([3.0, 3.1, 3.2, 3.3])
    monkeypatch.setattr(assess, "evaluate_rows", lambda *given: (next(losses), 0.5))
    patient = [*words, "train.steps=100", "train.patience=2"]
    calls = iter(range(100))
    with monkeypatch.context() as patch:
        patch.setattr(Guard, "should_stop", lambda self: "a test" if next(calls) == 9 else None)
        with pytest.raises(Stopped):
            _train(patient)
    assert _train(patient).status().step == 12


def test_samples_stay_within_what_a_model_can_hold(chats, home):
    base = make_base(chats, home, "gpt2", n_positions=64)
    run = _train([
        f"model.base={base}", f"data.sources={chats}", "method.kind=full", "data.max_length=64", "train.steps=2",
        "train.global_batch=4", "train.eval_every=1", "data.eval_fraction=0.2", "log.tensorboard=off", "name=t",
        "train.device=cpu", "train.samples=" + "What colour is it? " * 30,
    ])  # fmt: skip
    assert len(_lines(run, "sample")) == 2


def test_a_kill_between_patience_and_the_final_model_ends_there_too(words, monkeypatch):
    from sojourn.train import evaluation as assess
    from sojourn.train import steps

    losses = iter([3.0, 3.1, 3.2, 3.3])
    monkeypatch.setattr(assess, "evaluate_rows", lambda *given: (next(losses), 0.5))
    patient = [*words, "train.steps=100", "train.patience=2"]
    with monkeypatch.context() as patch:
        patch.setattr(steps, "write_final_model", lambda *given: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            _train(patient)
    run = _train(patient)
    assert run.status().step == 12 and run.has_final()


def test_patience_without_evaluations_is_refused(words):
    with pytest.raises(UserError, match=r"set train\.eval_every too"):
        _train([*words, "train.eval_every=null", "train.patience=2"])
