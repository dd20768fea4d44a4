"""Names of runs that the user has not named, and advice in errors that works when it is followed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from conftest import called
from sojourn.config.load import load_run
from sojourn.run.home import run_folder
from sojourn.train.run_name import choose_name
from tiny import Tiny

TINY = [
    "data.vocab_size=400", "data.max_length=64", "train.device=cpu", "train.precision=fp32", "train.rehearse=off",
    "log.tensorboard=off", "train.steps=1", "model.num_heads=2",
]  # fmt: skip


@pytest.fixture
def data(home: Path, tiny: Tiny) -> str:
    (home / "chats.jsonl").write_bytes(tiny.chats.read_bytes())
    return "data.sources=chats.jsonl"


def train(*words: str) -> str:
    said = called("train", *words)
    assert said.returncode == 0, said.stderr
    return said.stdout


def runs(home: Path) -> set[str]:
    return {path.name for path in (home / "runs").iterdir()}


def test_commands_of_different_sizes_are_different_runs_and_each_finds_its_own_again(home: Path, data: str) -> None:
    first = [*TINY, data, "--d_model", "64", "--num_layers", "1", "--batch_size", "2"]
    assert "no run named; starting 64x1 from the preset small" in train(*first)
    train(*TINY, data, "--d_model", "64", "--num_layers", "2", "--batch_size", "2")
    out = train(*first, "--batch_size", "4")
    assert (
        "runs/64x1 was started with other settings (train.global_batch was 2, now 4); this run is called 64x1-2" in out
    )
    assert runs(home) == {"64x1", "64x2", "64x1-2"}
    assert "runs/64x1-2: already done" in train(*first, "--batch_size", "4") and "64x1-2" not in train(*first)
    assert runs(home) == {"64x1", "64x2", "64x1-2"}


def test_a_preset_with_other_settings_or_data_gets_a_number_and_moved_data_does_not(home: Path, data: str) -> None:
    preset = ["smoke", *TINY, "model.d_model=64"]
    train(*preset, data)
    assert "this run is called smoke-2" in train(*preset, data, "train.lr=1e-4")
    (home / "moved").mkdir()
    (home / "chats.jsonl").rename(home / "moved/chats.jsonl")
    assert "runs/smoke: already done" in train(*preset, "data.sources=moved/chats.jsonl", "save.keep=2")
    text = (home / "moved/chats.jsonl").read_text(encoding="utf-8")
    (home / "other.jsonl").write_text(text[: text.index("\n", 9000) + 1], encoding="utf-8")
    out = train(*preset, "data.sources=other.jsonl")
    assert "runs/smoke was started with other data; this run is called smoke-3" in out
    assert runs(home) == {"smoke", "smoke-2", "smoke-3"}


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["--d_model", "512", "--num_layers", "6"], "512x6"),
        (["--params", "20M"], "20M"),
        (["--depth", "4"], "depth-4"),
        (["--model_name", "Qwen/Qwen2.5-7B", "--load_in_4bit"], "Qwen2.5-7B-qlora"),
        (["--model_name", "some where/my model.gguf"], "my-model-lora"),
        (["--batch_size", "8"], "256x2"),
    ],
)
def test_a_run_is_called_after_what_it_is(words: list[str], name: str) -> None:
    loaded = load_run(words)
    assert (loaded.config.name, loaded.name_given) == (name, False)


def test_a_name_that_was_given_is_kept(home: Path) -> None:
    Path("mine.yaml").write_text("extends: small\n", encoding="utf-8")
    for words, name in (
        (["small", "name=x"], "x"),
        (["mine.yaml"], "mine"),
        (["--depth", "2", "--run_name", "y"], "y"),
    ):
        loaded = load_run(words)
        assert loaded.name_given and loaded.config.name == name and choose_name(loaded) == (loaded.config, None)
    assert not load_run(["small"]).name_given


def followed(words: list[str], message: str) -> str:
    """The command with what the message says to type."""
    advice = re.search(r": ((?:[\w.]+=\w+ )?(?:--fork NEWNAME|name=NEWNAME|save\.folder=NEWFOLDER))", message)
    assert advice, message
    return train(*words, *advice[1].split())


@pytest.mark.parametrize(
    ("where", "change"),
    [
        ("name=mine", "train.lr=1e-4"), ("save.folder=mine", "model.num_layers=2"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (
            ("name=mine", "model.num_layers=2"), ("name=mine", "train.optimizer=muon"),
            ("name=mine", "train.global_batch=4"), ("save.folder=mine", "train.lr=1e-4"),
            ("save.folder=mine", "train.optimizer=muon"), ("save.folder=mine", "train.global_batch=4"))),
    ],
)  # fmt: skip
def test_the_advice_of_a_refused_resume_works(home: Path, data: str, change: str, where: str) -> None:
    words = ["smoke", *TINY, data, "model.d_model=64", where, "train.steps=2"]
    train(*words)
    said = called("train", *words, change)
    assert said.returncode == 2 and "was started with other settings" in said.stderr
    out = followed([*words, change], said.stderr)
    assert "done: the model is in" in out and "NEW" in out
    assert ("resuming from step 2" in out) == (not change.startswith("model"))


def test_the_advice_of_a_finished_run_trains_on(home: Path, data: str) -> None:
    words = ["smoke", *TINY, data, "model.d_model=64", "train.steps=2"]
    train(*words)
    out = followed(words, train(*words))
    status = run_folder("NEWNAME").status()
    assert "resuming from step 2" in out and status is not None and (status.state, status.step) == ("done", 4)


def test_the_advice_for_other_data_works(home: Path, data: str) -> None:
    words = ["smoke", *TINY, data, "model.d_model=64", "name=mine"]
    train(*words)
    with Path("chats.jsonl").open("a", encoding="utf-8") as file:
        file.write('\n{"prompt": "new", "completion": "words"}' * 3)
    words += ["save.keep=3"]  # else it is done already
    said = called("train", *words)
    assert said.returncode == 2 and "was started with other data" in said.stderr
    assert "done: the model is in" in followed(words, said.stderr)


@pytest.mark.parametrize(
    "record",
    [
        {"instruction": "a {n}", "chosen": "b {n}", "rejected": "c {n}"},
        {"prompt": "a {n}", "chosen": "b {n}", "rejected": "c {n}"},
        {"chosen": [{"role": "user", "content": "a {n}"}, {"role": "assistant", "content": "b {n}"}],
         "rejected": [{"role": "user", "content": "a {n}"}, {"role": "assistant", "content": "c {n}"}]},
    ],
    ids=["instruction", "prompt", "conversations"],
)  # fmt: skip
def test_the_hint_for_preference_pairs_names_columns_that_are_there(home: Path, record: dict[str, Any]) -> None:
    lines = [json.dumps(record).replace("{n}", str(n)) for n in range(40)]
    Path("pairs.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    words = ["smoke", *TINY, "model.d_model=64", "data.sources=pairs.jsonl"]
    said = called("train", *words)
    assert said.returncode == 2 and "preference pairs is not supported yet" in said.stderr
    train(*words, *re.findall(r"data\.columns\.\w+=\w+", said.stderr))
