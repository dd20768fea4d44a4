"""`sojourn prepare --output_dir` leaves what the guide's next command reads, and overwrites nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from conftest import called
from sojourn.data.output_folder import _to_record
from sojourn.data.sources.document import Document, Message
from sojourn.data.sources.formats import detect_format, to_document
from sojourn.data.tokenize.tokenizer import open_tokenizer

SIZES = ["data.vocab_size=400", "data.max_length=64"]


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write_raw(home: Path, count: int) -> list[str]:
    texts = [f"文字 {n}: the house number {n * n} has {n} windows and a red door" for n in range(count)]
    (home / "data/raw").mkdir(parents=True)
    lines = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
    (home / "data/raw/one.jsonl").write_text(lines, encoding="utf-8")
    return texts


def test_every_document_is_in_one_of_the_files_and_the_next_command_trains_on_them(home: Path) -> None:
    texts = write_raw(home, 300)
    guide = ["--input_dir", "data/raw", "--output_dir", "data/processed", "--vocab_size", "32000"]
    said = called("prepare", *guide, *SIZES)
    assert said.returncode == 0, said.stderr
    out = Path("data/processed")
    train, validation = (read(out / name) for name in ("train.jsonl", "validation.jsonl"))
    assert f"{out / 'train.jsonl'}: {len(train)} documents" in said.stdout and "tokenizer.model" in said.stdout
    assert sorted(one["text"] for one in (*train, *validation)) == sorted(texts) and 0 < len(validation) < 30
    (report,) = [json.loads(path.read_text(encoding="utf-8")) for path in home.glob("prepared/*/report.json")]
    assert report["eval"]["documents"] == len(validation)
    ids = open_tokenizer(out / "tokenizer.model").tokenizer.encode(texts[0]).ids
    assert ids == open_tokenizer(out / "tokenizer.json").tokenizer.encode(texts[0]).ids
    assert called("prepare", *guide, *SIZES).returncode == 0 and read(out / "train.jsonl") == train
    words = ["--train_file", str(out / "train.jsonl"), "--val_file", str(out / "validation.jsonl"),
             "--tokenizer_path", str(out / "tokenizer.model"), "--output_dir", "outputs/my_model"]  # fmt: skip
    small = ["model.d_model=64", "model.num_layers=1", "train.steps=1", "log.tensorboard=off", "train.rehearse=off"]
    said = called("train", *words, *SIZES, *small)
    assert said.returncode == 0 and Path("outputs/my_model/final/config.json").is_file(), said.stderr


def test_one_document_is_always_held_out_if_there_are_two(home: Path) -> None:
    write_raw(home, 2)
    for eval_fraction in ("0", "0.01"):
        words = ["--input_dir", "data/raw", "--output_dir", "out", f"data.eval_fraction={eval_fraction}", *SIZES]
        assert called("prepare", *words).returncode == 0
        assert [len(read(Path("out") / name)) for name in ("train.jsonl", "validation.jsonl")] == [1, 1]


def test_a_selection_is_the_one_that_is_trained_on(home: Path) -> None:
    write_raw(home, 40)
    words = ["--input_dir", "data/raw", "--output_dir", "out", "data.take=10", "data.eval_fraction=0.2", *SIZES]
    said = called("prepare", *words, "--json")
    report = json.loads(said.stdout)
    found = [len(read(Path("out") / name)) for name in ("train.jsonl", "validation.jsonl")]
    assert found == [report["train"]["documents"], report["eval"]["documents"]] and sum(found) == 10


def test_no_file_of_the_user_is_overwritten(home: Path) -> None:
    write_raw(home, 3)
    before = (home / "data/raw/one.jsonl").read_bytes()
    for folder in ("data/raw", "data/raw/out", "data"):
        said = called("prepare", "--input_dir", "data/raw", "--output_dir", folder, *SIZES)
        assert said.returncode == 2 and f"--output_dir: {folder} holds the source" in said.stderr
    (home / "mine").mkdir()
    (home / "mine/train.jsonl").write_text("my own\n", encoding="utf-8")
    said = called("prepare", "--input_dir", "data/raw", "--output_dir", "mine", *SIZES)
    assert said.returncode == 2 and "not from sojourn prepare" in said.stderr
    assert (home / "mine/train.jsonl").read_text(encoding="utf-8") == "my own\n"
    assert (home / "data/raw/one.jsonl").read_bytes() == before and not (home / "prepared").exists()


_CALL = Message("assistant", "", ({"name": "add", "arguments": {"a": 1}},))
_TOOL = {"type": "function", "function": {"name": "add"}}


@pytest.mark.parametrize(
    "document",
    [
        Document("x", text="a\nb 文"),
        Document("x", messages=(Message("user", "hi"), Message("assistant", "yes", reasoning="because"))),
        Document("x", messages=(Message("user", "a"), Message("assistant", "b", trained=False), Message("user", "c"),
                                Message("assistant", "d"))),
        Document("x", messages=(Message("user", "hi"), _CALL, Message("tool", "1"), Message("assistant", "one")),
                 tools=(_TOOL,)),
        Document("x", messages=(Message("user", "hi"), Message("assistant", "good")),
                 rejected=(Message("user", "hi"), Message("assistant", "bad"))),
    ],
    ids=["text", "reasoning", "untrained", "tools", "pair"],
)  # fmt: skip
def test_a_document_is_read_again_as_it_was(document: Document) -> None:
    record = json.loads(json.dumps(_to_record(document)))
    assert to_document(record, detect_format(record), "x") == document
