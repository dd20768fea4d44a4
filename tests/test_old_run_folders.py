"""A run folder and a YAML file of the version before keys were renamed: both still work, and the run resumes.

`fixtures/old_run` was made by that version and killed after step 20 of 40; `undisturbed.jsonl` has the metrics of the
same run without the kill."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from conftest import called
from sojourn.config.keys import all_keys
from sojourn.config.load import load_run, read_config
from sojourn.config.renamed import RENAMED, upgrade
from sojourn.data.prepare import prepare_run
from sojourn.errors import UserError
from sojourn.run.home import run_folder
from sojourn.storage.files import read_json_lines, write_json
from sojourn.train.checkpoint.config_changes import requests_no_change
from sojourn.train.loop import train

OLD = Path(__file__).parent / "fixtures/old_run"
NOTES = (
    "data.split_digits is now advanced.split_digits",
    "train.checkpointing is now train.activation_checkpointing",
    "train.loss=chunked is now advanced.chunked_loss=on",
    "train.fused is now advanced.fused_forwards",
    "train.ahead is now advanced.async_step",
    "train.compile_cache is now advanced.compile_cache",
)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = shutil.copytree(OLD, tmp_path / "home")
    monkeypatch.setenv("SOJOURN_HOME", str(folder))
    monkeypatch.chdir(folder)
    return folder


def losses_by_step(metrics: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in read_json_lines(metrics) if line["kind"] == "train"}


def test_an_old_run_folder_resumes_and_ends_as_if_undisturbed(home: Path) -> None:
    run = home / "runs/old"
    done = called("train", "old.yaml")
    assert done.returncode == 0, done.stderr
    for note in NOTES:
        assert f"note: {note}\n" in done.stdout + done.stderr
    starts = [line["step"] for line in read_json_lines(run / "events.jsonl") if line["kind"] == "start"]
    assert starts == [0, 20]
    assert not [line for line in read_json_lines(run / "events.jsonl") if line["kind"] == "config_changed"]
    assert [path.name for path in (home / "prepared").glob("[!.]*")] == ["d0b46f7a91b524cb"]  # not prepared again
    found, wanted = losses_by_step(run / "metrics.jsonl"), losses_by_step(OLD / "undisturbed.jsonl")
    assert found == pytest.approx(wanted, rel=1e-3) and list(wanted) == list(range(1, 41))


def test_the_old_folder_given_as_the_run_resumes_without_notes(home: Path) -> None:
    loaded = load_run(["runs/old"])
    assert loaded.notes == ()
    assert loaded.config.train.activation_checkpointing == "full" and loaded.config.advanced.chunked_loss == "on"
    assert requests_no_change(read_config(home / "runs/old/run.yaml"), load_run(["old.yaml"]).config)


def test_split_digits_still_decides_the_prepared_artefact(home: Path) -> None:
    names = [
        prepare_run(load_run(["old.yaml", *extra]).config, home / "prepared").path.name
        for extra in ([], ["advanced.split_digits=true"], ["data.split_digits=false"])
    ]
    assert names[:2] == ["d0b46f7a91b524cb"] * 2 and names[2] != names[0]


def test_an_old_ladder_file_is_honoured(home: Path) -> None:
    run = run_folder("old")
    write_json(run.ladder, {"device": "cpu", "micro_batch": 1, "checkpointing": "full", "loss": "chunked"})
    train(load_run(["old.yaml", "train.checkpointing=off", "train.loss=whole"]).config, run)
    config = read_config(run.config)
    assert (config.train.micro_batch, config.train.activation_checkpointing) == (1, "full")
    assert config.advanced.chunked_loss == "on" and config.train.cuda_graphs == "off"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("train.checkpointing=selective", "train.activation_checkpointing=selective"),
        ("train.gradient_checkpointing=true", "train.activation_checkpointing=full"),
        ("train.loss=whole", "advanced.chunked_loss=off"),
        ("train.loss=auto", "advanced.chunked_loss=auto"),
        ("train.fp8=inner", "train.fp8=except_last_layer"),
        ("train.ahead=off", "advanced.async_step=off"),
        ("train.fused=off", "advanced.fused_forwards=off"),
        ("train.hopper=off", "advanced.hopper_kernels=off"),
        ("train.compile_cache=folder", "advanced.compile_cache=folder"),
        ("data.split_digits=false", "advanced.split_digits=false"),
        ("parallel.reshard=false", "advanced.reshard_after_forward=false"),
    ],
)
def test_an_old_spelling_means_the_same_wherever_it_is_written(old: str, new: str, tmp_path: Path) -> None:
    key, _, value = old.partition("=")
    section, _, name = key.partition(".")
    file = tmp_path / "run.yaml"
    file.write_text(f"extends: small\nname: small\n{section}:\n  {name}: {value}\n", encoding="utf-8")
    wanted = load_run(["small", new]).config
    given = [load_run([str(file)]), load_run(["small", old]), load_run(["small", f"--{key}", value])]
    for loaded in given:
        assert loaded.config == wanted
        assert len(loaded.notes) == (0 if "gradient" in old else 1)
        assert all(note.startswith(key) and new.partition("=")[0] in note for note in loaded.notes)


def test_the_nearer_of_two_spellings_counts_and_both_in_one_place_are_an_error(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("extends: qlora-7b\ntrain:\n  checkpointing: full\n", encoding="utf-8")
    assert load_run([str(file)]).config.train.activation_checkpointing == "full"
    assert load_run([str(file), "train.activation_checkpointing=off"]).config.train.activation_checkpointing == "off"
    file.write_text("train:\n  checkpointing: full\n  activation_checkpointing: off\n", encoding="utf-8")
    with pytest.raises(UserError) as wrong:
        load_run([str(file)])
    both = "train.checkpointing and train.activation_checkpointing are the same setting; keep train.activation_che"
    assert str(wrong.value).startswith(f"{file}:3: {both}")
    with pytest.raises(UserError, match=r"^command line train\.loss=whole: .* keep advanced\.chunked_loss$"):
        load_run(["small", "advanced.chunked_loss=on", "train.loss=whole"])


def test_a_wrong_value_under_an_old_key_names_the_line_and_the_new_key(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("extends: small\ntrain:\n  loss: tall\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"run\.yaml:3: advanced\.chunked_loss: “tall” given; allowed: auto or on"):
        load_run([str(file)])


def test_digits_for_an_old_key_that_takes_text_are_text() -> None:
    assert load_run(["small", "train.compile_cache=2024"]).config.advanced.compile_cache == "2024"


def test_every_new_key_exists_and_no_old_one_does() -> None:
    keys = all_keys()
    assert set(RENAMED.values()) <= set(keys) and not set(RENAMED) & set(keys)


def test_a_stored_configuration_is_upgraded_whole() -> None:
    old = {"name": "x", "train": {"loss": "whole", "steps": 3}, "parallel": {"reshard": True}}
    kept = json.dumps(old)
    new = {"name": "x", "train": {"steps": 3}, "parallel": {}}
    assert upgrade(old) == new | {"advanced": {"chunked_loss": "off", "reshard_after_forward": True}}
    assert json.dumps(old) == kept and upgrade(upgrade(old)) == upgrade(old)
