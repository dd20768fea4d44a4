"""chat, generate and eval open a run wherever it stands: at its end, at a checkpoint, at the best step."""

import json
import math
import shutil

import pytest
import torch

from conftest import called
from sojourn.data.artefact import artefact_of
from sojourn.export.open_source import open_weights
from sojourn.infer.find import find_model
from sojourn.infer.load import load_model
from sojourn.run.home import run_folder
from tiny import LORA, losses, run_of, run_train, stop_after

FULL = ("method.kind=full", "train.lr=1e-3")
PROMPT = ("--prompt", "What colour is the cat of house 3?", "--max-tokens", "5")


@pytest.fixture(scope="module")
def done(tiny):
    """A finished run with checkpoints of steps 4, 8 and 12, and best/."""
    return tiny.whole("save.every_steps=4", "save.keep=9", "train.eval_every=4", "data.eval_fraction=0.2")


def _stopped(tiny, *extra):
    words = tiny.words(*extra)
    with pytest.MonkeyPatch.context() as patch:
        stop_after(patch, 5)
        assert called("train", *words).returncode == 3
    return run_of(words)


def _same(one, other):
    ours, theirs = one.model.state_dict(), other.model.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize(
    "method",
    [(), (*LORA, "method.modules_to_save=lm_head"), *(pytest.param(m, marks=pytest.mark.slow) for m in (FULL, LORA))],
    ids=str,
)
def test_the_last_checkpoint_is_the_final_model(tiny, method):
    """Weights, tokenizer and stop tokens."""
    name = tiny.whole(*method, "train.steps=3").path.name
    final, last = load_model(name, "cpu"), load_model(name, "cpu", "latest")
    assert last.path.name == "step-00000003" and _same(final, last)
    assert final.tokenizer.get_vocab() == last.tokenizer.get_vocab()
    assert final.tokenizer.chat_template == last.tokenizer.chat_template
    eos = [one.model.generation_config.eos_token_id for one in (final, last)]
    assert eos[0] == eos[1] and set(artefact_of(final.run).stop_ids) <= set(eos[0])
    said = [called("generate", name, *PROMPT, *extra).stdout for extra in ((), ("--checkpoint", "latest"))]
    assert said[0] == said[1] != ""


def test_an_adapter_elsewhere_keeps_the_stop_tokens_of_its_run(tiny, tmp_path):
    run = tiny.whole(*LORA, "train.steps=3")
    shutil.copytree(run.final, tmp_path / "adapter")
    opened = load_model(str(tmp_path / "adapter"), "cpu")
    stops = artefact_of(run).stop_ids
    assert opened.run is None and stops and set(stops) <= set(opened.model.generation_config.eos_token_id)
    assert set(stops) <= set(open_weights(str(tmp_path / "adapter")).weights.generation_config["eos_token_id"])
    (tmp_path / "adapter" / "generation_config.json").write_text('{"eos_token_id": ["x", -1, null, 7]}')
    assert 7 in load_model(str(tmp_path / "adapter"), "cpu").model.generation_config.eos_token_id


def test_half_precision_is_rounded_as_in_the_final_model(tiny):
    name = tiny.whole("train.precision=bf16", "train.steps=2").path.name
    assert _same(load_model(name, "cpu"), load_model(name, "cpu", "latest"))


def test_a_checkpoint_of_qlora_opens_as_its_final_model_does(tiny):
    pytest.importorskip("bitsandbytes")
    name = tiny.whole(*LORA, "method.kind=qlora", "train.steps=2").path.name
    assert _same(load_model(name, "cpu"), load_model(name, "cpu", "latest"))


def test_a_stopped_run_is_opened_at_its_newest_checkpoint_which_a_line_says(tiny):
    run = _stopped(tiny, "data.eval_fraction=0.2")
    name = run.path.name
    said = called("generate", name, *PROMPT, "--json")
    assert said.returncode == 0, said.stderr
    assert json.loads(said.stdout)[0]["tokens"] <= 5
    assert said.stderr.count("\n") == 1 and f"{name} has no final model (stopped, step 5 of 12)" in said.stderr
    assert "opened at step 5" in said.stderr
    scored = _scores(called("eval", name, "--tasks", "0", "--json"))
    assert math.isfinite(scored["loss"])
    by_folder = called("generate", str(run.path), *PROMPT)
    by_checkpoint = called("generate", str(run.checkpoints / "step-00000005"), *PROMPT)
    other_spelling = called("generate", str(run.path / "checkpoint-5"), *PROMPT)
    assert by_folder.stdout == by_checkpoint.stdout == other_spelling.stdout != ""


def _scores(said) -> dict[str, float]:
    return {row["metric"]: row["value"] for row in json.loads(said.stdout)["results"]}


def test_steps_and_best_are_chosen_by_name(done):
    name = done.path.name
    assert load_model(name, "cpu").path == done.final
    assert load_model(name, "cpu", "best").path == done.best
    assert load_model(name, "cpu", "4").path.name == "step-00000004"
    assert find_model(f"{name}@best").path == done.best and find_model(f"{name}@8").path.name == "step-00000008"
    assert not _same(load_model(name, "cpu", "4"), load_model(name, "cpu", "8"))
    wrong = called("generate", name, *PROMPT, "--checkpoint", "5")
    assert wrong.returncode == 2 and "there are: final, best, latest, 4, 8, 12" in wrong.stderr
    twice = called("generate", str(done.final), *PROMPT, "--checkpoint", "4")
    assert twice.returncode == 2 and "is one model already" in twice.stderr


