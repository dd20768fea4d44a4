"""The length of a planned run is what `prepare` and `train` make of its data."""

import csv
import functools
import gzip
import json
import random
import shutil
from dataclasses import replace

import pytest

from conftest import called
from sojourn.catalog.datasets import datasets
from sojourn.catalog.gpus import find_gpu
from sojourn.catalog.models import find_model
from sojourn.config.load import load_run
from sojourn.data import exact_rows, measure
from sojourn.data.prepare import prepare_run
from sojourn.data.tokenize.estimate_tokens import TokenEstimate
from sojourn.data.tokenize.tokenizer import train_tokenizer
from sojourn.errors import UserError
from sojourn.estimate.step_time import step_time
from sojourn.estimate.workload import Workload
from sojourn.plan.epoch import timed_workload
from sojourn.plan.offers import make_plan
from sojourn.plan.run_length import RunLength, run_length
from sojourn.plan.show import length_text
from sojourn.resolve.model_spec import model_spec_of
from sojourn.resolve.run_steps import run_steps
from sojourn.run.home import prepared_folder

WORDS = ("sea", "salt", "wind", "harbour", "rope", "the", "of", "and", "lantern", "keeper", "island", "boat", "tide")
SIGNS = "海风灯塔清晨船只渔网潮水风暴码头岛屿绳索港口"


def sentence(numbers, words, chinese=False):
    if chinese:
        return "".join(numbers.choices(SIGNS, k=words)) + "。"
    return " ".join(numbers.choices(WORDS, k=words)).capitalize() + f" {numbers.randrange(100)}."


@functools.cache
def documents(count, seed=0, chinese=False):
    """Texts of very different lengths: most are short, a few are long."""
    numbers = random.Random(seed)
    return [sentence(numbers, 3 + int(numbers.expovariate(1 / 60)), chinese) for _ in range(count)]


def write_chats(path, texts, escaped=False):
    rows = [{"instruction": f"Question {n}?", "output": text} for n, text in enumerate(texts)]
    path.write_text("".join(json.dumps(row, ensure_ascii=escaped) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    data = load_run(["small", "data.vocab_size=600"]).config.data
    made = train_tokenizer(data, documents(300) + documents(100, chinese=True), folder)
    made.save(folder, None, 512)
    return folder


def length_of(config):
    return run_length(config, model_spec_of(config).vocab)


def compare(*words):
    """The planned and the real number of steps, and the planned length."""
    config = load_run([*([] if words[0] == "smoke" else ["small"]), *map(str, words)]).config
    planned = length_of(config)
    train = prepare_run(config, prepared_folder()).train
    steps, _ = run_steps(config.train, len(train), float(train.rows[-1]) / len(train))
    return planned, steps, int(train.rows[-1])


@pytest.mark.parametrize(
    "more",
    [
        [],
        ["data.packing=off", "train.epochs=2.5"],
        ["data.packing=padded", "data.max_length=64", "data.long_chats=drop"],
        ["data.take=120", "data.eval_fraction=20", "train.epochs=3"],
        ["train.tokens=20k", "train.epochs=null"],
        ["data.clean.min_characters=100", "data.eval_fraction=0"],
    ],
)
def test_small_files_are_planned_to_the_step(home, tokenizer, more):
    write_chats(home / "chats.jsonl", documents(400), escaped=True)
    planned, steps, tokens = compare("data.sources=chats.jsonl", f"data.tokenizer={tokenizer}", *more)
    assert (planned.steps, planned.epoch.tokens, planned.epoch.exact) == (steps, tokens, True)


def test_several_sources_with_weights_are_planned_to_the_step(home, tokenizer):
    write_chats(home / "chats.jsonl", documents(200))
    (home / "book.txt").write_text("\n\n".join(documents(300, seed=1)), encoding="utf-8")
    (home / "run.yaml").write_text(
        "extends: small\ndata:\n  sources:\n  - {path: chats.jsonl, weight: 2.5}\n  - {path: book.txt, take: 3}\n"
        f"  tokenizer: {tokenizer}\n  max_length: 128\ntrain: {{global_batch: 4}}\n"
    )
    config = load_run(["run.yaml"]).config
    planned, artefact = length_of(config), prepare_run(config, prepared_folder())
    assert planned.exact and planned.epoch.rows == len(artefact.train)


def write_list(path, texts):
    path.write_text(json.dumps([{"instruction": "Say it.", "output": text} for text in texts], indent=2))


def write_packed(path, texts):
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in texts)


def write_table(path, texts):
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("instruction", "output"), *(("Say it.", text) for text in texts)])


def write_text(path, texts):
    path.write_text("\n\n".join(texts), encoding="utf-8")


