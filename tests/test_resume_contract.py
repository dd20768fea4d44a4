"""What may change between two calls of a run, what may not, and how to go on with what may not."""

import hashlib
import json
import shutil

import pytest

from shared import make_base
from sojourn.config.load import load_run, read_config
from sojourn.errors import Stopped, UserError
from sojourn.run.folder import RunFolder
from sojourn.run.fork import fork_run
from sojourn.run.home import run_folder
from sojourn.train.loop import train
from sojourn.train.verify_resume import compare


def _train(words: list[str], fork: str | None = None) -> RunFolder:
    config = load_run(words).config
    config = config if fork is None else fork_run(config, fork)
    run = run_folder(config.name, config.save.folder)
    train(config, run)
    return run


def _stopped(words: list[str]) -> RunFolder:
    """Stopped after its first step of this call."""
    with pytest.raises(Stopped):
        _train([*words, "limits.time=0.001s"])
    config = load_run(words).config
    return run_folder(config.name, config.save.folder)


def _weights(run: RunFolder, name: str = "model.safetensors") -> str:
    return hashlib.sha256((run.final / name).read_bytes()).hexdigest()


def _start(run: RunFolder) -> int:
    lines = [json.loads(line) for line in run.events.read_text().splitlines()]
    return [line["step"] for line in lines if line["kind"] == "start"][-1]


def test_a_run_goes_on_by_its_folder(words, home):
    peace = _train([*words, "name=peace"])
    run = _stopped(words)
    moved = home / "elsewhere"
    shutil.move(run.path, moved)
    again = _train([str(moved), "limits.time=null"])
    assert again.path == moved and _start(again) == 1 and _weights(again) == _weights(peace)


def test_data_at_another_place_is_the_same_data(words, chats, home):
    peace = _train([*words, "name=peace"])
    _stopped(words)
    there = home / "there"
    there.mkdir()
    shutil.move(chats, there / "renamed.jsonl")
    run = _train([*words, f"data.sources={there / 'renamed.jsonl'}"])
    assert _start(run) == 1 and _weights(run) == _weights(peace)


def test_a_base_at_another_place_is_known_by_its_content(words, chats, base, home):
    tuned = [*[w for w in words[1:] if "d_model" not in w], "method.kind=lora", "method.rank=4"]
    _stopped([*tuned, f"model.base={base}"])
    moved = home / "moved"
    shutil.copytree(base, moved)
    run = _train([*tuned, f"model.base={moved}"])
    assert _start(run) == 1
    other = make_base(chats, home, "llama", num_hidden_layers=3)
    _stopped([*tuned, f"model.base={moved}", "name=second"])
    with pytest.raises(UserError, match=r"model\.base was .*--fork NEWNAME"):
        _train([*tuned, f"model.base={other}", "name=second"])


def test_an_adapter_at_another_place_is_known_by_its_content(words, base, home):
    tuned = [*[w for w in words[1:] if "d_model" not in w], f"model.base={base}", "method.kind=lora", "method.rank=4"]
    adapter = _train([*tuned, "name=adapter", "train.steps=1"]).final
    further = [*tuned, "name=further"]
    _stopped([*further, f"method.adapter={adapter}"])
    shutil.copytree(adapter, home / "moved")
    assert _start(_train([*further, f"method.adapter={home / 'moved'}"])) == 1


def test_another_micro_batch_and_how_memory_is_saved_change_only_rounding(words):
    peace = _train([*words, "name=peace"])
    _stopped(words)
    run = _train([*words, "train.micro_batch=2", "train.activation_checkpointing=full", "advanced.chunked_loss=off"])
    curves = [[line["loss"] for line in one.read_metrics() if line["kind"] == "train"] for one in (run, peace)]
    assert curves[0] == pytest.approx(curves[1], rel=1e-5)
    changed = [json.loads(line) for line in run.events.read_text().splitlines()]
    assert {"train.micro_batch", "train.activation_checkpointing", "advanced.chunked_loss"} <= {
        line["key"] for line in changed if line["kind"] == "config_changed"
    }


def test_a_fork_goes_on_with_new_settings_and_leaves_the_old_run_alone(words):
    old = _train(words)
    kept = _weights(old)
    with pytest.raises(UserError, match="--fork NEWNAME"):
        _train([*words, "train.lr=1e-4", "train.steps=20"])
    new = _train([*words, "train.lr=1e-4", "train.steps=20"], fork="second")
    assert _start(new) == 12 and new.status().step == 20 and new.path.name == "second"
    assert _weights(old) == kept and _weights(new) != kept
    assert read_config(new.config).train.lr == 1e-4


def test_a_fork_typed_again_continues_the_fork(words):
    _train([*words, "train.steps=6"])
    with pytest.raises(Stopped):
        _train([*words, "train.lr=1e-4", "limits.time=0.001s"], fork="second")
    again = _train([*words, "train.lr=1e-4"], fork="second")
    assert _start(again) == 7 and again.status().state == "done"


def test_a_fork_with_another_optimizer_begins_its_state_anew(words, capsys):
    _train([*words, "train.steps=4"])
    new = _train([*words, "train.optimizer=muon"], fork="second")
    assert new.status().state == "done" and "the optimizer is another one" in capsys.readouterr().out


def test_a_fork_does_not_pay_for_the_old_run(words):
    _train([*words, "limits.price_per_hour=3600 CNY"])
    new = _train([*words, "limits.price_per_hour=3600 CNY", "train.steps=13"], fork="second")
    state = json.loads((new.checkpoints / "step-00000013" / "state.json").read_text())
    assert state["money"] == pytest.approx(state["seconds"], abs=0.01)  # one a second, of this run alone


def test_what_cannot_be_forked_is_one_line(words):
    with pytest.raises(UserError, match="no checkpoint to start from"):
        _train(words, fork="second")
    _train(words)
    with pytest.raises(UserError, match="is the same run"):
        _train(words, fork="t")
    with pytest.raises(UserError, match="belongs to another model"):
        _train([*words, "model.d_model=128"], fork="wider")


def test_a_run_that_is_done_says_so_without_opening_its_model(words, monkeypatch, capsys):
    from sojourn.train import loop

    _train(words)
    with monkeypatch.context() as patch:
        patch.setattr(loop, "open_session", lambda *given: 1 / 0)
        run = _train(words)
    assert "already done (12 steps)" in capsys.readouterr().out and run.status().state == "done"
    with pytest.raises(UserError, match="--fork NEWNAME"):
        _train([*words, "train.lr=1e-4"])


def test_the_contract_is_proved_on_the_users_own_run(words, fork_server):
    said = fork_server.run("verify-resume", *words, "--steps", "40", "--json", fork_children=True)
    assert said.returncode == 0, said.stderr
    verdict = json.loads(said.stdout)
    assert verdict["holds"] and verdict["identical"] and verdict["continued_from"] >= 10
    assert verdict["killed_at"] >= verdict["continued_from"]


def test_a_run_that_does_not_come_back_the_same_is_reported(words):
    """Another rate from the middle on, as if a restore had forgotten something."""
    peace = _train([*words, "name=peace", "save.every_steps=4", "save.keep=9"])
    other = _train([*words, "name=other", "train.lr=1e-4", "save.resume=" + str(peace.checkpoints / "step-00000004")])
    for line in peace.metrics.read_text().splitlines()[:4]:
        other.metrics.write_text(line + "\n" + other.metrics.read_text())
    verdict = compare(peace, other, 12, killed_at=5)
    assert not verdict.identical and not verdict.holds and "NOT the same" in verdict.message
    assert compare(peace, peace, 12, killed_at=5).holds
