"""`data.take` is a seeded sample of everything, said in the preview and in the report."""

import json

import pytest

from conftest import called
from sojourn.config.data import CleanConfig, DataConfig, Source
from sojourn.data.prepare import prepare
from sojourn.data.tokenize.tokenizer import open_tokenizer


@pytest.fixture
def data(home):
    """1,000 numbered questions in one file, and a tokenizer of its characters."""
    lines = [json.dumps({"prompt": f"What is {i}?", "completion": f"It is {i}."}) for i in range(1000)]
    (home / "big.jsonl").write_text("\n".join(lines))
    return DataConfig(sources=[Source(path="big.jsonl")], tokenizer="char", eval_fraction=0.0, packing="off")


def numbers(artefact, split="train") -> list[int]:
    tokenizer, rows = open_tokenizer(artefact.tokenizer).tokenizer, getattr(artefact, split)
    texts = (tokenizer.decode(rows.row(row)[0].tolist()) for row in range(len(rows)))
    return sorted(int(text.split("It is ")[1].rstrip(".\n")) for text in texts)


def test_take_is_a_sample_of_the_whole_file_the_same_again_and_another_with_another_seed(data, home):
    first = prepare(data.model_copy(update={"take": 100}), home / "a")
    again = prepare(data.model_copy(update={"take": 100, "workers": 2}), home / "b")
    other = prepare(data.model_copy(update={"take": 100, "seed": 1}), home / "a")
    chosen = numbers(first)
    assert len(set(chosen)) == 100
    assert 5 < sum(number < 100 for number in chosen) < 20 and max(chosen) > 930
    assert numbers(again) == chosen != numbers(other)
    assert again.path.name == first.path.name != other.path.name


def test_a_whole_number_of_documents_is_held_out_a_seeded_sample_of_all_that_is_taken(data, home):
    (home / "few.jsonl").write_text("\n".join((home / "big.jsonl").read_text().splitlines()[:400]))

    def held_out(weight=1.0, **settings):
        settings |= {"eval_fraction": 40.0, "sources": [Source(path="few.jsonl", weight=weight)]}
        artefact = prepare(data.model_copy(update=settings), home / "a")
        chosen, others = numbers(artefact, "eval"), numbers(artefact)
        assert len(chosen) == 40 and not {*chosen} & {*others}
        return artefact.report["held_out"], chosen, len(others)

    said, chosen, trained = held_out()
    assert (trained, said) == (360, {"documents": 40, "of": 400})
    assert 8 < sum(number < 200 for number in chosen) < 32
    assert held_out(seed=1)[1] != chosen
    assert held_out(take=100)[1:] == (chosen, 60)
    assert held_out(weight=2.0)[1:] == (chosen, 720)


def test_a_number_of_held_out_documents_by_flag_is_reported_and_too_many_are_an_error(home):
    lines = [json.dumps({"prompt": f"What is {i}?", "completion": f"It is {i}."}) for i in range(300)]
    (home / "few.jsonl").write_text("\n".join(lines))
    words = ("prepare", "smoke", "--train_file", "few.jsonl", "data.tokenizer=char", "--val_size")
    said = called(*words, "100", "--output_dir", "out").stdout
    assert "\nheld out: 100 of 300 documents, seeded sample\n" in said and "\neval: 100 documents, " in said
    assert len((home / "out" / "validation.jsonl").read_text().splitlines()) == 100
    for wanted in ("300", "5000"):
        failed = called(*words, wanted)
        line = f"data.eval_fraction: {int(wanted):,} documents to hold out, but there are 300; give fewer"
        assert failed.returncode == 2 and line in failed.stderr.splitlines()[-1]


def test_the_preview_and_the_report_say_how_many_of_how_many_and_what_takes_all(data):
    args = ("prepare", "smoke", "data.sources=big.jsonl", "data.tokenizer=char", "data.take=100")
    said, again = (called(*args).stdout for _ in range(2))
    line = "big.jsonl: 100 of 1,000 documents, seeded sample; data.take=all takes them all\n"
    assert said.count(line) == 2
    assert said.index(line) < said.index("reading and tokenizing") < said.rindex(line)
    assert line in again
    everything = called(*args, "data.take=all", "--json")
    report = json.loads(everything.stdout)
    assert (report["samples"], report["train"]["documents"] + report["eval"]["documents"]) == ([], 1000)


def test_sources_with_their_own_take_or_size_are_samples_too_and_data_take_is_of_all_of_them(data, home):
    (home / "more.jsonl").write_text(
        "\n".join(json.dumps({"prompt": "Q", "completion": f"It is {i}."}) for i in range(5000, 5500))
    )
    sources = [Source(path="big.jsonl", take=400), Source(path="more.jsonl", size=700)]
    report = prepare(data.model_copy(update={"sources": sources}), home / "a").report
    assert [(one["documents"], one["of"]) for one in report["samples"]] == [(400, 1000), (58, 500)]  # 12 bytes each
    artefact = prepare(data.model_copy(update={"sources": sources, "take": 200}), home / "a")
    chosen = numbers(artefact)
    assert len(chosen) == 200 == sum(one["documents"] for one in artefact.report["samples"])
    assert 5 < sum(number >= 5000 for number in chosen) < 60


def test_duplicates_that_are_left_out_and_repeated_documents_do_not_change_the_number(data, home):
    whole = (home / "big.jsonl").read_text()
    (home / "big.jsonl").write_text(f"{whole}\n{whole}")
    clean = CleanConfig(duplicates="exact")
    artefact = prepare(data.model_copy(update={"take": 100, "clean": clean}), home / "a")
    assert artefact.report["samples"][0]["of"] == 1000 and len(set(numbers(artefact))) == 100
    weighted = data.model_copy(update={"take": 100, "sources": [Source(path="big.jsonl", weight=2.5)]})
    assert len(numbers(prepare(weighted, home / "a"))) == 100


def test_the_placeholder_of_a_picture_that_is_not_there_is_said(home):
    lines = [json.dumps({"prompt": f"<image>{i}?", "completion": "A cat."}) for i in range(9)]
    (home / "a.jsonl").write_text("\n".join(lines))
    said = called("prepare", "smoke", "data.sources=a.jsonl", "data.tokenizer=char").stdout
    assert "chats with <image>, <audio> or <video>, read as plain text: 9\n" in said


def test_files_that_are_converted_are_named_in_preview_and_report(home):
    (home / "d").mkdir()
    for name, encoding in (("a.txt", "gbk"), ("b.txt", "utf-8"), ("c.txt", "gbk")):
        (home / "d" / name).write_bytes("今天天气很好，我们去公园散步。".encode(encoding))
    words = ("prepare", "smoke", "data.sources=d", "data.tokenizer=char", "data.encoding=gbk", "data.eval_fraction=0")
    said, again = (called(*words).stdout for _ in range(2))
    line = "\nconverted from gbk: d/a.txt, d/c.txt\n"
    assert said.count(line) == 2 and said.index(line) < said.index("reading and tokenizing") < said.rindex(line)
    assert line in again
    (home / "e.txt").write_text("UTF-8")
    assert "converted from" not in called(*words, "data.sources=e.txt").stdout


def test_more_than_there_is_takes_all_and_says_nothing(data, home):
    report = prepare(data.model_copy(update={"take": 10**9}), home / "a").report
    assert (report["samples"], report["train"]["documents"]) == ([], 1000)