def test_the_loss_at_a_step_is_that_of_the_training_there(done):
    """eval --checkpoint N gives what the run logged at step N."""
    logged = {line["step"]: line["loss"] for line in done.read_metrics() if line["kind"] == "eval"}
    for step in ("4", "8"):
        scored = _scores(
            called("eval", done.path.name, "--checkpoint", step, "--tasks", "0", "--json", "--device", "cpu")
        )
        assert scored["loss"] == pytest.approx(logged[int(step)], rel=1e-5)


def test_a_damaged_checkpoint_is_passed_over_and_left_where_it_is(tiny):
    run = _stopped(tiny, "save.every_steps=2", "save.keep=9")
    newest = run.checkpoints / "step-00000005" / "model.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1])
    said = called("generate", run.path.name, *PROMPT)
    assert said.returncode == 0 and "damaged" in said.stderr and "opened at step 4" in said.stderr
    assert newest.exists()
    named = called("generate", str(newest.parent), *PROMPT)
    assert named.returncode == 2 and "not a complete checkpoint" in named.stderr


def test_a_checkpoint_elsewhere_finds_its_run_and_a_run_without_one_says_so(tiny, tmp_path):
    run = _stopped(tiny)
    elsewhere = shutil.copytree(run.checkpoints / "step-00000005", tmp_path / "rescued" / "step-00000005")
    assert called("generate", str(elsewhere), *PROMPT).returncode == 0
    shutil.rmtree(run.checkpoints)
    none = called("chat", run.path.name)
    assert none.returncode == 2 and "no checkpoint yet (step 5 of 12)" in none.stderr
    shutil.rmtree(run.path)
    lost = called("generate", str(elsewhere), *PROMPT)
    assert lost.returncode == 2 and "without its run" in lost.stderr


def test_without_its_prepared_data_one_line_says_what_to_type(tiny):
    run = _stopped(tiny, "data.max_length=48")
    shutil.rmtree(json.loads(run.environment.read_text())["data"])
    said = called("generate", run.path.name, *PROMPT)
    assert said.returncode == 2 and f"run: sojourn prepare {run.config}" in said.stderr
    assert called("prepare", str(run.config)).returncode == 0
    assert called("generate", run.path.name, *PROMPT).returncode == 0


def test_eval_scores_any_file(done, tiny):
    """The training file itself: near the run's own losses; and whatever model it is."""
    name = done.path.name
    scored = _scores(called("eval", name, "--data", str(tiny.chats), "--json"))
    assert scored["loss"] == pytest.approx(losses(done)[-1], rel=0.2) and "exact_match" not in scored
    one = tiny.home / "one.jsonl"
    one.write_text('{"prompt": "What colour is the cat of house 0?", "completion": "It is red."}\n')
    single = called("eval", name, "--data", str(one))
    assert single.returncode == 0 and "one.jsonl: loss (1 examples)" in single.stdout
    model = called("eval", str(tiny.base), "--data", str(one))
    assert model.returncode == 0 and "one.jsonl: loss" in model.stdout, model.stderr
    absent = called("eval", name, "--data", "absent.jsonl")
    assert absent.returncode == 2 and "absent.jsonl" in absent.stderr


def test_eval_on_nothing_is_an_error(tiny):
    name = tiny.whole("data.eval_fraction=0", "train.steps=1").path.name
    said = called("eval", name, "--tasks", "0")
    assert said.returncode == 2 and "nothing to evaluate" in said.stderr and "--data FILE" in said.stderr
    model = called("eval", str(tiny.base), "--tasks", "0")
    assert model.returncode == 2 and "nothing to evaluate" in model.stderr


def test_evaluations_that_cannot_be_made_are_said_before_training(tiny, capsys):
    words = tiny.words("data.eval_fraction=0", "train.eval_every=1", "train.steps=1")
    run_train(words)
    said = capsys.readouterr().out
    assert "warning: train.eval_every asks for evaluations, but no rows are held out" in said


def test_a_cut_answer_says_so_and_several_prompts_are_told_apart(done):
    name, long = done.path.name, "What colour is the cat of house 3? " * 4
    said = called("generate", name, "-p", "What colour is the cat of house 3?", "-p", long, "--max-tokens", "400")
    assert said.returncode == 0, said.stderr
    assert said.stdout.startswith("[1] What colour is the cat") and "\n[2] What colour" in said.stdout
    assert "fill the model's context of 64" in said.stderr or "cut" not in said.stderr
    short = called("generate", name, "-p", "What colour is the cat of house 3?", "--max-tokens", "1", "--json")
    assert json.loads(short.stdout)[0]["finish_reason"] == "length"
    whole = json.loads(called("generate", name, "-p", "a", "-p", long, "--max-tokens", "400", "--json").stdout)
    alone = json.loads(called("generate", name, "-p", "a", "--max-tokens", "400", "--json").stdout)
    assert whole[0] == alone[0]  # the longer prompt beside it does not shorten the answer
    over = called("generate", name, "-p", "a", "-p", "What colour is it? " * 40)
    assert over.returncode == 2 and "What colour is it?" in over.stderr and "context is 64" in over.stderr


def test_a_run_that_is_not_there_is_one_line(tiny):
    said = called("generate", "absent", *PROMPT)
    assert said.returncode == 2 and said.stderr.count("\n") == 1
    assert run_folder("absent").exists() is False
