"""`sojourn bench prepare`: the chats are as specified, all rows do the same work, nothing is left behind."""

import json
from functools import partial
from pathlib import Path

import pytest
from benchmarks.peers.datasets_map import best_fit

from conftest import called
from sojourn.bench.prepare_settings import ROW_LENGTH
from sojourn.bench.synthetic_chats import write_synthetic_chats

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def a_megabyte(tmp_path_factory) -> tuple[Path, int]:
    """A file of synthetic chats, and how many they are."""
    path = tmp_path_factory.mktemp("chats") / "one.jsonl"
    return path, write_synthetic_chats(path, 1_200_000)


def test_synthetic_chats_depend_on_the_seed_alone_and_have_the_requested_size(a_megabyte, tmp_path):
    (one, count), few, again, other = a_megabyte, *(tmp_path / f"{name}.jsonl" for name in ("few", "again", "other"))
    assert write_synthetic_chats(few, 100_000) == write_synthetic_chats(again, 100_000)
    assert write_synthetic_chats(other, 50_000, seed=1)
    assert few.read_bytes() == again.read_bytes()
    assert few.read_bytes()[:1000] != other.read_bytes()[:1000]
    assert 0.98 * 1_200_000 <= one.stat().st_size <= 1_200_000
    assert count == len(one.read_text(encoding="utf-8").splitlines())


def test_the_chats_are_whole_and_varied(a_megabyte):
    chats = [json.loads(line)["messages"] for line in a_megabyte[0].read_text(encoding="utf-8").splitlines()]
    for chat in chats:
        turns = chat[1:] if chat[0]["role"] == "system" else chat
        assert [turn["role"] for turn in turns] == ["user", "assistant"] * (len(turns) // 2) and turns
        assert all(turn["content"] == turn["content"].strip() != "" for turn in chat)
    texts = [" ".join(turn["content"] for turn in chat) for chat in chats]
    assert len(set(texts)) == len(texts)
    assert 0.05 < sum(not text.isascii() for text in texts) / len(texts) < 0.15
    assert 0.05 < sum("def " in text for text in texts) / len(texts) < 0.15
    assert 500 < sum(map(len, texts)) / len(texts) < 1200
    assert len({word for text in texts for word in text.split()}) > 20_000


@pytest.mark.slow
@pytest.mark.parametrize("flat", ["", "500kB"])
def test_all_rows_do_the_same_work(bench, tmp_path, flat):
    out, folder = tmp_path / "result.json", tmp_path / "work"
    folder.mkdir()
    done = bench("--size", "500kB", "--flat", flat, "--folder", str(folder), "--json", "--out", str(out))
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result == json.loads(out.read_text(encoding="utf-8"))
    (ours, floor, peer, _), small = result["rows"][:4], result["rows"][4:]
    assert [row["name"] for row in result["rows"][:4]] == ["sojourn", "tokenizer", "datasets", "second call"]
    assert [row["name"] for row in small] == (["sojourn"] if flat else [])
    for key in ("records", "documents", "tokens", "trained_tokens"):
        assert ours[key] == peer[key] > 0
    assert floor["documents"] == ours["records"] and floor["tokens"] >= ours["tokens"]
    assert 0 < ours["trained_tokens"] < ours["tokens"] and all(row["tokens"] < ours["tokens"] for row in small)
    assert all(row["peak_memory"] > 2**20 for row in (ours, floor, peer, *small))
    assert (
        len(result["checks"]) == (5 if flat else 4)
        and result["versions"]["datasets"]
        and result["cpu"]
        and result["date"]
    )
    assert not list(folder.iterdir())


@pytest.mark.slow
def test_a_template_without_generation_tags_gives_the_peer_the_same_mask(bench, tmp_path):
    from sojourn.config.data import DataConfig
    from sojourn.data.tokenize.tokenizer import train_tokenizer

    bundle = train_tokenizer(DataConfig(vocab_size=2000), ["some words to learn from"] * 10, tmp_path)
    bundle.save(tmp_path / "tokenizer", None, ROW_LENGTH)
    (tmp_path / "tokenizer" / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    done = bench("--size", "500kB", "--flat", "", "--tokenizer", str(tmp_path / "tokenizer"), "--json")
    assert done.returncode == 0, done.stderr
    ours, floor, peer, _ = json.loads(done.stdout)["rows"]
    assert (
        ours["truncated"] > 0 and floor["tokens"] > ours["tokens"]
    )  # tokens of single letters: long chats are truncated
    assert ours["trained_tokens"] == peer["trained_tokens"] > 0


@pytest.fixture
def bench(fork_server):
    return partial(fork_server.run, "bench", "prepare", "--workers", "2", fork_children=True)


def test_best_fit_fills_rows_with_whole_documents():
    lengths = [2048, 1500, 548, 1000, 1048, 3]
    rows = best_fit(lengths)
    assert sorted(number for row in rows for number in row) == list(range(6))
    assert [sum(lengths[number] for number in row) for row in rows] == [2048, 2048, 2048, 3]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--size", "much"], "--size: “much” given; allowed: a size such as 500MB or 24GiB"),
        (["--size", "1kB"], "--size: “1kB” given; the minimum is 500kB"),
        (["--flat", "1MB,many"], "--flat: “many” given; allowed: a size such as 500MB or 24GiB"),
        (["--tokenizer", "nowhere"], "--tokenizer: nowhere: no folder with a tokenizer.json"),
        (["--folder", "nowhere"], "--folder: nowhere: no such folder"),
        (["--out", "nowhere/a.json"], "--out: nowhere: no such folder"),
        (["--size", "900TB"], "GB are needed (four times the largest size)"),
    ],
    ids=lambda value: value[0] + " " + value[1] if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line(args, message, home: Path):
    done = called("bench", "prepare", *args)
    assert done.returncode == 2 and done.stdout == ""
    assert len(done.stderr.splitlines()) == 1 and message in done.stderr
