"""Preparing: made once, whole or not at all, the same on every machine; and what the user is told of it."""

import gzip
import json
import os
import signal
import time

import numpy as np
import pytest

from conftest import called
from fork_server import needs_fork
from sojourn.config.data import CleanConfig, Columns, DataConfig, Source
from sojourn.config.load import load_run
from sojourn.data import row_writer, worker_pool
from sojourn.data.artefact import Artefact
from sojourn.data.prepare import prepare
from sojourn.data.sources import readers
from sojourn.data.tokenize.tokenizer import open_tokenizer
from sojourn.errors import RunFailed, UserError


@pytest.fixture
def words(words, home):
    """Nothing is prepared yet: what is shared by tests goes out of the way."""
    (home / "prepared").rename(home / "first")
    return words


@pytest.fixture
def data(words):
    return load_run(words).config.data


@pytest.fixture
def fixed(data, home):
    """The same with a tokenizer of its own, so that only documents differ between artefacts."""
    [folder] = (home / "first").glob("*/tokenizer")
    return data.model_copy(update={"tokenizer": str(folder)})


def lines(path, records):
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8")
    return path


def pairs(count, start=0):
    return [
        {"prompt": f"What is {i} and {i * 7 % 31}?", "completion": f"It is {i % 13}."}
        for i in range(start, start + count)
    ]


def reading(data, *paths, **changes):
    return data.model_copy(update={"sources": [Source(path=str(path)) for path in paths], **changes})


def documents(artefact: Artefact, split: str = "train") -> list[str]:
    """Every document of a split as text, in the order of the rows."""
    tokenizer, part = open_tokenizer(artefact.tokenizer).tokenizer, getattr(artefact, split)
    found = []
    for number in range(len(part)):
        ids, _, starts = part.row(number)
        found += [tokenizer.decode(one.tolist(), skip_special_tokens=False) for one in np.split(ids, starts[1:])]
    return found


def arrays(artefact: Artefact) -> dict[str, str]:
    return {name: facts["sha256"] for name, facts in artefact.facts["files"].items()}


# Found again, or not


def test_the_hash_is_of_the_content_and_not_of_the_place(fixed, home):
    here, there = home / "a" / "one.jsonl", home / "b" / "two.jsonl"
    for path in (here, there):
        path.parent.mkdir()
        lines(path, pairs(50))
    first, second = (prepare(reading(fixed, path), home / "prepared" / path.stem) for path in (here, there))
    assert first.path.name == second.path.name and arrays(first) == arrays(second)


def test_the_hash_is_the_same_on_every_machine(home):
    lines(home / "a.jsonl", pairs(40))
    data = DataConfig(sources=[Source(path="a.jsonl")], vocab_size=400, max_length=64)
    artefact = prepare(data, home / "prepared")
    assert artefact.path.name == "42561c614dc2a48f"
    assert arrays(artefact)["train/tokens.bin"][:16] == "7dbac8e6b8bf8548"


def test_every_setting_that_changes_the_rows_changes_the_hash(fixed, home, chats):
    changes = [
        {}, {"max_length": 48}, {"train_on": "all"}, {"train_on": "last"}, {"packing": "off"}, {"long_chats": "drop"},
        {"eval_fraction": 0.2}, {"take": 100}, {"clean": CleanConfig(duplicates="exact")}, {"on_bad": "skip"},
        {"sources": [Source(path=str(chats), weight=2.0)]}, {"sources": [Source(path=str(chats), take=50)]},
        {"sources": [Source(path=str(chats), columns=Columns(text="prompt"))]}, {"template": "plain"},
    ]  # fmt: skip
    names = [prepare(fixed.model_copy(update=change), home / "prepared").path.name for change in changes]
    assert len(set(names)) == len(changes)