def write_parquet(path, texts):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table({"text": texts}), path, row_group_size=500)


@pytest.mark.parametrize(
    ("name", "write", "packing"),
    [
        pytest.param(*file, packing, marks=pytest.mark.slow if (number + (packing == "off")) % 2 else [])
        for number, file in enumerate((
            ("a.jsonl", write_chats), ("a.json", write_list), ("a.jsonl.gz", write_packed), ("a.csv", write_table),
            ("a.txt", write_text), ("a.parquet", write_parquet),
        ))
        for packing in ("packed", "off")
    ],
)  # fmt: skip
def test_of_large_files_an_excerpt_is_read(home, tokenizer, monkeypatch, name, write, packing):
    monkeypatch.setattr(exact_rows, "_WHOLE_BYTES", 0)
    monkeypatch.setattr(measure, "_EXCERPT_BYTES", 256 << 10)
    monkeypatch.setattr(measure, "_TOKENIZED_BYTES", 64 << 10)
    write(home / name, documents(3000))
    words = (f"data.sources={name}", f"data.tokenizer={tokenizer}", f"data.packing={packing}", "data.max_length=128")
    planned, steps, tokens = compare(*words, "data.take=2500")
    assert not planned.exact and planned.steps == pytest.approx(steps, rel=0.03)
    assert planned.epoch.tokens == pytest.approx(tokens, rel=0.03)


def test_what_is_prepared_is_planned_with_its_own_counts(home, tokenizer, monkeypatch):
    monkeypatch.setattr(exact_rows, "_WHOLE_BYTES", 0)
    write_chats(home / "chats.jsonl", documents(400))
    words = ("data.sources=chats.jsonl", f"data.tokenizer={tokenizer}")
    before, steps, _ = compare(*words)
    after, again, tokens = compare(*words)
    assert not before.exact and after.exact and (after.steps, after.epoch.tokens) == (steps, tokens) == (again, tokens)


def test_a_tokenizer_in_the_hubs_cache_counts_and_is_estimated_where_only_other_files_are_there(
    home, tokenizer, monkeypatch
):
    monkeypatch.setenv("HF_HUB_CACHE", str(home / "hub"))
    snapshot = home / "hub" / "models--acme--tiny" / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    reference = home / "hub" / "models--acme--tiny" / "refs" / "main"
    reference.parent.mkdir()
    reference.write_text("a" * 40)
    (snapshot / "config.json").write_text("{}")
    write_chats(home / "chats.jsonl", documents(200))
    words = ("small", "data.sources=chats.jsonl")
    without = length_of(load_run([*words, "data.tokenizer=acme/tiny"]).config)
    assert not without.exact and without.notes == (
        "tokens are estimated: the tokenizer (acme/tiny) is not on this machine",
    )
    shutil.copytree(tokenizer, snapshot, dirs_exist_ok=True)
    cached, given = (
        length_of(load_run([*words, f"data.tokenizer={name}"]).config) for name in ("acme/tiny", tokenizer)
    )
    assert cached == given and given.exact


def test_our_own_data_is_planned_within_a_tenth(home):
    planned, steps, _ = compare("smoke")
    assert planned.steps == pytest.approx(steps, rel=0.1)


def test_escaped_json_is_not_longer(home):
    for name, escaped in (("plain.jsonl", False), ("escaped.jsonl", True)):
        write_chats(home / name, documents(500, chinese=True), escaped)
    words = ("lora-20k", "model.base=qwen2.5-1.5b")
    lengths = [length_of(load_run([*words, f"data.sources={name}.jsonl"]).config) for name in ("plain", "escaped")]
    assert lengths[0].tokens == pytest.approx(lengths[1].tokens, rel=0.005) and "estimated" in lengths[0].notes[0]


@pytest.mark.parametrize(("vocabulary", "english", "chinese"), [(151_936, 4.6, 4.4), (32_000, 3.9, 2.1)])
def test_tokens_without_the_tokenizer_are_those_of_its_size(vocabulary, english, chinese):
    """Bytes per token as Qwen2's and Llama 2's tokenizers have them on Alpaca and C4."""
    estimate = TokenEstimate(vocabulary)
    prose = "The museum was closed on Monday, so we walked along the river and talked about the letters that she found."
    signs = "博物馆星期一关门，所以我们沿着河边散步，谈论她在旧箱子里找到的那些信件，还有多年以前住在这里的人们的生活。"
    assert len(prose.encode()) / estimate(prose) == pytest.approx(english, rel=0.15)
    assert len(signs.encode()) / estimate(signs) == pytest.approx(chinese, rel=0.2)


