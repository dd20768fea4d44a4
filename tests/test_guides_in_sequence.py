"""The guides' commands typed one after another, guide by guide, in one home: at small sizes, all of them work."""

from __future__ import annotations

import io
import json
import re
import shlex
import sys
from pathlib import Path

import pytest

from shared import Shared
from sojourn.config.load import load_run
from test_config_errors import sojourn
from test_guides_commands import DS_CONFIG, TABLES, Row

# What a test cannot have: a GPU, a hub, other machines, days.
TINY = [
    "train.device=cpu", "train.precision=auto", "train.rehearse=off", "train.eval_rows=1", "parallel.gpus=auto",
    "parallel.engine=auto", "parallel.nodes=1", "parallel.node=auto", "parallel.master=null", "parallel.deepspeed=null",
    "data.max_length=64", "log.trackers=[]", "train.attention=auto",
]  # fmt: skip


def small_size(name: str) -> str:
    """The run 512x6 of a guide is 128x2 here."""
    return re.sub(r"\b(\d+)x(\d+)\b", lambda found: "x".join(map(str, small_sizes(*map(int, found.groups())))), name)


def small_sizes(width: int, layers: int) -> tuple[int, int]:
    return width // 4, 1 + (layers > 2)


def small_words(row: Row, base: Path) -> list[str]:
    config = load_run(row.words).config
    words = [word.replace("checkpoint-80", "checkpoint-1") for word in row.words]
    words += [] if row.verb == "prepare" else [*TINY, f"train.epochs={0.02 * (config.train.epochs or 1)}"]
    if config.model.base:
        words += [f"model.base={base}", "method.rank=2", "method.targets=[q_proj]", "method.bits=4"]
        words += ["method.kind=lora"] if config.method.kind == "qlora" else []
        words = [word for word in words if word != "--load_in_4bit" and not word.startswith("method.bits")]
    elif config.model.d_model and config.model.num_layers:
        width, layers = small_sizes(config.model.d_model, config.model.num_layers)
        words += [f"model.d_model={width}", f"model.num_layers={layers}", "model.num_heads=2"]
    if not config.model.base:
        words += ["data.vocab_size=400"]
    if "--train_file" not in words and "--data_files" not in words and "--input_dir" not in words:
        words += ["data.sources=my.jsonl"]
    if config.save.folder and config.save.folder.startswith("/"):
        words += ["save.folder=elsewhere"]
    return words


@pytest.fixture
def place(home: Path, shared: Shared, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with the files that the guides name, and a tiny base model."""
    rows = [{"instruction": f"What colour has house {n}?", "output": ["red", "blue"][n % 2]} for n in range(30)]
    (home / "data" / "raw").mkdir(parents=True)
    for name in ("my.jsonl", "train.json", "data/raw/chats.jsonl"):
        (home / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (home / "ds_config.json").write_text(json.dumps(DS_CONFIG), encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    return shared.copy_base(home)


@pytest.mark.parametrize(
    "guide", [pytest.param(guide, marks=pytest.mark.slow if number > 1 else []) for number, guide in enumerate(TABLES)]
)
def test_a_guides_commands_work_one_after_another(guide: str, home: Path, place: Path) -> None:
    rows = [Row(theirs, ours.strip("`"), says) for theirs, ours, says in TABLES[guide]]
    trained = 0
    for row in (row for row in rows if row.works):
        if row.verb in ("train", "prepare"):
            code, _, err = sojourn(row.verb, *small_words(row, place))
            assert code == 0, (row.here, err)
            trained += row.verb == "train"
        elif row.verb in ("generate", "chat"):
            words = [small_size(word) for word in row.words]
            more = ["--max-tokens", "2"] if row.verb == "generate" else []
            code, _, err = sojourn(row.verb, *words, *more)
            assert code == 0, (row.here, err)
        for named in re.findall(r"(?:^|[ :])((?:runs|output)/[\w./-]+)", "" if row.verb else row.here):
            assert (home / small_size(named)).exists(), row.here
    assert trained >= 3
    if "From scratch" in guide:
        names = sorted(path.name for path in (home / "runs").iterdir())
        assert {"32x1", "128x2", "192x2", "64x1", "64x1-2", "medium"} <= set(names)


def test_what_the_page_says_of_the_folder_of_preprocessing_is_what_the_next_command_reads() -> None:
    (prepared,) = [row for row in TABLES["Train and deploy with CUDA"] if "--input_dir" in row[1]]
    (trained,) = [
        row for row in TABLES["Train and deploy with CUDA"] if "--tokenizer_path" in row[1] and "train" in row[1]
    ]
    folder = shlex.split(prepared[1].strip("`"))[5]
    read = {Path(word).name for word in shlex.split(trained[1].strip("`")) if word.startswith(folder)}
    assert read == {"train.jsonl", "validation.jsonl", "tokenizer.model"}
    assert all(f"`{name}`" in prepared[2] for name in read)