def test_how_many_processes_work_changes_nothing(fixed, home, monkeypatch):
    """Nor into how many chunks the file is cut for them."""
    path = lines(home / "many.jsonl", pairs(4_000))
    one = prepare(reading(fixed, path, workers=1), home / "one")
    monkeypatch.setattr(readers.read_file, "__defaults__", (1 << 15, "utf-8"))
    sent, submit = [], worker_pool._WorkerPool.submit
    monkeypatch.setattr(worker_pool._WorkerPool, "submit", lambda pool, task: sent.append(task) or submit(pool, task))
    two = prepare(reading(fixed, path, workers=2), home / "two")
    assert len(sent) > 6
    assert one.path.name == two.path.name and arrays(one) == arrays(two)
    assert {**one.report, "sources": 0} == {**two.report, "sources": 0}


def test_unchanged_files_are_not_read_again(fixed, home, chats, monkeypatch):
    old = time.time() - 60
    os.utime(chats, (old, old))
    first = prepare(fixed, home / "prepared")
    monkeypatch.setattr("sojourn.storage.file_digests.sha256", lambda file: pytest.fail("read again"))
    assert prepare(fixed, home / "prepared").path == first.path


def test_a_file_changed_within_the_clocks_grain_is_seen_to_have_changed(fixed, home, chats):
    first = prepare(fixed, home / "prepared")
    stamp = chats.stat()
    chats.write_text(chats.read_text().replace("boat", "goat"))
    os.utime(chats, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert prepare(fixed, home / "prepared").path != first.path


def test_a_file_that_changes_while_it_is_read_is_not_kept(fixed, home, chats, monkeypatch):
    close = row_writer.RowWriter.close

    def late(self):
        close(self)
        chats.write_text('{"prompt": "a", "completion": "b"}')

    monkeypatch.setattr(row_writer.RowWriter, "close", late)
    with pytest.raises(UserError, match="changed while it was read"):
        prepare(fixed, home / "prepared")
    assert not (home / "prepared").exists()


# Whole, or nothing


def test_a_full_disk_leaves_nothing(fixed, home, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(row_writer, "pack_best_fit", full)
    with pytest.raises(RunFailed, match="No space left on device; nothing was written"):
        prepare(fixed, home / "prepared")
    assert not (home / "prepared").exists()


@needs_fork
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_kill_in_the_middle_leaves_no_artefact_and_no_process(fixed, home, how, fork_server):
    path = lines(home / "many.jsonl", pairs(30_000))
    words = [
        "smoke",
        f"data.sources={path}",
        f"data.tokenizer={fixed.tokenizer}",
        "data.workers=2",
        "data.max_length=64",
    ]
    child = fork_server.start("prepare", *words, fork_children=True)
    while "\nreading" not in f"\n{child.stdout}":
        assert child.poll() is None, child.stderr
        time.sleep(0.01)
    import psutil

    workers = []
    while len(workers) < 2:
        workers = psutil.Process(child.pid).children()
    assert child.poll() is None
    child.send_signal(how)
    child.wait()
    _, alive = psutil.wait_procs(workers, timeout=60)
    assert not alive
    left = [p.name for p in (home / "prepared").iterdir()] if (home / "prepared").exists() else []
    assert all(name.startswith(".stage-") for name in left) and (left == [] or how == signal.SIGKILL)
    artefact = prepare(reading(fixed, lines(path, pairs(500)), max_length=64), home / "prepared")
    assert not [p.name for p in (home / "prepared").iterdir() if p.name.startswith(".stage-")]
    assert artefact.damaged_files() == []


def test_a_cut_off_copy_is_noticed(fixed, home):
    artefact = prepare(fixed, home / "prepared")
    tokens = artefact.path / "train" / "tokens.bin"
    whole = tokens.read_bytes()
    tokens.write_bytes(whole[:-2])
    with pytest.raises(RunFailed, match=r"tokens.bin has .* bytes instead of"):
        _ = Artefact(artefact.path).train
    tokens.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert Artefact(artefact.path).damaged_files() == ["train/tokens.bin"]


# Damage


def test_up_to_a_thousandth_of_bad_lines_is_left_out_and_shown(fixed, home):
    path = lines(home / "a.jsonl", pairs(2000))
    path.write_text(path.read_text() + "{oops\n")
    report = prepare(reading(fixed, path), home / "prepared").report
    assert report["damaged"] == 1 and report["records"] == 2001
    ((where, why),) = report["damaged_examples"]
    assert where == f"{path}:2001" and why.startswith("not valid JSON")


def test_more_damage_fails_and_says_where_and_how_much(fixed, home):
    path = lines(home / "a.jsonl", pairs(100))
    path.write_text(path.read_text() + '{oops\n{"prompt": 3, "completion": "b"}\n')
    with pytest.raises(
        UserError, match=r"a.jsonl:101: not valid JSON.*a.jsonl:102: prompt: expected text, found a number"
    ) as error:
        prepare(reading(fixed, path), home / "prepared")
    assert "2 of 102 records (1.96%)" in str(error.value) and "data.on_bad=skip" in str(error.value)
    report = prepare(reading(fixed, path, on_bad="skip"), home / "prepared").report
    assert report["damaged"] == 2


def test_much_damage_in_a_large_file_fails_long_before_its_end(fixed, home):
    path = lines(home / "a.jsonl", [{"prompt": "a", "completion": 1 if i % 3 else "b"} for i in range(60_000)])
    with pytest.raises(UserError, match=r"of [1-4]?\d,\d{3} records"):
        prepare(reading(fixed, path, workers=1), home / "prepared")


# Splits, weights, limits


def test_the_split_is_by_content_and_stays_when_data_is_added(fixed, home):
    path = lines(home / "a.jsonl", pairs(500))
    before = prepare(reading(fixed, path, eval_fraction=0.1), home / "prepared")
    lines(path, [*pairs(300, 5000), *pairs(500)])
    after = prepare(reading(fixed, path, eval_fraction=0.1), home / "prepared")
    assert set(documents(before, "eval")) <= set(documents(after, "eval"))
    assert 25 < before.report["eval"]["documents"] < 80
    assert not set(documents(after)) & set(documents(after, "eval"))


def test_eval_sources_are_all_of_the_evaluation(fixed, home):
    a, b = lines(home / "a.jsonl", pairs(50)), lines(home / "b.jsonl", pairs(20, 100))
    report = prepare(reading(fixed, a, eval_sources=[Source(path=str(b))]), home / "prepared").report
    assert (report["train"]["documents"], report["eval"]["documents"]) == (50, 20)


def test_a_weight_gives_documents_more_often_in_training_only(fixed, home):
    path = lines(home / "a.jsonl", pairs(1000))
    sources = [Source(path=str(path), weight=2.3)]
    artefact = prepare(fixed.model_copy(update={"sources": sources, "eval_fraction": 0.1}), home / "prepared")
    found = documents(artefact)
    counts = {text: found.count(text) for text in set(found)}
    assert set(counts.values()) == {2, 3}
    assert 0.2 < sum(count == 3 for count in counts.values()) / len(counts) < 0.4
    held = documents(artefact, "eval")
    assert len(held) == len(set(held))


def test_take_stops_where_it_says(fixed, home):
    a, b = lines(home / "a.jsonl", pairs(100)), lines(home / "b.jsonl", pairs(100, 100))
    plain = {"eval_fraction": 0.0}
    sources = [Source(path=str(a), take=30), Source(path=str(b))]
    assert (
        prepare(fixed.model_copy(update={"sources": sources, **plain}), home / "p").report["train"]["documents"] == 130
    )
    assert prepare(reading(fixed, a, b, take=150, **plain), home / "p").report["train"]["documents"] == 150
    report = prepare(fixed.model_copy(update={"sources": [Source(path=str(a), size=1000)], **plain}), home / "p").report
    assert 900 < report["train"]["bytes"] <= 1000


def test_all_kinds_of_files_give_the_same_documents(fixed, home):
    records = pairs(60)
    lines(home / "a.jsonl", records)
    (home / "b.json").write_text(json.dumps(records, indent=1))
    (home / "c.csv").write_text(
        "prompt,completion\n" + "".join(f'"{r["prompt"]}",{r["completion"]}\n' for r in records)
    )
    (home / "d.jsonl.gz").write_bytes(gzip.compress((home / "a.jsonl").read_bytes()))
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(records), home / "e.parquet")
    with pa.output_stream(str(home / "f.jsonl.zst"), compression="zstd") as file:
        file.write((home / "a.jsonl").read_bytes())
    made = [arrays(prepare(reading(fixed, home / name), home / name[0])) for name in
            ("a.jsonl", "b.json", "c.csv", "d.jsonl.gz", "e.parquet", "f.jsonl.zst")]  # fmt: skip
    assert all(one == made[0] for one in made)


# Lengths and packing


def test_long_texts_are_split_truncated_or_dropped_and_counted(fixed, home):
    path = lines(home / "t.jsonl", [{"text": "the river and the stone " * 60}, {"text": "short"}])
    plain = reading(fixed, path, eval_fraction=0.0, max_length=32)
    split = prepare(plain, home / "p")
    assert split.report["train"]["split_documents"] == 1
    assert "".join(documents(split)).count("river") == 60
    cut = prepare(plain.model_copy(update={"long_texts": "truncate"}), home / "p").report["train"]
    assert (cut["truncated_texts"], cut["documents"]) == (1, 2) and cut["tokens"] < 32 + 10 < cut["longest"]
    dropped = prepare(plain.model_copy(update={"long_texts": "drop"}), home / "p").report["train"]
    assert (dropped["dropped_texts"], dropped["documents"]) == (1, 1)


def test_a_chat_cut_before_its_answer_is_left_out_and_counted(fixed, home):
    long = {"prompt": "the river and the stone " * 60, "completion": "yes"}
    path = lines(home / "c.jsonl", [long, {"prompt": "hi", "completion": "the river " * 60}, *pairs(3)])
    facts = prepare(reading(fixed, path, eval_fraction=0.0), home / "p").report["train"]
    assert (facts["dropped_chats"], facts["truncated_chats"], facts["documents"]) == (1, 1, 4)
    facts = prepare(reading(fixed, path, eval_fraction=0.0, long_chats="drop"), home / "p").report["train"]
    assert (facts["dropped_chats"], facts["truncated_chats"], facts["documents"]) == (2, 0, 3)


@pytest.mark.parametrize("packing", ["padded", "off"])
def test_without_packing_every_row_is_one_document(fixed, home, packing):
    artefact = prepare(fixed.model_copy(update={"packing": packing}), home / "p")
    assert len(artefact.train) == artefact.report["train"]["documents"]
    assert all(len(artefact.train.row(number)[2]) == 1 for number in range(len(artefact.train)))


def test_rows_are_packed_block_by_block_and_stay_full(fixed, home, monkeypatch):
    path = lines(home / "many.jsonl", pairs(4000))
    whole = prepare(reading(fixed, path), home / "whole")
    monkeypatch.setattr(row_writer, "_MIN_BLOCK_TOKENS", 1)
    monkeypatch.setattr(row_writer, "_MAX_BLOCK_TOKENS", 64 * 128)
    blocks = prepare(reading(fixed, path), home / "blocks")
    assert sorted(documents(whole)) == sorted(documents(blocks))
    assert blocks.report["train"]["fill"] > whole.report["train"]["fill"] - 0.02
    assert all(len(blocks.train.row(number)[0]) <= 64 for number in range(len(blocks.train)))


# Preference pairs


def test_a_pair_is_two_documents_side_by_side_in_one_row(fixed, home):
    records = [{"prompt": f"Q {i}", "chosen": f"good {i}", "rejected": f"bad {i}"} for i in range(60)]
    artefact = prepare(reading(fixed, lines(home / "p.jsonl", records), eval_fraction=0.0), home / "p")
    assert artefact.is_pairs and artefact.report["train"]["pairs"] == 60
    found = documents(artefact)
    assert len(found) == 120
    for chosen, rejected in zip(found[::2], found[1::2], strict=True):
        number = chosen.split("good ")[1].split("<")[0]
        assert f"Q {number}<" in rejected and f"bad {number}<" in rejected
    for number in range(len(artefact.train)):
        ids, mask, starts = artefact.train.row(number)
        assert len(starts) % 2 == 0 and len(ids) <= 128 and mask.any()


def test_pairs_and_chats_are_not_mixed(fixed, home):
    a = lines(home / "a.jsonl", [{"prompt": "Q", "chosen": "a", "rejected": "b"}])
    with pytest.raises(UserError, match="preference pairs mixed with other documents"):
        prepare(reading(fixed, a, lines(home / "b.jsonl", pairs(3))), home / "p")


def test_pairs_are_not_trained_on_yet_and_the_error_says_what_to_type(words, home):
    path = lines(home / "p.jsonl", [{"prompt": f"Q {i}", "chosen": f"a {i}", "rejected": f"b {i}"} for i in range(40)])
    result = called("train", *words, f"data.sources={path}")
    assert result.returncode == 2 and "data.columns.completion=chosen" in result.stderr


# Cleaning


def test_nothing_is_cleaned_unless_asked_and_duplicates_are_counted(fixed, home):
    path = lines(home / "a.jsonl", [*pairs(20), *pairs(5)])
    plain = reading(fixed, path, eval_fraction=0.0)
    report = prepare(plain, home / "p").report
    assert (report["train"]["documents"], report["duplicates"]) == (25, 5)
    examples = report["duplicate_examples"]
    assert [one["where"] for one in examples] == [[f"{path}:{line}"] for line in range(21, 26)]
    assert all(one["kind"] == "exact" and one["count"] == 1 for one in examples)
    assert pairs(1)[0]["completion"] in examples[0]["text"]
    report = prepare(plain.model_copy(update={"clean": CleanConfig(duplicates="exact")}), home / "p").report
    assert (report["train"]["documents"], report["duplicates"]) == (20, 5)


def test_near_duplicates_lengths_and_languages_are_filtered_and_counted(fixed, home):
    story = "the old sailor told the children a long story about the storm and the lost ship near the dark island "
    texts = [
        story * 3,
        story * 3 + "again",
        "你好，世界！今天天气很好，我们一起去公园散步吧。" * 3,
        "tiny",
        "word " * 400,
    ]
    path = lines(home / "a.jsonl", [{"text": text} for text in texts])
    clean = CleanConfig(duplicates="near", min_characters=10, max_characters=1500, languages=["en"])
    report = prepare(reading(fixed, path, eval_fraction=0.0, clean=clean), home / "p").report
    assert report["left_out"] == {"too_short": 1, "too_long": 1, "other_languages": 1}
    assert (report["near_duplicates"], report["train"]["documents"]) == (1, 1)
    near = report["duplicate_examples"][0]
    assert (near["kind"], near["where"]) == ("near", [f"{path}:2"]) and near["text"].startswith("the old sailor")


# Told


def test_formats_and_three_marked_examples_come_before_all_is_read(words):
    result = called("prepare", *words)
    told = result.stdout.splitlines()
    assert told[0].endswith("chats.jsonl: prompt/completion")
    assert told[1:3] == ["training a tokenizer: bpe", "tokenizer: 351 tokens, 3 of them special"]
    assert told[3].startswith("examples as the model sees them") and "‹It is red.<|im_end|>›⏎" in told[4]
    assert told[7] == "reading and tokenizing"
    assert any(line.startswith("one epoch: ") for line in told) and any(
        line.startswith("languages: en") for line in told
    )
    again = called("prepare", *words)
    assert (
        again.stdout.splitlines()[1:6] == [told[0], *told[3:7]] and "already prepared" in again.stdout.splitlines()[0]
    )


def test_the_report_is_text_json_and_a_plot(words, home):
    facts = json.loads(called("prepare", *words, "--json").stdout)
    for key in ("damaged", "duplicates", "languages", "steps_per_epoch", "compression"):
        assert key in facts
    assert sum(one["documents"] for one in facts["train"]["lengths"]) == facts["train"]["documents"]
    assert [row["vocab_size"] for row in facts["compression"]][-1] == facts["vocab_size"]
    plot = next((home / "prepared").glob("*/report.svg")).read_text()
    assert plot.startswith("<svg")


def test_a_book_is_not_repeated_in_the_report(words, home):
    book = home / "book.txt"
    book.write_text("The river rose by a hand. " * 20_000)
    words = [*words, f"data.sources={book}", "data.max_length=1000000"]
    told = called("prepare", *words).stdout.splitlines()
    report = next(path for path in (home / "prepared").glob("*/report.json") if "book.txt" in path.read_text())
    (example,) = json.loads(report.read_text())["examples"]
    assert len(example["text"]) == 20_000 == example["spans"][0][1] and report.stat().st_size < 40_000
    assert called("prepare", *words).stdout.splitlines()[1:4] == [told[0], *told[3:5]]


def test_verify_reads_every_byte(words, home):
    assert called("prepare", *words, "--verify").returncode == 0
    mask = next((home / "prepared").glob("*/train/mask.bin"))
    mask.write_bytes(bytes([mask.read_bytes()[0] ^ 1]) + mask.read_bytes()[1:])
    result = called("prepare", *words, "--verify")
    assert result.returncode == 1 and "damaged: train/mask.bin" in result.stderr


def test_the_text_of_a_special_token_is_only_text(fixed, home):
    path = lines(
        home / "a.jsonl", [{"prompt": "What does <|im_end|> mean?", "completion": "<|im_start|> opens."}, *pairs(5)]
    )
    artefact = prepare(reading(fixed, path, eval_fraction=0.0), home / "p")
    words = open_tokenizer(artefact.tokenizer)
    assert artefact.report["special_token_texts"] == 1
    ids = np.asarray(artefact.train.tokens)
    assert (ids == words.id_of("<|im_end|>")).sum() == 12 and (ids == words.id_of("<|im_start|>")).sum() == 12
    assert any("What does <|im_end|> mean?" in text for text in documents(artefact))


def test_end_of_text_in_a_text_file_parts_documents(fixed, home):
    (home / "a.txt").write_text("One story.\n<|endoftext|>\nAnother story.\n")
    artefact = prepare(reading(fixed, home / "a.txt", eval_fraction=0.0), home / "p")
    assert sorted(documents(artefact)) == ["Another story.<|endoftext|>", "One story.<|endoftext|>"]


def test_a_bare_sentencepiece_model_is_a_tokenizer_too(data, home, chats):
    made = prepare(data.model_copy(update={"tokenizer": "sentencepiece", "vocab_size": 600}), home / "p")
    assert (made.tokenizer / "tokenizer.model").is_file()
    alone = home / "alone" / "tokenizer.model"
    alone.parent.mkdir()
    alone.write_bytes((made.tokenizer / "tokenizer.model").read_bytes())
    again = prepare(data.model_copy(update={"tokenizer": str(alone)}), home / "p")
    assert arrays(again) == arrays(made)


def test_plain_transformers_opens_what_was_prepared_and_gives_the_same_tokens(data, home):
    from transformers import AutoTokenizer

    for tokenizer in ("bpe", "sentencepiece"):
        artefact = prepare(data.model_copy(update={"tokenizer": tokenizer, "vocab_size": 600}), home / "p")
        plain = AutoTokenizer.from_pretrained(artefact.tokenizer)
        for probe in json.loads((artefact.path / "probes.json").read_text()):
            assert plain.apply_chat_template(probe["messages"], tokenize=True, return_dict=False) == probe["ids"]
        assert plain.eos_token_id == artefact.stop_ids[0]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["data.sources=wikitex2"], "no data set of that name; did you mean wikitext2?"),
        (["data.template=chatm"], "no such template; did you mean chatml?"),
        (["data.clean.languages=german"], "data.clean.languages: 'german' is not a language code; did you mean de?"),
        (["data.tokenizer=nowhere/at/all"], "data.tokenizer: nowhere/at/all: no such file or folder"),
        (["data.columns.prompt=Q"], "allowed together: "),
    ],
)  # fmt: skip
def test_a_slip_is_one_line_that_says_what_to_type(home, words, told):
    result = called("prepare", "smoke", *words)
    assert result.returncode == 2 and told in result.stderr and result.stderr.count("\n") == 1
    assert not (home / "prepared").exists()