def test_take_is_what_differs_between_the_presets(home):
    steps = [length_of(load_run([name, "train.global_batch=16"]).config).steps for name in ("lora-20k", "lora-50k")]
    assert steps[1] == pytest.approx(2.5 * steps[0], rel=0.01)
    write_chats(home / "many.jsonl", ["Yes, of course."] * 30_000)
    some, everything = (
        length_of(load_run(["lora-20k", "data.sources=many.jsonl", *more]).config) for more in ([], ["data.take=all"])
    )
    assert some.tokens == pytest.approx(everything.tokens * 2 / 3, rel=0.01)


@pytest.mark.parametrize("row", datasets(), ids=lambda row: row.name)
def test_every_data_set_of_the_catalogue_has_a_length(row):
    length = length_of(load_run(["qlora-7b", f"data.sources={row.name}"]).config)
    assert length.assumed is None and length.epoch.tokens > 2 * row.documents
    assert 2 < row.text_bytes / length.epoch.tokens < 6 or row.language == "zh"


def test_wikitext2_has_about_the_tokens_that_it_is_known_for(home):
    text = called("plan", "qlora-7b", "--dataset", "wikitext2", "train.epochs=1", "--gpu", "T4").stdout
    length = length_of(load_run(["qlora-7b", "data.sources=wikitext2", "train.epochs=1"]).config)
    assert length.tokens == pytest.approx(2.6e6, rel=0.08) and "about 2." in text and "assumed" not in text


def test_padding_and_long_documents_take_time():
    gpu, work = find_gpu("A100 80GB"), Workload(find_model("qwen2.5-7b"), "lora", 4, 8192, 4, document_length=480)

    def seconds(lengths, packing):
        return step_time(timed_workload(work, lengths, packing), gpu).step_seconds

    short, long = [200] * 90 + [400] * 10, [200] * 90 + [8000] * 10
    assert seconds(long, "packed") > 1.1 * seconds(short, "packed")
    assert seconds(short, "off") < 0.2 * seconds(short, "padded")
    assert seconds(short, "off") < seconds(long, "off") < seconds(long, "padded")
    one_row = replace(work, micro_batch=1, gradient_accumulation=16)
    assert timed_workload(work, long, "off").sequence_length > timed_workload(one_row, long, "off").sequence_length
    assert timed_workload(work, [8192] * 5, "packed").document_length is None


def test_rows_of_one_document_each_are_not_cheaper_per_document_than_packed_ones(home, tokenizer):
    write_chats(home / "chats.jsonl", documents(400))
    words = ["small", "data.sources=chats.jsonl", f"data.tokenizer={tokenizer}", "train.epochs=5"]
    packed, padded = (
        make_plan(load_run([*words, f"data.packing={how}"]).config, [find_gpu("T4")]) for how in ("packed", "padded")
    )
    assert padded.length.steps > 2 * packed.length.steps and padded.length.tokens == packed.length.tokens
    assert padded.offers[0].run_time.parts["steps"] > 2 * packed.offers[0].run_time.parts["steps"]


def test_one_line_may_be_a_whole_book(home):
    (home / "book.jsonl").write_text(json.dumps({"text": "A boat on the sea. " * 250_000}) + "\n")
    length = length_of(load_run(["lora-20k", "data.sources=book.jsonl", "train.epochs=1"]).config)
    assert length.tokens == pytest.approx(1.4e6, rel=0.3) and not length.assumed


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("empty.jsonl", b"", "no document to train on"),
        ("binary.jsonl", bytes(range(256)) * 4000, "not valid JSON"),
        ("broken.jsonl", b'{"text": "x"\n' * 5000, "not valid JSON"),
        ("other.jsonl", b'{"colour": 3}\n' * 20_000, "colour"),
        ("not.jsonl.gz", b"plain text" * 300_000, "not.jsonl.gz"),
        ("not.parquet", b"plain text" * 300_000, "parquet"),
        ("a.docx", b"x", "cannot be read"),
        ("one.jsonl", b"x" * 6_000_000, "one.jsonl"),
    ],
)
def test_data_that_cannot_be_used_is_one_line(home, name, content, says):
    (home / name).write_bytes(content)
    config = load_run(["lora-20k", f"data.sources={name}"]).config
    with pytest.raises(UserError, match=says) as found:
        length_of(config)
    assert "\n" not in str(found.value)
    given = length_of(load_run(["lora-20k", f"data.sources={name}", "train.steps=7"]).config)
    assert given.steps == 7 and "the data was not measured" in given.notes[0]


@pytest.mark.parametrize(
    ("length", "text"),
    [
        (RunLength(1, 8080, exact=True), "1 step, about 8.08k tokens"),
        (RunLength(1188, 1_520_000), "about 1,188 steps, about 1.52M tokens"),
    ],
)
def test_a_length_in_words(length, text):
    assert length_text(length) == text
